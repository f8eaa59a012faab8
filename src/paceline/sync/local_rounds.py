"""What replicas that train alone do not have in common between two rounds: optimizers, and how far they are.

A replica without samples makes no update, an expert is used by some replicas only, and a rule that keeps
numbers of its own (a distance, a counter) has others on each.

Replicas that train alone for a while and then meet: the round, as all rules of this kind have it.

A round is a stretch of steps that a replica takes by itself, with all ranks that it is spread over. Rules
differ in where it ends, in what they do beside a step, and in how they meet: three functions that they hand
in.

Invariant: a round that an error has interrupted goes on with the step in which it was left. After a round all
ranks have the same tally, and buffers that have moved by the mean of what they moved on the ranks, weighted
by micro-batches as in every-step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.reduction.pending_residual import PendingResidual
from paceline.comm.tally import StepTally
from paceline.data.work import BatchStream, MicroBatchWork, TrainingFeed
from paceline.job.mesh import RankGroup
from paceline.observe.step_stats import LOCAL_PHASES, PhaseTimer, StepStats
from paceline.parallel.gradient_reduction import build_gradient_reduction
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot, strip_prefix
from paceline.state.train_state import TrainState
from paceline.sync.every_step import EveryStep, build_every_step
from paceline.sync.sync_rule import step_stats
from paceline.sync.update import UpdateResult, UpdateStep
from paceline.sync.work_assignment import EvenAssignment, SampleCountingStream

_REPLICA_AXIS = "replica"
_OPTIMIZER_PREFIX = "optimizer/"
_VALUES_NAME = "values"


class ReplicaOptimizerState(ExtraState):
    """The optimizer, the loss scale and the number of updates of every replica, under names of its own.

    Under another number of replicas each goes on from what the first one had.

    Args:
        replica: one rank of each.
        inside: the ranks of this one: each has tensors and a text of what it updates.
    """

    def __init__(self, state: TrainState, replica: RankGroup, inside: RankGroup) -> None:
        self._state, self._mine = state, f"{replica.rank} of {replica.size}"
        self._text = f"{_VALUES_NAME}/{inside.rank}" if inside.rank else _VALUES_NAME

    def pieces(self) -> list[TensorPiece]:
        """What this rank has of its replica: its tensors, and one text with the rest."""
        text = torch.frombuffer(bytearray(json.dumps(self._values()), "utf-8"), dtype=torch.uint8)
        found = [TensorPiece(TensorSlot.whole(self._text, text), text)]
        for piece in self._state.optimizer_pieces():
            name = piece.slot.name.removeprefix(_OPTIMIZER_PREFIX)
            found.append(TensorPiece(replace(piece.slot, name=f"tensors/{name}"), piece.tensor))
        return [TensorPiece(p.slot.on(_REPLICA_AXIS), p.tensor).under(self._mine) for p in found]

    def _values(self) -> dict[str, Any]:
        scale = self._state.scale
        return {
            "updates": self._state.updates,
            "scale": {"value": scale.value, "clean_steps": scale.clean_steps},
            "optimizer": self._state.kept.values(),
            "groups": self._state.groups.changed(),
        }

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """What this replica had, if there are as many replicas as then; of texts all that its ranks had."""
        prefix = f"{self._mine}/tensors/"
        own = {f"{_OPTIMIZER_PREFIX}{name}": shape for name, shape in strip_prefix(shapes, prefix).items()}
        found = {name.replace(_OPTIMIZER_PREFIX, prefix, 1): i for name, i in self._state.kept.wanted(own)}
        return found | {name: () for name in shapes if self._is_text(name)}

    def _is_text(self, name: str) -> bool:
        text = f"{self._mine}/{_VALUES_NAME}"
        return name == text or name.startswith(f"{text}/")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `ExtraState`."""
        texts = [json.loads(bytes(t.tolist())) for name, t in tensors.items() if self._is_text(name)]
        if not texts:
            return
        values, prefix, state = texts[0], f"{self._mine}/tensors/", self._state
        own = {f"{_OPTIMIZER_PREFIX}{name}": value for name, value in strip_prefix(tensors, prefix).items()}
        state.kept.take(own, {name: value for text in texts for name, value in text["optimizer"].items()})
        state.groups.restore(values["groups"])
        state.updates = values["updates"]
        state.scale = replace(state.scale, **values["scale"])


