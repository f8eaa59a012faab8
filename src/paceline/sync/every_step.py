"""Every-step: all replicas average their gradients in every step, and make the same update.

This is *the* training step. A step is: run this rank's micro-batches, agree on the tally, take the summed
gradients, update. Invariant: after each step all replicas hold equal parameters and buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline.comm.net import Net
from paceline.comm.reduction.gradients import GradientReduction, Gradients
from paceline.comm.reduction.pending_residual import PendingResidual
from paceline.comm.tally import ShardTally, StepTally
from paceline.data.work import LoadedBatch, MicroBatchWork, TrainingFeed
from paceline.job.mesh import RankGroup
from paceline.observe.step_stats import PhaseTimer, StepStats
from paceline.parallel.model_runner import LossSums, ModelRunner
from paceline.state.train_state import TrainState
from paceline.sync.sync_rule import MemoryQuery, RuleMemory, step_stats
from paceline.sync.update import UpdateResult, UpdateStep


class EveryStep:
    """The synchronous rule.

    Args:
        group: the ranks that take a step together: all replicas, with all that each is spread over.
        net: this rank's collectives.
        reducer: sums gradients over the replicas.
        phases: measures the seconds of each phase.
        items_per_sample: about how many items the loss counts in a sample. The loss is divided by the
            power of two below a step's items before backward, which is exact, so that most of the
            division costs nothing; the update step divides by the rest.
        stop_requested: whether this rank was asked to stop; all ranks learn of it in the same step.
        by_shard: add up losses and buffers in the order of the shards, whoever ran them.
        follows: is told, before a step, what its losses will be multiplied with, and of about how many items
            its gradient is a sum.
        ran: is told what this rank has run and the scale of its losses, before the reduction is closed.
        owed: what coding had lost under another rule.
    Wire: one all_reduce a bucket and one for the tally.
    Source: Chen et al. 2016, Revisiting Distributed Synchronous SGD, arXiv:1604.00981, section 2.1.
    """

    def __init__(
        self,
        group: RankGroup,
        net: Net,
        reducer: GradientReduction,
        *,
        phases: PhaseTimer,
        items_per_sample: int = 1,
        stop_requested: Callable[[], bool] = lambda: False,
        by_shard: bool = False,
        follows: Callable[[float, float], None] | None = None,
        ran: Callable[[LossSums, float], None] | None = None,
        owed: PendingResidual | None = None,
    ) -> None:
        self.reducer, self.owed = reducer, owed
        self._group, self._net, self.phases = group, net, phases
        self.items_per_sample = items_per_sample
        self._stop_requested, self._by_shard, self._ran = stop_requested, by_shard, ran
        self._follows = follows

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `Rule`: a round is a step."""
        state = update_step.state
        with feed.from_step(state.step) as stream:
            while state.step < feed.num_steps:
                self.phases.take()
                step = state.step
                tally, update = self.step(feed.work, stream, runner, update_step)
                state.step += 1
                yield step_stats(
                    range(step, step + 1), feed.work, state, tally, update, self.phases, self._net
                )

    def abort(self) -> None:
        """See `Rule`."""
        self.reducer.abort()

    def step(
        self,
        work: MicroBatchWork,
        stream: Iterator[LoadedBatch],
        runner: ModelRunner,
        update_step: UpdateStep,
    ) -> tuple[StepTally, UpdateResult]:
        """One step: micro-batches, agreement, update.

        Args:
            work: which micro-batches this rank runs in a step.
            stream: loads exactly those micro-batches, in any order.
            runner: this rank's part of the model.
            update_step: applies the update to the state.
        """
        self.phases.begin("data")
        self._net.step = update_step.state.step
        count = work.num_micro_batches(update_step.state.step)
        scale = self.follow(work, update_step.state)
        self.reducer.begin(count)
        taken = ShardRecordingStream(stream)
        sums = runner.run(taken, count, self.reducer, scale)
        return self.agree(sums, runner, update_step, scale, taken.shards, work.shards)

    def follow(self, work: MicroBatchWork, state: TrainState) -> float:
        """What the losses of the state's step are to be multiplied with, before its reduction begins."""
        scale = gradient_scale(work, state, self.items_per_sample)
        if self._follows is not None:
            self._follows(scale, work.num_samples(state.step) * self.items_per_sample)
        return scale

    def agree(
        self,
        sums: LossSums,
        runner: ModelRunner,
        update_step: UpdateStep,
        scale: float,
        shards: Sequence[int],
        num_shards: int,
    ) -> tuple[StepTally, UpdateResult]:
        """What follows on this rank's micro-batches: agreement, and an update.

        Args:
            sums: of the micro-batches, whose gradients the reducer has.
            scale: what their losses were multiplied with.
            shards: of this rank, in the order in which they were run.
            num_shards: of the step, over all ranks.
        """
        self.phases.begin("communication")
        if self._ran is not None:
            self._ran(sums, scale)
        self.reducer.close()
        tallied = self._tally(sums, runner, num_shards, shards)
        agreement = tallied.agree(self._net, self._group, runner.sharded_model.device)
        grads, tally = self.reducer.finish(), agreement.wait()
        self.phases.begin("optimizer")
        runner.buffers.end_step(tally.buffers, tally.micro_batches)
        used = tally.used_names(runner.sharded_model.slots)
        update = self._apply(update_step, grads.agreed(used, scale), tally)
        if update.applied:
            self.reducer.commit(used)
        else:
            self.reducer.abort()
        return tally, update

    def _apply(self, update_step: UpdateStep, grads: Gradients, tally: StepTally) -> UpdateResult:
        """Make the update of these, and of what is owed beside."""
        if self.owed is None:
            return update_step.apply(grads, tally)
        update = update_step.apply(self.owed.added(grads, tally.count), tally)
        if update.applied:
            self.owed.pay()
        return update

    def _tally(
        self, sums: LossSums, runner: ModelRunner, num_shards: int, shards: Sequence[int]
    ) -> StepTally | ShardTally:
        total, count, metrics = sums.read()
        used, changes = runner.used, runner.buffers.changes_of(shards)
        if self.owed is not None:
            used = {*used, *self.owed.names}
        tally = StepTally(
            micro_batches=sums.micro_batches,
            total=total,
            count=count,
            metrics=metrics,
            stops=float(self._stop_requested()),
            used=[float(slot.name in used) for slot in runner.sharded_model.slots],
            buffers=runner.buffers.added(changes),
        )
        if not self._by_shard:
            return tally
        return ShardTally(tally, num_shards, shards, sums.per_micro_batch(), changes)


def plan_memory(asked: MemoryQuery) -> RuleMemory:
    """What the rule keeps: nothing of its own."""
    return RuleMemory()


class ShardRecordingStream(Iterator[LoadedBatch]):
    """A stream that knows which shards were taken from it, in their order."""

    def __init__(self, stream: Iterator[LoadedBatch]) -> None:
        self._stream = stream
        self.shards: list[int] = []

    def __next__(self) -> LoadedBatch:
        loaded = next(self._stream)
        self.shards.append(loaded.micro_batch.shard)
        return loaded


def gradient_scale(work: MicroBatchWork, state: TrainState, items_per_sample: int) -> float:
    """What losses are multiplied with before backward in the state's step."""
    return state.scale.value / power_of_two_below(work.num_samples(state.step) * items_per_sample)


def power_of_two_below(number: int) -> float:
    """The largest power of two that is not above a number of at least 1."""
    return float(2 ** (number.bit_length() - 1))
