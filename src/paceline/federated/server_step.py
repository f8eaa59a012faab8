"""The server of federated rounds: the weights at the start of a round, and the optimizer that moves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot


class ServerStep(ExtraState):
    """The server optimizer and the weights at the start of a round.

    Args:
        parameters: of this rank, by slot; whole tensors.
        build: makes the optimizer of float64 copies of them.
    Attributes:
        start: the weights at the start of the round, in the dtype of the parameters.
        wide: the same in float64, which the optimizer steps.
    """

    def __init__(
        self,
        parameters: Mapping[TensorSlot, nn.Parameter],
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ) -> None:
        self.parameters: list[Tensor] = [*parameters.values()]
        self.start = [p.detach().clone() for p in self.parameters]
        self.wide = {slot: nn.Parameter(_widened(p)) for slot, p in parameters.items()}
        self.optimizer = build([{"params": [*self.wide.values()]}])

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
        """Return the difference of the present weights and those at the start, in float64."""
        return [_widened(p).sub_(w) for p, w in zip(self.parameters, self.wide.values(), strict=True)]

    @torch.no_grad()
    def apply(self, sums: Mapping[TensorSlot, Tensor | None], divisor: float) -> float:
        """Apply the mean update, and write the new weights to the model.

        Args:
            sums: of the weighted updates.
            divisor: the sum of the weights.
        Returns:
            The norm of the mean update.
        """
        squares = 0.0
        for slot, p in self.wide.items():
            total = sums[slot]
            # The optimizer descends, so the mean update is a gradient with its sign changed.
            p.grad = torch.zeros_like(p) if total is None else total / -divisor
            squares += float(torch.linalg.vector_norm(p.grad)) ** 2
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, [*self.wide.values()])
        return math.sqrt(squares)

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


def _widened(p: Tensor) -> Tensor:
    return p.detach().to(torch.complex128 if p.is_complex() else torch.float64, copy=True)
