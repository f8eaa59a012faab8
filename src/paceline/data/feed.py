"""The feed: which units there are, and how a rule reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.data.loader import Loader, Stream
from paceline.data.work import LockstepWork, Unit


@dataclass(frozen=True, eq=False)
class Feed:
    """What a rule trains on.

    Args:
        work: this replica's units of any step.
        loader: reads them.
        num_steps: the length of the run.
    """

    work: LockstepWork
    loader: Loader
    num_steps: int

    def open(self, units: Iterable[Unit]) -> Stream:
        """Start reading some units; whoever opens a stream closes it."""
        return self.loader.open(units)

    def from_step(self, step: int) -> Stream:
        """This replica's units from a step to the end of the run."""
        return self.open(self._units(step))

    def _units(self, step: int) -> Iterator[Unit]:
        for k in range(step, self.num_steps):
            yield from self.work.units(k)
