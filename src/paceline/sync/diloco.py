"""Local SGD and DiLoCo: replicas train alone for H steps, then agree on where they went.

A round: every replica takes H steps of its own with its own optimizer. What it moved, weighted by the items
that it trained on, is summed over the replicas, and an outer optimizer takes that mean as its gradient. A
replica may be spread over ranks (shards, stages, tensors, positions): each rank sums what it updates with
those that update the same part in the other replicas, and keeps the outer momentum of that part.
Buffers move by the mean of what they moved on the replicas, weighted by micro-batches as in every-step.
With outer SGD of rate 1 the replicas are averaged; for H = 1 and inner SGD without a clip that is exactly
every-step.

Invariant: after a round all replicas hold equal parameters and buffers. The inner optimizers stay apart, and
all of them are state (`inner`).
Source: Stich 2019, Local SGD Converges Fast, arXiv:1805.09767, Algorithm 1; Douillard et al. 2023, DiLoCo,
arXiv:2311.08105, Algorithm 1 (inner AdamW, outer Nesterov).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from paceline.comm.reduction.gradients import GradientReduction
from paceline.comm.tally import StepTally
from paceline.data.work import TrainingFeed
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.placement import slot_bytes
from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot
from paceline.sync.every_step import EveryStep
from paceline.sync.local_rounds import LocalRound, LocalRoundLoop, TakeStep
from paceline.sync.outer_optimizer import OuterStep, ParameterDelta, copy_anchors
from paceline.sync.sync_rule import MemoryQuery, RuleMemory
from paceline.sync.update import UpdateStep


class DiLoCo(ExtraState):
    """H steps alone, then one agreement.

    Args:
        inner: the step of one replica.
        num_local_steps: H; the last round of a run may be shorter.
        outer: what the agreement does.
        reducer: makes what sums movements over the replicas.
        told: see `LocalRoundLoop`.
    Wire: every H steps one all_reduce of what a rank updates, and one of the tally, over the ranks that hold
        the same, of every replica one; inside a replica that of a step, and what follows an update.
    """

    def __init__(
        self,
        inner: EveryStep,
        num_local_steps: int,
        outer: OuterStep,
        reducer: Callable[[Mapping[TensorSlot, Tensor]], GradientReduction],
        runner: ModelRunner,
        **told: Any,
    ) -> None:
        self.inner, self._num_local_steps, self._alone = inner, num_local_steps, LocalRoundLoop(inner, **told)
        anchors = copy_anchors(runner)
        self.reducer = reducer(anchors)
        self._movement = ParameterDelta(anchors, runner, outer, self.reducer)
        self.movements = [self._movement]

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `Rule`: a round is H steps."""
        return self._alone.rounds(
            feed, runner, update_step, begin=self._begin, step=_take_step, meet=self._agree
        )

    def abort(self) -> None:
        """See `Rule`."""
        self.inner.abort()
        self.reducer.abort()

    def _begin(self, feed: TrainingFeed, step: int) -> int:
        self._movement.begin()
        return min(step + self._num_local_steps, feed.num_steps)

    def _agree(self, stretch: LocalRound, runner: ModelRunner) -> tuple[StepTally, Mapping[str, float]]:
        """Sum the movements, step from the anchors, and go on from there."""
        tally, told = self._alone.agree(stretch, runner, skipped=stretch.skipped)
        self._movement.leave(stretch.count, tally.count)
        self._movement.arrive(tally)
        self._movement.mix(0.0)
        return tally, told

    def pieces(self) -> list[TensorPiece]:
        """Momentum of the outer optimizer, by parameter."""
        return self._movement.pieces()

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """See `ExtraState`."""
        return self._movement.wanted(shapes)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `pieces`; a round that was under way is forgotten."""
        self._alone.forget()
        self._movement.load(tensors)


def plan_memory(asked: MemoryQuery) -> RuleMemory:
    """Where a round began, momentum of the outer optimizer, and buckets of movements, of what a rank updates.

    Movements are made tensor by tensor.
    """
    own, strategy = asked.sizes.updates, asked.recipe.strategy
    parts = [one.updates for one in asked.held.values() if one.updates is not None]
    momentum = own if strategy.rule.word == "diloco" and asked.recipe.outer.momentum else 0
    return RuleMemory(
        state=own + momentum,
        saved=momentum,
        wire=own if strategy.degrees["replica"] > 1 else 0,
        agreement=2 * max((slot_bytes(part, asked.item_bytes) for part in parts), default=0),
    )


def _take_step(stretch: LocalRound, take: TakeStep) -> None:
    take()
