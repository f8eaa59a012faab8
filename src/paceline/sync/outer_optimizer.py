"""The outer optimizer of DiLoCo, and the parameter deltas that it steps on.

A delta is the difference between the parameters at the start of a round, the anchors, and those of a replica
at its end. The outer optimizer takes the mean delta as its gradient and steps from the anchors.

The server of federated rounds takes the mean update of its clients in the same way, by SGD with heavy-ball
momentum or by an adaptive rule.

Source: Douillard et al. 2023, DiLoCo, arXiv:2311.08105, Algorithm 1; Reddi et al. 2021, Adaptive Federated
Optimization, arXiv:2003.00295, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.reduction.gradients import GradientReduction
from paceline.comm.tally import StepTally
from paceline.parallel.model_runner import ModelRunner
from paceline.state.slot import SlotIndex, TensorPiece, TensorSlot
from paceline.state.train_state import LossScale, TrainState
from paceline.sync.update import GradientNorm, UpdateStep, update_parts


class ConstantRate:
    """The rate schedule of an outer optimizer, which keeps its rate."""

    def apply(self, optimizer: torch.optim.Optimizer, update: int) -> float:
        """Return 1 and change nothing."""
        return 1.0


@dataclass(frozen=True)
class OuterOptimizer:
    """Settings of the outer optimizer.

    Args:
        lr: 1 without momentum averages the replicas.
        momentum: Nesterov momentum.
    """

    lr: float = 1.0
    momentum: float = 0.0

    def optimizer(self, anchors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build SGD over the anchors; a rank can have none of them."""
        # A group, because SGD rejects an empty list of parameters but accepts an empty group.
        return torch.optim.SGD(
            [{"params": [*anchors]}],
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            foreach=True,
        )


SECOND_MOMENTS: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "adagrad": lambda v, square, beta: v + square,
    "yogi": lambda v, square, beta: v - (1.0 - beta) * square * torch.sign(v - square),
    "adam": lambda v, square, beta: beta * v + (1.0 - beta) * square,
}
"""The next second moment of each adaptive rule, from the present one and the square of the update."""


