"""The server of federated rounds: the weights at the start of a round, and the optimizer that moves them.

Small parameters lie next to each other in one vector, so that a round handles a few vectors and not every
parameter: a client of a few samples costs less than the calls that would handle its tensors one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot

_VECTOR_VALUES = 1 << 18
_VECTOR_NAME = "#updates"


class ServerStep(ExtraState):
    """The server optimizer and the weights at the start of a round.

    Args:
        parameters: of this rank, by slot; whole tensors.
        build: makes the optimizer of float64 copies of them.
    Attributes:
        start: the weights at the start of the round, in the dtype of the parameters.
        wide: the same in float64, which the optimizer steps; views of `vectors`.
        vectors: by slot; a slot of a vector is what a reduction sums.
    """

    def __init__(
        self,
        parameters: Mapping[TensorSlot, nn.Parameter],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ) -> None:
        self.parameters: list[Tensor] = [*parameters.values()]
        self.start = [p.detach().clone() for p in self.parameters]
        self._members = _plan_vectors(self.parameters)
        self.vectors: dict[TensorSlot, Tensor] = {}
        views: dict[int, Tensor] = {}
        for number, members in enumerate(self._members):
            vector = torch.cat([_widened(self.parameters[index]).view(-1) for index in members])
            self.vectors[TensorSlot.whole(f"{_VECTOR_NAME}/{number}", vector)] = vector
            views |= zip(members, self._split(members, vector), strict=True)
        self.wide = {slot: nn.Parameter(views[index]) for index, slot in enumerate(parameters)}
        self.optimizer = build([{"params": [*self.wide.values()]}])

    def _split(self, members: Sequence[int], vector: Tensor) -> list[Tensor]:
        """Return views of a vector with the shapes of its parameters."""
        shapes = [self.start[index].shape for index in members]
        pieces = vector.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the weights at the start of a round."""
        torch._foreach_copy_(self.start, self.parameters)
        torch._foreach_copy_([*self.wide.values()], self.start)

    @torch.no_grad()
    def load_start(self) -> None:
        """Load the weights from the start of the round into the model, for the next client."""
        torch._foreach_copy_(self.parameters, self.start)

    @torch.no_grad()
    def client_update(self) -> list[Tensor]:
        """Return the differences of the present weights and those at the start, a float64 vector each."""
        weights = [p.unsqueeze(0) for p in self.parameters]
        return [update[0] for update in self.client_updates(weights)]

    @torch.no_grad()
    def client_updates(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the differences of the weights of several clients and those at the start.

        Args:
            weights: of each parameter [clients, ...].
        Returns:
            For each of `vectors` the differences in float64, [clients, values].
        """

        def rows(values: Tensor) -> Tensor:
            return values.reshape(len(values), values[0].numel())

        return [
            torch.cat([rows(weights[index]) for index in members], 1).to(start.dtype).sub_(start)
            for members, start in zip(self._members, self.vectors.values(), strict=True)
        ]

    def by_parameter(self, update: Sequence[Tensor]) -> dict[TensorSlot, Tensor]:
        """Return views of the vectors of one update, by the slot of the parameter."""
        views: dict[int, Tensor] = {}
        for members, vector in zip(self._members, update, strict=True):
            views |= zip(members, self._split(members, vector), strict=True)
        return {slot: views[index] for index, slot in enumerate(self.wide)}

    @torch.no_grad()
    def apply(self, sums: Mapping[TensorSlot, Tensor | None], divisor: float) -> float:
        """Apply the mean update, and write the new weights to the model.

        Args:
            sums: of the weighted updates, by the slots of `vectors`.
            divisor: the sum of the weights.
        Returns:
            The norm of the mean update.
        """
        # The optimizer descends, so the mean update is a gradient with its sign changed.
        totals = [(sums[slot], vector) for slot, vector in self.vectors.items()]
        means = [torch.zeros_like(v) if total is None else total / -divisor for total, v in totals]
        gradients = self.by_parameter(means)
        for slot, p in self.wide.items():
            p.grad = gradients[slot]
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, [*self.wide.values()])
        return norm_of(means)

    def pieces(self) -> list[TensorPiece]:
        """Return the moments of the optimizer, `MOMENT/NAME`."""
        return [
            TensorPiece(replace(slot, name=f"{name}/{slot.name}"), value)
            for slot, p in self.wide.items()
            for name, value in self.optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor)
        ]

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        return dict.fromkeys(shapes, ())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `pieces` returned; a state without moments was saved before the first round."""
        self.optimizer.state.clear()
        by_name = {slot.name: p for slot, p in self.wide.items()}
        for name, value in tensors.items():
            moment, _, parameter = name.partition("/")
            if parameter in by_name:
                self.optimizer.state[by_name[parameter]][moment] = value.detach().clone()


def norm_of(vectors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of all values of some vectors."""
    norms = [float(torch.linalg.vector_norm(vector)) for vector in vectors]
    return norms[0] if len(norms) == 1 else float(torch.linalg.vector_norm(torch.tensor(norms or [0.0])))


def _plan_vectors(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the parameters of each vector: neighbours of one kind, up to a size."""
    vectors, kind, size = list[list[int]](), None, 0
    for index, p in enumerate(parameters):
        if p.is_complex() != kind or size + p.numel() > _VECTOR_VALUES:
            vectors.append([])
            kind, size = p.is_complex(), 0
        vectors[-1].append(index)
        size += p.numel()
    return vectors


def _widened(p: Tensor) -> Tensor:
    return p.detach().to(torch.complex128 if p.is_complex() else torch.float64, copy=True).contiguous()