TakeStep = Callable[[], UpdateResult]
"""Takes a step of this replica."""


@dataclass
class LocalRound:
    """A round under way.

    Args:
        first: its first step.
        end: the step before which it ends.
        buffers: what it started from.
        taken: its steps so far.
        whole: about how many items each of them had on all replicas, whether they were applied or not.
        is_agreed: all ranks end it there, whatever they are asked from now on.
    """

    first: int
    end: int
    buffers: list[Tensor]
    taken: list[tuple[StepTally, UpdateResult]] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    is_agreed: bool = False

    @property
    def step(self) -> int:
        """The one that comes next."""
        return self.first + len(self.taken)

    @property
    def count(self) -> float:
        """Items that its updates were made of."""
        return sum(tally.count for tally, _ in self.taken)

    @property
    def skipped(self) -> float:
        """Steps that were not applied."""
        return float(sum(not update.applied for _, update in self.taken))

    def end_with(self, steps: Iterable[int]) -> None:
        """End it where the rank is that has come farthest, of all ranks; one step is taken at least."""
        self.end, self.is_agreed = max(self.first + 1, *steps), True


class LocalRoundLoop:
    """What the rules share.

    Args:
        inner: the step of one replica.
        replicas: the ranks that hold what this one holds, of every replica one.
        shares: which part of a batch this rank runs.
    """

    def __init__(
        self,
        inner: EveryStep,
        *,
        replicas: RankGroup,
        net: Net,
        phases: PhaseTimer,
        shares: EvenAssignment | None = None,
    ) -> None:
        self.inner, self._replicas, self._net, self._phases = inner, replicas, net, phases
        self.shares = shares or EvenAssignment()
        self._stretch: LocalRound | None = None

    def rounds(
        self,
        feed: TrainingFeed,
        runner: ModelRunner,
        update_step: UpdateStep,
        *,
        begin: Callable[[TrainingFeed, int], int],
        step: Callable[[LocalRound, TakeStep], None],
        meet: Callable[[LocalRound, ModelRunner], tuple[StepTally, Mapping[str, float]]],
    ) -> Iterator[StepStats]:
        """See `Rule`.

        Args:
            begin: begins a round with a step; says before which it ends.
            step: takes the next one, or finds that the round ends.
            meet: ends a round on all ranks; returns what they have done, and what is told beside the metrics.
        """
        state, update_step = update_step.state, self.shares.weighted(update_step)
        with ReopenedStream(feed) as reading:
            while state.step < feed.num_steps:
                self._phases.take()
                if self._stretch is None:
                    self._stretch = LocalRound(state.step, begin(feed, state.step), runner.buffers.values())
                stretch = self._stretch
                take = self._taking(stretch, reading, runner, update_step)
                while state.step < stretch.end:
                    step(stretch, take)
                self._phases.begin("communication")
                tally, told = meet(stretch, runner)
                self._stretch = None
                steps, update = range(stretch.first, stretch.end), stretch.taken[-1][1]
                stats = step_stats(steps, feed.work, state, tally, update, self._phases, self._net)
                yield replace(stats, metrics={**stats.metrics, **told})

    def agree(
        self, stretch: LocalRound, runner: ModelRunner, **own: float
    ) -> tuple[StepTally, Mapping[str, float]]:
        """The sums over all replicas, and buffers that are equal; collective.

        Args:
            own: sums of the rule.
        Returns:
            Those of the task, and those of the rule.
        """
        mine = sum_tallies([tally for tally, _ in stretch.taken])
        own |= self.shares.sums()
        change = runner.buffers.weighted_change_since(stretch.buffers, mine.micro_batches)
        both = {**mine.metrics, **{f"{_RULE_PREFIX}{name}": value for name, value in own.items()}}
        told = replace(mine, buffers=change, metrics=both)
        tally = told.agree(self._net, self._replicas, runner.sharded_model.device).wait()
        runner.buffers.reset(stretch.buffers)
        runner.buffers.end_step(tally.buffers, tally.micro_batches)
        if (residual := self.inner.pending_residual) is not None:
            residual.settle_mean(runner.sharded_model.updates, is_applied=tally.count > 0)
        metrics = {name: tally.metrics[name] for name in mine.metrics}
        sums = {name: tally.metrics[f"{_RULE_PREFIX}{name}"] for name in own}
        self.shares.settle(stretch.end, sums)
        return replace(tally, metrics=metrics), sums

    def forget(self) -> None:
        """Another state is loaded: a round that was under way is over."""
        self._stretch = None

    def _taking(
        self, stretch: LocalRound, reading: ReopenedStream, runner: ModelRunner, update_step: UpdateStep
    ) -> TakeStep:
        state = update_step.state

        def take() -> UpdateResult:
            work = self.shares.deal(reading.feed.work, state.step)
            taken, before = (
                SampleCountingStream(reading.stream(work, state.step)),
                self._phases.spent(*LOCAL_PHASES),
            )
            tally, update = self.inner.step(work, taken, runner, update_step)
            stretch.taken.append((_weigh_if_applied(tally, update), update))
            stretch.whole.append(float(work.num_samples(state.step) * self.inner.items_per_sample))
            seconds = self._phases.spent(*LOCAL_PHASES) - before
            self.shares.ran(seconds, taken.samples, applied=update.applied)
            state.step += 1
            return update

        return take


