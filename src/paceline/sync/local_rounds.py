"""Rounds of replicas that train alone between two agreements.

A round is a number of steps that a replica takes by itself, with all ranks that it is spread over. The rules
of this kind (local SGD, DiLoCo, gossip, Hogwild!) differ in where a round ends, in what they do before and
after a step, and in how the replicas meet: three functions that they pass to `LocalRoundLoop`. Each replica
has an optimizer, a loss scale and a number of updates of its own, because a replica without samples makes no
update and an expert is used by some replicas only; `ReplicaOptimizerState` keeps them in checkpoints.

Invariant: a round that an error interrupted continues with the interrupted step. After a round all ranks have
the same tally, and buffers that have moved by the mean of their changes on all ranks, weighted by
micro-batches as in every-step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.reduction.pending_residual import PendingResidual
from paceline.comm.tally import StepTally, sum_tallies
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
    """Optimizer, loss scale and number of updates of every replica, each under its own names.

    If a checkpoint has another number of replicas, each replica continues from the state of the first one.

    Args:
        replica: the ranks that hold the same part, one of each replica.
        inside: the ranks of this replica: each saves its tensors, and a text with the numbers of its
            parameters.
    """

    def __init__(self, state: TrainState, replica: RankGroup, inside: RankGroup) -> None:
        self._state, self._prefix = state, f"{replica.rank} of {replica.size}"
        self._text = f"{_VALUES_NAME}/{inside.rank}" if inside.rank else _VALUES_NAME

    def pieces(self) -> list[TensorPiece]:
        """Return this rank's tensors of its replica, and one text with everything else."""
        # A checkpoint holds only tensors, so these numbers are stored as the bytes of a JSON text.
        text = torch.frombuffer(bytearray(json.dumps(self._values()), "utf-8"), dtype=torch.uint8)
        pieces = [TensorPiece(TensorSlot.whole(self._text, text), text)]
        for piece in self._state.optimizer_pieces():
            name = piece.slot.name.removeprefix(_OPTIMIZER_PREFIX)
            pieces.append(TensorPiece(replace(piece.slot, name=f"tensors/{name}"), piece.tensor))
        return [TensorPiece(p.slot.on(_REPLICA_AXIS), p.tensor).under(self._prefix) for p in pieces]

    def _values(self) -> dict[str, Any]:
        scale = self._state.scale
        return {
            "updates": self._state.num_updates,
            "scale": {"value": scale.value, "clean_steps": scale.clean_steps},
            "optimizer": self._state.optimizer_state.values(),
            "groups": self._state.groups.changed(),
        }

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """Return what this replica saved, if there are as many replicas as then; of the texts those of all
        its ranks.
        """
        prefix = f"{self._prefix}/tensors/"
        optimizer_shapes = {
            f"{_OPTIMIZER_PREFIX}{name}": shape for name, shape in strip_prefix(shapes, prefix).items()
        }
        wanted = {
            name.replace(_OPTIMIZER_PREFIX, prefix, 1): i
            for name, i in self._state.optimizer_state.wanted(optimizer_shapes)
        }
        return wanted | {name: () for name in shapes if self._is_text(name)}

    def _is_text(self, name: str) -> bool:
        text = f"{self._prefix}/{_VALUES_NAME}"
        return name == text or name.startswith(f"{text}/")

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        texts = [json.loads(bytes(t.tolist())) for name, t in tensors.items() if self._is_text(name)]
        if not texts:
            return
        # Any rank's text has the numbers of the replica; only the optimizer's numbers differ by rank.
        values, prefix, state = texts[0], f"{self._prefix}/tensors/", self._state
        optimizer_tensors = {
            f"{_OPTIMIZER_PREFIX}{name}": value for name, value in strip_prefix(tensors, prefix).items()
        }
        state.optimizer_state.take(
            optimizer_tensors, {name: value for text in texts for name, value in text["optimizer"].items()}
        )
        state.groups.restore(values["groups"])
        state.num_updates = values["updates"]
        state.scale = replace(state.scale, **values["scale"])


