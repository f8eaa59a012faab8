"""The outer optimizer: where all replicas were when they met last, and what it makes of how they moved.

Source: Douillard et al. 2023, DiLoCo, arXiv:2311.08105, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.comm import Reduction, Tally
from paceline.layout import Placed
from paceline.slot import Piece, Slot
from paceline.state import LossScale, TrainState
from paceline.sync.update import UpdateStep, update_parts


class ConstantRate:
    """The schedule of an outer optimizer."""

    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float:
        """Change nothing."""
        return 1.0


@dataclass(frozen=True)
class Outer:
    """What is done with the mean movement of a round.

    Args:
        lr: 1 without momentum is plain averaging.
        momentum: Nesterov's.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def optimizer(self, anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD over the parameters that the replicas started a round from."""
        return torch.optim.SGD(
            anchors, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0, foreach=True
        )


def anchors_of(placed: Placed) -> dict[Slot, nn.Parameter]:
    """What a rank computes with, as it is now; copies, by slot."""
    return {slot: nn.Parameter(p.detach().clone()) for slot, p in placed.holding.computes.items()}


class Movement:
    """Some tensors that have moved from where all were.

    Args:
        anchors: where all were, by slot.
        reducer: sums movements over the replicas; its coding and residuals are those of any reducer.
    Attributes:
        share: what a value of the last sum moved its parameter by, at once; 0: there was none.
    """

    def __init__(
        self, anchors: Mapping[Slot, nn.Parameter], placed: Placed, outer: Outer, reducer: Reduction
    ) -> None:
        self.anchors, self.reducer, self.share = anchors, reducer, 0.0
        self._rate = outer.lr * (1.0 + outer.momentum)
        self.computes: list[Tensor] = [placed.holding.computes[slot] for slot in anchors]
        state = TrainState(placed.holding, outer.optimizer(anchors.values()), LossScale())
        self._step = UpdateStep(state, anchors, update_parts(ConstantRate()))

    @torch.no_grad()
    def begin(self) -> None:
        """All are at the same place."""
        torch._foreach_copy_([*self.anchors.values()], self.computes)

    @torch.no_grad()
    def leave(self, count: float) -> None:
        """Launch the sum of what has moved, weighted by so many items; collective."""
        self.reducer.begin()
        for (slot, anchor), mine in reversed([*zip(self.anchors.items(), self.computes, strict=True)]):
            self.reducer.ready(slot, (anchor - mine) * count)
        self.reducer.close()

    @torch.no_grad()
    def arrive(self, tally: Tally) -> None:
        """Step from where all were; collective.

        Args:
            tally: with the items of all.
        """
        self._step.apply(self.reducer.finish(), tally)
        self.reducer.commit()
        if tally.count:
            self.share = self._rate / tally.count

    @torch.no_grad()
    def mix(self, mixing: float) -> None:
        """Go on from there, with this share of what this rank has."""
        theirs: list[Tensor] = [*self.anchors.values()]
        if not mixing:
            torch._foreach_copy_(self.computes, theirs)
            return
        torch._foreach_mul_(self.computes, mixing)
        torch._foreach_add_(self.computes, theirs, alpha=1.0 - mixing)

    def pieces(self) -> list[Piece]:
        """Momentum, by parameter."""
        states = self._step.state.optimizer.state
        return [
            Piece(Slot.whole(f"{_MOMENTUM}{slot.name}", buffer), buffer)
            for slot, anchor in self.anchors.items()
            if (buffer := states.get(anchor, {}).get("momentum_buffer")) is not None
        ]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `pieces`."""
        states = self._step.state.optimizer.state
        states.clear()
        for slot, anchor in self.anchors.items():
            if (found := tensors.get(f"{_MOMENTUM}{slot.name}")) is not None:
                states[anchor] = {"momentum_buffer": torch.empty_like(anchor).copy_(found).detach()}


_MOMENTUM = "momentum/"
