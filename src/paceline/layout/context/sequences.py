"""A model on a part of every sequence: the block in which a micro-batch runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from paceline.comm import Net
from paceline.errors import TaskError
from paceline.layout.context.attention import OverAllRanks
from paceline.layout.context.part import Part
from paceline.mesh import Group
from paceline.task import CutPositions


class Trial(NamedTuple):
    """A batch that is run to be looked at, in the parameters' type.

    Args:
        is_whole: every rank runs all positions, as without a cut.
    """

    batch: Any
    is_whole: bool


class SplitSequences:
    """Makes such blocks.

    Args:
        sequence: the task's.
        group: the ranks among which sequences are split, on a process group of their own: what attention
            sends has an order of its own.
    """

    def __init__(self, sequence: Callable[[Any, CutPositions], Any], group: Group, net: Net) -> None:
        self._sequence, self._group, self._net = sequence, group, net

    @contextmanager
    def seen(self, batch: Any) -> Iterator[Any]:
        """See `Holding.seen`; of a `Trial` all of it, or its part.

        Raises:
            TaskError: the task cuts nothing, or cannot be cut.
        """
        with ExitStack() as around:
            if isinstance(_get_current_function_mode(), OverAllRanks):  # an own loop evaluates on its way
                around.enter_context(_pop_mode_temporarily())
            if not isinstance(batch, Trial):
                yield self._entered(batch, around)
                return
            around.enter_context(_in_own_types())
            yield batch.batch if batch.is_whole else self._entered(batch.batch, around)

    def _entered(self, batch: Any, around: ExitStack) -> Any:
        """This rank's part of a batch, whose mode is on from here."""
        part = Part(self._group.size, self._group.rank)
        own = self._sequence(batch, part)
        if not part.length:
            raise TaskError(
                "Task.sequence(batch, part) has not called part(x, dim): every rank would run all positions",
                next_step="return part(x, dim) of each tensor that has positions along a dimension",
            )
        around.enter_context(OverAllRanks(part, self._group, self._net))
        return own


@contextmanager
def _in_own_types() -> Iterator[None]:
    """Without the casts of a lower precision."""
    with ExitStack() as around:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            around.enter_context(torch.autocast(kind, enabled=False))
        yield
