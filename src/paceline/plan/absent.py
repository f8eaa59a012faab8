"""Ranks that are not there, for what is sent straight through a process group: shapes and no values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch import Tensor


@dataclass(frozen=True)
class Carried:
    """A call that is over.

    Args:
        tensors: it keeps them, as one of Gloo does.
    """

    tensors: tuple[Tensor, ...]

    def wait(self, timeout: timedelta) -> None:
        """Nothing is under way."""

    def is_completed(self) -> bool:
        """It is over."""
        return True


@dataclass
class AbsentGroup:
    """Takes the place of a process group, and of what holds it.

    Args:
        largest: bytes of the largest call so far, of what is sent and what comes.
    """

    largest: int = 0

    @property
    def handle(self) -> AbsentGroup:
        return self

    def alltoall_base(
        self, out: Tensor, source: Tensor, coming: Sequence[int], sizes: Sequence[int]
    ) -> Carried:
        """What comes is in `out`, as it was."""
        self.largest = max(self.largest, out.nbytes + source.nbytes)
        return Carried((out, source))


@dataclass(frozen=True)
class AbsentGroups:
    """Makes such groups; see `paceline.lease.Lease`.

    Args:
        made: so far.
    """

    made: list[AbsentGroup] = field(default_factory=list)

    def make(self, name: str, ranks: tuple[int, ...]) -> AbsentGroup:
        """A group of any ranks."""
        self.made.append(AbsentGroup())
        return self.made[-1]

    @property
    def largest(self) -> int:
        """See `AbsentGroup`; of any of them."""
        return max((one.largest for one in self.made), default=0)
