"""Sees a forward that writes to the parameters, as `max_norm` of `nn.Embedding` does.

Such a forward has no place among several: what one micro-batch computes would depend on those that ran before
it on the same rank, and ranks would change their parameters differently, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from torch import nn

from paceline.errors import TaskError
from paceline.slot import Slot

_version = attrgetter("_version")


class Steady:
    """Parameters that only an update may write to.

    Not seen: a write to `parameter.data`, which PyTorch does not count.

    Args:
        parameters: by slot. Their version counters are read twice a forward, and cost nothing beside it.
    """

    def __init__(self, parameters: Mapping[Slot, nn.Parameter]) -> None:
        self._parameters, self._own = parameters, [*parameters.values()]
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before = [*map(_version, self._own)]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Compare with what was before a forward.

        Raises:
            TaskError: it wrote to a parameter.
        """
        if error is not None or self._before == (after := [*map(_version, self._own)]):
            return
        before = self._before
        changed = [s.name for s, a, b in zip(self._parameters, before, after, strict=True) if a != b]
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise TaskError(
            f"the forward changes the parameter '{changed[0]}'{others}, as max_norm of nn.Embedding does:"
            " what other micro-batches compute would depend on which rank runs them",
            next_step="bound it after the update, in an optimizer of your own, and leave max_norm out;"
            " or train in one process with batch.shards = 1",
        )
