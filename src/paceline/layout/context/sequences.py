"""A model on a part of every sequence: the block in which a micro-batch runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.comm import Net
from paceline.errors import TaskError
from paceline.layout.context.attention import OverAllRanks
from paceline.layout.context.part import Part
from paceline.mesh import Group
from paceline.task import CutPositions


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
        """See `Holding.seen`.

        Raises:
            TaskError: the task cuts nothing, or cannot be cut.
        """
        part = Part(self._group.size, self._group.rank)
        own = self._sequence(batch, part)
        if not part.length:
            raise TaskError(
                "Task.sequence(batch, part) has not called part(x, dim): every rank would run all positions",
                next_step="return part(x, dim) of each tensor that has positions along a dimension",
            )
        with OverAllRanks(part, self._group, self._net):
            yield own
