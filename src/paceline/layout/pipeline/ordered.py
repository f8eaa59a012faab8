"""The reducer of a stage whose sums have one order: tied weights are summed over the stages by shard."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.layout.pipeline.reducer import StageReducer


class OrderedStageReducer(StageReducer):
    """Like `StageReducer`, but the parts of a tied weight's gradient meet inside each shard, as they do in
    the backward of a process that holds them all.

    Args:
        inner: takes gradients by unit.
        others: as for `StageReducer`.
    Wire: for each tied parameter an all_reduce over the stages for every shard, and a broadcast.
    Exactness: bitwise while a tied weight is used by two modules: then there is one addition.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._place = range(0)
        self._units: list[range] = []
        self._grads: dict[tuple[int, range], Tensor | None] = {}

    def begin(self) -> None:
        """Open a step."""
        self._units, self._grads = [], {}
        super().begin()

    def unit(self, shards: range, is_last: bool) -> None:
        """What is ready from now on belongs to these shards."""
        self._place = shards
        self._units.append(shards)
        self.inner.unit(shards, is_last)

    def ready(self, index: int, grad: Tensor | None) -> None:
        """Keep what is tied, pass on the rest."""
        if index in self._cut.tied:
            self._grads[index, self._place] = grad
        else:
            self.inner.ready(self._local[index], grad)

    def _sum_tied(self, index: int) -> None:
        for place in self._units:
            value = self._over_stages(index, self._grads.get((index, place)))
            if index in self._local:
                self.inner.unit(place, is_last=place == self._units[-1])
                self.inner.ready(self._local[index], value)
