"""The reducer of a stage: sums of its own parameters over the replicas, named by their place in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.comm import Gradients, Net, Reducer
from paceline.comm.reducer import WrappedReducer
from paceline.layout.pipeline.stage import Cut
from paceline.mesh import Group


class StageReducer(WrappedReducer):
    """Gives an inner reducer, over the parameters of one stage, the indices of the whole model.

    A tied parameter is held by several stages. Its gradient is summed over the stages; then the first of them
    sums it over the replicas, counts it in its norm, and gives the others the result: the copies get the same
    bits, although buckets, or the blocks of a codec, fall differently on other stages.

    Args:
        inner: over the parameters that this stage reduces (`Cut.reduced`), in their order.
        parameters: of the whole model.
        stages: all stages of the replica.
    Wire: beside the inner reducer's, an all_reduce and a broadcast over the stages for each tied parameter.
    """

    def __init__(
        self, inner: Reducer, cut: Cut, parameters: Sequence[nn.Parameter], stages: Group, net: Net
    ) -> None:
        super().__init__(inner)
        self._cut, self._parameters, self._stages, self._net = cut, parameters, stages, net
        self._local = {index: k for k, index in enumerate(cut.reduced)}
        self._held: dict[int, Tensor | None] = {}

    def begin(self) -> None:
        """Open a step."""
        self._held = {}
        self.inner.begin()

    def ready(self, index: int, grad: Tensor | None) -> None:
        """Keep what is tied, pass on the rest."""
        if index in self._cut.tied:
            self._held[index] = grad
        else:
            self.inner.ready(self._local[index], grad)

    def finish(self) -> Gradients:
        """Sums by index of the whole model; None for what other stages train."""
        for index in sorted(self._cut.tied):
            self._sum_tied(index)
        grads = self.inner.finish()
        tensors: list[Tensor | None] = [None] * len(self._parameters)
        for index, k in self._local.items():
            tensors[index] = grads.tensors[k]
        return replace(grads, tensors=tensors, flats=[*grads.flats, *self._share(tensors)])

    def _sum_tied(self, index: int) -> None:
        """Sum over the stages; the first that holds it goes on with the sum."""
        value = self._over_stages(index, self._held.get(index))
        if index in self._local:
            self.inner.ready(self._local[index], value)

    def _over_stages(self, index: int, mine: Tensor | None) -> Tensor:
        value = torch.zeros_like(self._parameters[index].data) if mine is None else mine.clone()
        total: Tensor = self._net.all_reduce(value, self._stages).wait()
        return total

    def _share(self, tensors: list[Tensor | None]) -> list[Tensor]:
        """Broadcast the sums of tied parameters; returns those that came from another stage."""
        arrived = []
        for index, first in sorted(self._cut.tied.items()):
            mine = tensors[index]
            value = torch.empty_like(self._parameters[index].data) if mine is None else mine
            self._net.broadcast(value, self._stages, first).wait()
            if mine is None and self._cut.own[index]:
                tensors[index] = value
                arrived.append(value)
        return arrived

    def residuals(self) -> Sequence[tuple[str, int, Tensor]]:
        """By index of the whole model."""
        return [(side, self._cut.reduced[k], value) for side, k, value in self.inner.residuals()]

    def set_residuals(self, found: Mapping[tuple[str, int], Tensor]) -> None:
        """The inverse of `residuals`."""
        own = {(side, self._local[i]): v for (side, i), v in found.items() if i in self._local}
        self.inner.set_residuals(own)