class AdaptiveServer(torch.optim.Optimizer):
    """FedAdagrad, FedYogi or FedAdam: an adaptive step on the mean update of clients.

    m = b1 m + (1 - b1) g, then v by `SECOND_MOMENTS`, then w = w - lr m / (sqrt(v) + eps), without a bias
    correction; v starts at eps ** 2. FedAdagrad has m = g.

    Args:
        params: parameters, or groups of them.
        name: "adagrad", "yogi" or "adam".
        lr: rate of the server.
        betas: decay of the first and the second moment.
        eps: the adaptivity, tau in the paper.
    Source: Reddi et al. 2021, arXiv:2003.00295, Algorithm 2.
    """

    def __init__(
        self, params: Any, name: str, lr: float, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self._next_moment, self._has_first_moment = SECOND_MOMENTS[name], name != "adagrad"

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every parameter that has a gradient, the mean update with its sign changed."""
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "exp_avg_sq" not in state:
                    state["exp_avg_sq"] = torch.full_like(p, eps**2)
                    state["exp_avg"] = torch.zeros_like(p)
                first = p.grad
                if self._has_first_moment:
                    first = state["exp_avg"] = beta1 * state["exp_avg"] + (1.0 - beta1) * p.grad
                state["exp_avg_sq"] = self._next_moment(state["exp_avg_sq"], p.grad * p.grad, beta2)
                p.sub_(group["lr"] * first / (state["exp_avg_sq"].sqrt() + eps))


@dataclass(frozen=True)
class OuterStep:
    """The outer optimizer, with the collectives before and after its step.

    Args:
        outer: settings of the optimizer.
        norm: the norm of the delta of a whole replica; collective over its ranks.
        bring: updates what a rank computes with after what it updates has changed; collective over the
            ranks of its replica.
    """

    outer: OuterOptimizer
    norm: GradientNorm
    bring: Callable[[], None] | None


def copy_anchors(runner: ModelRunner) -> dict[TensorSlot, nn.Parameter]:
    """Return copies of what a rank updates, by slot."""
    return {slot: nn.Parameter(p.detach().clone()) for slot, p in runner.sharded_model.updates.items()}


class ParameterDelta:
    """The change of some parameters in a round: of each the part that this rank updates.

    Args:
        anchors: copies of the parameters at the start of a round, by slot; can be empty.
        runner: this rank's part of the model.
        step: the outer optimizer and its collectives.
        reducer: sums deltas over the replicas; it codes them and keeps the quantisation error.
    Attributes:
        share: how far an outer step moves a parameter per unit of the mean delta of its round.
    """

    def __init__(
        self,
        anchors: Mapping[TensorSlot, nn.Parameter],
        runner: ModelRunner,
        step: OuterStep,
        reducer: GradientReduction,
    ) -> None:
        self.anchors, self.reducer, self._total_items = anchors, reducer, 1.0
        outer, self._bring = step.outer, step.bring
        # Nesterov momentum applies a new delta twice at once: by itself, and through the momentum buffer.
        self.share = outer.lr * (1.0 + outer.momentum)
        self._updates: list[Tensor] = [runner.sharded_model.updates[slot] for slot in anchors]
        state = TrainState(runner.sharded_model, outer.optimizer(anchors.values()), LossScale())
        self._step = UpdateStep(state, anchors, update_parts(ConstantRate(), norm=step.norm))

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the parameters to the anchors; all replicas hold the same here."""
        if self._updates:
            torch._foreach_copy_([*self.anchors.values()], self._updates)

    @torch.no_grad()
    def start_sum(self, count: float, total_items: float) -> None:
        """Start the sum of the deltas; collective.

        Args:
            count: the weight of this replica: its items.
            total_items: about the sum of all weights, equal on all ranks. Dividing by it before coding makes
                the quantisation error a part of a mean, independent of the number of items in a round.
        """
        self._total_items = total_items or 1.0
        self.reducer.begin()
        # In reverse, as backward produces gradients: buckets are laid out in that order.
        for (slot, anchor), parameter in reversed([*zip(self.anchors.items(), self._updates, strict=True)]):
            self.reducer.ready(slot, (anchor - parameter) * (count / self._total_items))
        self.reducer.close()

    @torch.no_grad()
    def finish_sum(self, tally: StepTally) -> None:
        """Finish the sum and step from the anchors; collective.

        Args:
            tally: with the items of all replicas.
        """
        # The deltas were divided before the sum, so the update step divides by the rest only.
        tally = replace(tally, count=tally.count / self._total_items)
        if self._step.apply(self.reducer.finish(), tally).applied:
            self.reducer.commit()
        else:
            # No replica had items, so the mean was not applied: the codec keeps its previous error.
            self.reducer.abort()

    @torch.no_grad()
    def mix(self, mixing: float) -> None:
        """Move the parameters to the anchors, keeping the share `mixing` of their own values; collective."""
        anchors: list[Tensor] = [*self.anchors.values()]
        if anchors and mixing:
            torch._foreach_mul_(self._updates, mixing)
            torch._foreach_add_(self._updates, anchors, alpha=1.0 - mixing)
        elif anchors:
            torch._foreach_copy_(self._updates, anchors)
        if self._bring is not None:
            # Shards and other parts hold new values now; ranks that compute with them need them before the
            # next step.
            self._bring()

    def pieces(self) -> list[TensorPiece]:
        """Return the momentum of what this rank updates, by parameter."""
        states = self._step.state.optimizer.state
        return [
            TensorPiece(replace(slot, name=f"{_MOMENTUM_PREFIX}{slot.name}"), buffer)
            for slot, anchor in self.anchors.items()
            if (buffer := states.get(anchor, {}).get("momentum_buffer")) is not None
        ]

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """Return this rank's part of the momentum that was saved."""
        parts = {f"{_MOMENTUM_PREFIX}{slot.name}": slot.index for slot in self.anchors}
        return {name: index for name, index in parts.items() if name in shapes}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `pieces` returned."""
        states = self._step.state.optimizer.state
        # A checkpoint without momentum was saved before the first outer step, so no old buffer may stay.
        states.clear()
        for slot, anchor in self.anchors.items():
            if (momentum := tensors.get(f"{_MOMENTUM_PREFIX}{slot.name}")) is not None:
                states[anchor] = {"momentum_buffer": torch.empty_like(anchor).copy_(momentum).detach()}


_MOMENTUM_PREFIX = "momentum/"
