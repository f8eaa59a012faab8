"""The outer optimizer: where all replicas were when they met last, and what it makes of how they moved.

Source: Douillard et al. 2023, DiLoCo, arXiv:2311.08105, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.comm.reduction.gradients import GradientReduction
from paceline.comm.tally import StepTally
from paceline.parallel.model_runner import ModelRunner
from paceline.state.slot import SlotIndex, TensorPiece, TensorSlot
from paceline.state.train_state import LossScale, TrainState
from paceline.sync.update import GradientNorm, UpdateStep, update_parts


class ConstantRate:
    """The schedule of an outer optimizer."""

    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float:
        """Change nothing."""
        return 1.0


@dataclass(frozen=True)
class OuterOptimizer:
    """What is done with the mean movement of a round.

    Args:
        lr: 1 without momentum is plain averaging.
        momentum: Nesterov's.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def optimizer(self, anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD over the parameters that the replicas started a round from; a rank may have none of them."""
        return torch.optim.SGD(
            [{"params": [*anchors]}],
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            foreach=True,
        )


@dataclass(frozen=True)
class OuterStep:
    """What an agreement does.

    Args:
        outer: what is done with their mean movement.
        norm: of the movement of a whole replica; collective over its ranks.
        bring: brings what a rank computes with up to date once what it updates has changed; collective over
            the ranks of its replica.
    """

    outer: OuterOptimizer
    norm: GradientNorm
    bring: Callable[[], None] | None


def copy_anchors(runner: ModelRunner) -> dict[TensorSlot, nn.Parameter]:
    """What a rank updates, as it is now; copies, by slot."""
    return {slot: nn.Parameter(p.detach().clone()) for slot, p in runner.sharded_model.updates.items()}


class ParameterDelta:
    """Some tensors that have moved from where all were: of each the part that this rank updates.

    Args:
        anchors: where all were, by slot; there may be none.
        reducer: sums movements over the replicas; its coding and residuals are those of any reducer.
    Attributes:
        share: what a value of their mean moves a parameter by, at once.
    """

    def __init__(
        self,
        anchors: Mapping[TensorSlot, nn.Parameter],
        runner: ModelRunner,
        step: OuterStep,
        reducer: GradientReduction,
    ) -> None:
        self.anchors, self.reducer, self._whole = anchors, reducer, 1.0
        outer, self._bring = step.outer, step.bring
        self.share = outer.lr * (1.0 + outer.momentum)
        self._updates: list[Tensor] = [runner.sharded_model.updates[slot] for slot in anchors]
        state = TrainState(runner.sharded_model, outer.optimizer(anchors.values()), LossScale())
        self._step = UpdateStep(state, anchors, update_parts(ConstantRate(), norm=step.norm))

    @torch.no_grad()
    def begin(self) -> None:
        """All are at the same place."""
        if self._updates:
            torch._foreach_copy_([*self.anchors.values()], self._updates)

    @torch.no_grad()
    def leave(self, count: float, whole: float) -> None:
        """Launch the sum of what has moved; collective.

        Args:
            count: its weight: items of this replica.
            whole: about the sum of all weights, equal on all ranks. So what coding loses is a part of a mean,
                however many items a round has.
        """
        self._whole = whole or 1.0
        self.reducer.begin()
        for (slot, anchor), mine in reversed([*zip(self.anchors.items(), self._updates, strict=True)]):
            self.reducer.ready(slot, (anchor - mine) * (count / self._whole))
        self.reducer.close()

    @torch.no_grad()
    def arrive(self, tally: StepTally) -> None:
        """Step from where all were; collective.

        Args:
            tally: with the items of all.
        """
        tally = replace(tally, count=tally.count / self._whole)
        if self._step.apply(self.reducer.finish(), tally).applied:
            self.reducer.commit()
        else:  # nobody has moved: what was sent of earlier losses has gone nowhere
            self.reducer.abort()

    @torch.no_grad()
    def mix(self, mixing: float) -> None:
        """Go on from there, with this share of what this rank has; collective over its replica."""
        theirs: list[Tensor] = [*self.anchors.values()]
        if theirs and mixing:
            torch._foreach_mul_(self._updates, mixing)
            torch._foreach_add_(self._updates, theirs, alpha=1.0 - mixing)
        elif theirs:
            torch._foreach_copy_(self._updates, theirs)
        if self._bring is not None:
            self._bring()

    def pieces(self) -> list[TensorPiece]:
        """Momentum, by parameter: the part that this rank updates."""
        states = self._step.state.optimizer.state
        return [
            TensorPiece(replace(slot, name=f"{_MOMENTUM_PREFIX}{slot.name}"), buffer)
            for slot, anchor in self.anchors.items()
            if (buffer := states.get(anchor, {}).get("momentum_buffer")) is not None
        ]

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """The same part of what was saved."""
        parts = {f"{_MOMENTUM_PREFIX}{slot.name}": slot.index for slot in self.anchors}
        return {name: index for name, index in parts.items() if name in shapes}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `pieces`."""
        states = self._step.state.optimizer.state
        states.clear()
        for slot, anchor in self.anchors.items():
            if (found := tensors.get(f"{_MOMENTUM_PREFIX}{slot.name}")) is not None:
                states[anchor] = {"momentum_buffer": torch.empty_like(anchor).copy_(found).detach()}


_MOMENTUM_PREFIX = "momentum/"