class ReopenedStream:
    """The stream of what this rank has to do, opened anew where that changes."""

    def __init__(self, feed: TrainingFeed) -> None:
        self.feed = feed
        self._work: MicroBatchWork | None = None
        self._stream: BatchStream | None = None

    def __enter__(self) -> ReopenedStream:
        return self

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def stream(self, work: MicroBatchWork, step: int) -> BatchStream:
        """From a step on, which is the next one."""
        if self._stream is None or work is not self._work:
            self.__exit__()
            self._work, self._stream = work, replace(self.feed, work=work).from_step(step)
        return self._stream


_RULE_PREFIX = "rule/"


def _weigh_if_applied(tally: StepTally, update: UpdateResult) -> StepTally:
    """A step that was not applied moved nothing: its items have no weight."""
    if update.applied:
        return tally
    return replace(tally, total=0.0, count=0.0, metrics=dict.fromkeys(tally.metrics, 0.0))


def sum_tallies(tallies: Sequence[StepTally]) -> StepTally:
    """The sum over steps; the change of the buffers is left to the caller."""
    first = tallies[0]
    return StepTally(
        micro_batches=sum(t.micro_batches for t in tallies),
        total=sum(t.total for t in tallies),
        count=sum(t.count for t in tallies),
        metrics={name: sum(t.metrics[name] for t in tallies) for name in first.metrics},
        stops=max(t.stops for t in tallies),
        used=[sum(column) for column in zip(*(t.used for t in tallies), strict=True)],
        buffers=first.buffers,
    )


def build_replica_step(
    context: SessionContext,
    sharded_model: ShardedModel,
    state: TrainState,
    pending_residual: PendingResidual | None = None,
) -> EveryStep:
    """Build the step of one replica by itself, and keep its optimizer as state of its own.

    Collective over the ranks of the replica; changes `state`.

    Args:
        pending_residual: from `build_pending_residual`.
    """
    mesh = context.mesh
    state.extra_states["inner"] = ReplicaOptimizerState(state, mesh.replica, mesh.inside)
    state.alone = True
    reducer = build_gradient_reduction(context.single_replica_mesh(), sharded_model)
    return build_every_step(context, reducer, mesh.inside, pending_residual=pending_residual)


def meeting_ranks(context: SessionContext) -> RankGroup:
    """Return the ranks that hold the same part as this one, one of each replica."""
    mesh = context.mesh
    return mesh.world if mesh.inside.size == 1 else mesh.replica