TakeStep = Callable[[], UpdateResult]
"""Takes one step of this replica and returns what its update did."""


@dataclass
class LocalRound:
    """A round in progress.

    Args:
        first: its first step.
        end: the step after its last one.
        buffers: copies of the buffers at its start.
        results: tally and update of each step so far.
        num_items: about how many items each of these steps had on all replicas, applied or not.
        is_agreed: all ranks have agreed on `end`, so later stop requests do not change it.
        work: the share of this rank, if the members have changed since the round was due; None: its present
            one.
        buffer_change: of this replica in the whole round, once it meets the others.
    """

    first: int
    end: int
    buffers: list[Tensor]
    results: list[tuple[StepTally, UpdateResult]] = field(default_factory=list)
    num_items: list[float] = field(default_factory=list)
    is_agreed: bool = False
    work: MicroBatchWork | None = None
    buffer_change: Tensor | None = None

    @property
    def step(self) -> int:
        """Return the next step."""
        return self.first + len(self.results)

    @property
    def count(self) -> float:
        """Return the items of all steps that were applied."""
        return sum(tally.count for tally, _ in self.results)

    @property
    def skipped(self) -> float:
        """Return the number of steps that were not applied."""
        return float(sum(not update.applied for _, update in self.results))

    def end_with(self, steps: Iterable[int]) -> None:
        """End the round where the most advanced rank is; every rank takes at least one step.

        Args:
            steps: the next step of each rank.
        """
        # At least one step, so that a run that is always asked to stop still ends.
        self.end, self.is_agreed = max(self.first + 1, *steps), True


class LocalRoundLoop:
    """The loop that all rules with local rounds share.

    Args:
        inner: the step of one replica.
        replicas: the ranks that hold the same part as this one, one of each replica.
        net: this rank's collectives.
        phases: measures the seconds of each phase.
        shares: assigns this rank its part of each batch; None: equal parts that stay.
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
        self._round: LocalRound | None = None
        self._next_work: MicroBatchWork | None = None

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
        """Train to the end of the run and yield a record of each round, as `SyncRule.rounds`.

        Args:
            feed: work and loader of this rank.
            runner: this rank's part of the model.
            update_step: applies updates to the state of this replica.
            begin: prepares a round that begins with a step, and returns the step before which it ends.
            step: takes the next step, or finds that the round ends.
            meet: ends a round on all ranks; returns the tally of all, and metrics of the rule.
        """
        state, update_step = update_step.state, self.shares.weighted(update_step)
        with ReopenedStream(feed) as streams:
            while state.step < feed.num_steps:
                self._phases.take()
                # After an error the round is still there: `rounds` is called again and continues it.
                if self._round is None:
                    end = begin(feed, state.step)
                    self._round = LocalRound(state.step, end, runner.buffers.values(), work=self._next_work)
                    self._next_work = None
                local_round = self._round
                # After a change of members the state is at the first step of a round that continues.
                state.step = local_round.step
                take = self._bind_step(local_round, streams, runner, update_step)
                while state.step < local_round.end:
                    step(local_round, take)
                self._phases.begin("communication")
                tally, rule_metrics = meet(local_round, runner)
                # Only now: if `meet` fails, the next call finds the round complete and meets again.
                self._round = None
                steps, update = range(local_round.first, local_round.end), local_round.results[-1][1]
                stats = step_stats(steps, feed.work, state, tally, update, self._phases, self._net)
                yield replace(stats, metrics={**stats.metrics, **rule_metrics})

    def agree(
        self, local_round: LocalRound, runner: ModelRunner, **rule_sums: float
    ) -> tuple[StepTally, Mapping[str, float]]:
        """Sum the tallies over all replicas and make the buffers equal; collective.

        Args:
            local_round: the round that ends.
            runner: this rank's part of the model.
            rule_sums: numbers of the rule that are summed with the tally.
        Returns:
            The tally of the task, and the sums of the rule.
        """
        round_tally = sum_tallies([tally for tally, _ in local_round.results])
        rule_sums |= self.shares.round_sums()
        if local_round.buffer_change is None:
            # Only once: a meeting that failed may have moved the buffers, and the next one starts from here.
            local_round.buffer_change = runner.buffers.weighted_change_since(
                local_round.buffers, round_tally.micro_batches
            )
        # The sums of the rule travel inside the tally, so they need no collective of their own.
        metrics_and_sums = {
            **round_tally.metrics,
            **{f"{_RULE_PREFIX}{name}": value for name, value in rule_sums.items()},
        }
        local_tally = replace(round_tally, buffers=local_round.buffer_change, metrics=metrics_and_sums)
        tally = local_tally.agree(self._net, self._replicas, runner.sharded_model.device).wait()
        # All ranks move the buffers of the start by the same mean change, so they end up with equal bits.
        runner.buffers.reset(local_round.buffers)
        runner.buffers.end_step(tally.buffers, tally.micro_batches, of_rounds=True)
        if (residual := self.inner.pending_residual) is not None:
            residual.settle_mean(runner.sharded_model.updates, is_applied=tally.count > 0)
        metrics = {name: tally.metrics[name] for name in round_tally.metrics}
        sums = {name: tally.metrics[f"{_RULE_PREFIX}{name}"] for name in rule_sums}
        self.shares.end_round(local_round.end, sums)
        return replace(tally, metrics=metrics), sums

    def forget(self) -> None:
        """Drop a round that was in progress, because another state was loaded."""
        self._round = None

    @property
    def interrupted_round(self) -> LocalRound | None:
        """The round that an error has interrupted; None: there is none."""
        return self._round

    def continue_round(self, local_round: LocalRound) -> None:
        """Continue a round that began with other members: it keeps its share of the samples."""
        self._round = local_round

    def keep_share(self, work: MicroBatchWork) -> None:
        """Give the next round a share of the samples that is not the present one."""
        self._next_work = work

    def _bind_step(
        self, local_round: LocalRound, streams: ReopenedStream, runner: ModelRunner, update_step: UpdateStep
    ) -> TakeStep:
        state = update_step.state

        def take() -> UpdateResult:
            work = local_round.work or self.shares.assign(streams.feed.work, state.step)
            counter = SampleCountingStream(streams.stream(work, state.step))
            # Only local work: the time in communication is mostly the wait for other ranks.
            seconds_before = self._phases.spent(*LOCAL_PHASES)
            tally, update = self.inner.step(work, counter, runner, update_step)
            local_round.results.append((_zero_if_skipped(tally, update), update))
            local_round.num_items.append(float(work.num_samples(state.step) * self.inner.items_per_sample))
            seconds = self._phases.spent(*LOCAL_PHASES) - seconds_before
            self.shares.record_run(seconds, counter.samples, applied=update.applied)
            state.step += 1
            return update

        return take


class ReopenedStream:
    """The stream of this rank's batches, reopened whenever its assignment changes."""

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
        """Return the stream of `work`, positioned at `step`, which is the next step of the caller."""
        # By identity: an assignment returns the same object as long as the shares stay.
        if self._stream is None or work is not self._work:
            # The old stream reads ahead, and would load micro-batches that now belong to other ranks.
            self.__exit__()
            self._work, self._stream = work, replace(self.feed, work=work).from_step(step)
        return self._stream


_RULE_PREFIX = "rule/"


def _zero_if_skipped(tally: StepTally, update: UpdateResult) -> StepTally:
    """Return zero weight for a skipped update: its items have not moved the parameters."""
    if update.applied:
        return tally
    return replace(tally, total=0.0, count=0.0, metrics=dict.fromkeys(tally.metrics, 0.0))


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
    state.has_local_optimizer = True
    reducer = build_gradient_reduction(context.single_replica_mesh(), sharded_model)
    return build_every_step(context, reducer, mesh.inside, pending_residual=pending_residual)


def meeting_ranks(context: SessionContext) -> RankGroup:
    """Return the ranks that hold the same part as this one, one of each replica."""
    mesh = context.mesh
    return mesh.world if mesh.inside.size == 1 else mesh.replica
