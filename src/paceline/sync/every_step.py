"""Every-step: all replicas average their gradients in every step and make the same update.

This is *the* training step; every other rule runs it inside a replica or on a worker. A step runs this rank's
micro-batches, agrees on the tally, takes the summed gradients and updates.

Invariant: after each step all replicas hold equal parameters and buffers.
Not done here: summing (`paceline.comm.reduction`) and dividing (`paceline.sync.update`).
Source: Chen et al. 2016, Revisiting Distributed Synchronous SGD, arXiv:1604.00981, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from paceline.comm.net import Net
from paceline.comm.reduction.gradient_norm import LocalClip
from paceline.comm.reduction.gradients import GradientReduction, Gradients
from paceline.comm.reduction.pending_residual import GradientUnit, PendingResidual
from paceline.comm.tally import ShardTally, StepTally
from paceline.data.work import LoadedBatch, MicroBatchWork, TrainingFeed
from paceline.job.mesh import DATA_AXES, RankGroup
from paceline.observe.step_stats import PhaseTimer, StepStats
from paceline.parallel.model_layout import ModelLayout
from paceline.parallel.model_runner import LossSums, ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.parallel.sharded_model import ShardedModel
from paceline.state.train_state import TrainState
from paceline.sync.magnitude_pruning import build_masked_reduction
from paceline.sync.residuals import DeltaResidualFlush, FixedUnit, ResidualState
from paceline.sync.straggler_detection import StragglerDetection
from paceline.sync.sync_choice import SyncChooser
from paceline.sync.sync_rule import MemoryQuery, RuleMemory, SyncRule, step_stats
from paceline.sync.update import UpdateResult, UpdateStep
from paceline.sync.work_assignment import build_balanced_rule, even_share_micro_batches


class EveryStep:
    """The synchronous rule.

    Args:
        group: the ranks that take a step together: all replicas with all ranks of each.
        net: this rank's collectives.
        reduction: sums gradients over the replicas.
        phases: measures the seconds of each phase.
        items_per_sample: about how many items the loss counts per sample. Before backward the loss is divided
            by the largest power of two below the items of a step. That is exact and keeps the sums of fp16
            gradients small; the update step divides by the rest.
        stop_requested: returns whether this rank was asked to stop; all ranks learn it in the same step.
        by_shard: add losses and buffers in the order of the shards, whichever rank ran them.
        on_scale: called before a step with the factor of its losses and the approximate number of its items.
        on_run: called with this rank's loss sums and their factor before the reduction is closed.
        pending_residual: quantisation error of another rule, added to the next gradient.
    Wire: one all_reduce per bucket and one for the tally.
    """

    def __init__(
        self,
        group: RankGroup,
        net: Net,
        reduction: GradientReduction,
        *,
        phases: PhaseTimer,
        items_per_sample: int = 1,
        stop_requested: Callable[[], bool] = lambda: False,
        by_shard: bool = False,
        on_scale: Callable[[float, float], None] | None = None,
        on_run: Callable[[LossSums, float], None] | None = None,
        pending_residual: PendingResidual | None = None,
    ) -> None:
        self.reduction, self.pending_residual = reduction, pending_residual
        self._group, self._net, self.phases = group, net, phases
        self.items_per_sample = items_per_sample
        self._stop_requested, self._by_shard, self._on_run = stop_requested, by_shard, on_run
        self._on_scale = on_scale

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        state = update_step.state
        with feed.from_step(state.step) as stream:
            while state.step < feed.num_steps:
                # Time between two rounds, for example a save, belongs to no step.
                self.phases.take()
                step = state.step
                tally, update = self.step(feed.work, stream, runner, update_step)
                state.step += 1
                yield step_stats(
                    range(step, step + 1), feed.work, state, tally, update, self.phases, self._net
                )

    def abort(self) -> None:
        self.reduction.abort()

    def step(
        self,
        work: MicroBatchWork,
        stream: Iterator[LoadedBatch],
        runner: ModelRunner,
        update_step: UpdateStep,
    ) -> tuple[StepTally, UpdateResult]:
        """Take one step: run micro-batches, agree, update.

        Args:
            work: assigns this rank its micro-batches of a step.
            stream: loads exactly those micro-batches, in any order.
            runner: this rank's part of the model.
            update_step: applies the update to the state.
        Returns:
            The sums over all ranks, and what the update did.
        """
        # Errors of collectives name the step in which they happened.
        self._net.step = update_step.state.step
        self.phases.begin("data")
        num_micro_batches = work.num_micro_batches(update_step.state.step)
        # The factor is known before the reduction begins, because a codec rescales its errors by it.
        scale = self.begin_scale(work, update_step.state)
        self.reduction.begin(num_micro_batches)
        recorder = ShardRecordingStream(stream)
        sums = runner.run(recorder, num_micro_batches, self.reduction, scale)
        return self.agree(sums, runner, update_step, scale, recorder.shards, work.shards)

    def begin_scale(self, work: MicroBatchWork, state: TrainState) -> float:
        """Return the factor of the losses of the state's step, and pass it to `on_scale` and the optimizer.
        Call it before backward.
        """
        factor = gradient_scale(work, state, self.items_per_sample)
        if (begin_backward := getattr(state.optimizer, "begin_backward", None)) is not None:
            begin_backward(factor)
        if self._on_scale is not None:
            self._on_scale(factor, work.num_samples(state.step) * self.items_per_sample)
        return factor

    def agree(
        self,
        sums: LossSums,
        runner: ModelRunner,
        update_step: UpdateStep,
        scale: float,
        shards: Sequence[int],
        num_shards: int,
    ) -> tuple[StepTally, UpdateResult]:
        """Sum what this rank's micro-batches have produced over all ranks, and update.

        Args:
            sums: loss sums of the micro-batches; the reduction holds their gradients.
            scale: the factor of their losses.
            shards: the shards that this rank ran, in that order.
            num_shards: shards of the step on all ranks.
        """
        self.phases.begin("communication")
        # Before `close`: a rank that clips its own gradient must know its items before anything is sent.
        if self._on_run is not None:
            self._on_run(sums, scale)
        self.reduction.close()
        local_tally = self._tally(sums, runner, num_shards, shards)
        # The tally travels while the reduction waits for its last buckets.
        agreement = local_tally.agree(self._net, self._group, runner.sharded_model.device)
        grads, tally = self.reduction.finish(), agreement.wait()
        self.phases.begin("optimizer")
        # Before the update, so that a guard that skips the step can undo the change of the buffers.
        runner.buffers.end_step(tally.buffers, tally.micro_batches)
        # One rank with a gradient is enough: all replicas have to update the same parameters.
        used = tally.used_names(runner.sharded_model.slots)
        update = self._apply(update_step, grads.agreed(used, scale), tally)
        # A codec adopts the error of this step only if the update counted; otherwise it keeps the last one.
        if update.applied:
            self.reduction.commit(used)
        else:
            self.reduction.abort()
        return tally, update

    def _apply(self, update_step: UpdateStep, grads: Gradients, tally: StepTally) -> UpdateResult:
        """Update with the gradients, plus the pending error of another rule."""
        if self.pending_residual is None:
            return update_step.apply(grads, tally)
        update = update_step.apply(self.pending_residual.add_to(grads, tally.count), tally)
        if update.applied:
            self.pending_residual.mark_applied()
        return update

    def _tally(
        self, sums: LossSums, runner: ModelRunner, num_shards: int, shards: Sequence[int]
    ) -> StepTally | ShardTally:
        total, count, metrics = sums.read()
        used, changes = runner.used, runner.buffers.changes_of(shards)
        # A pending error moves a parameter even if no rank has a gradient for it in this step.
        if self.pending_residual is not None:
            used = {*used, *self.pending_residual.names}
        tally = StepTally(
            micro_batches=sums.micro_batches,
            total=total,
            count=count,
            metrics=metrics,
            stops=float(self._stop_requested()),
            used=[float(slot.name in used) for slot in runner.sharded_model.slots],
            buffers=runner.buffers.sum_changes(changes),
        )
        if not self._by_shard:
            return tally
        return ShardTally(tally, num_shards, shards, sums.per_micro_batch(), changes)


def plan_memory(query: MemoryQuery) -> RuleMemory:
    """Return the memory of the rule, which keeps nothing of its own."""
    return RuleMemory()


class ShardRecordingStream(Iterator[LoadedBatch]):
    """A stream of micro-batches that records the shard of each."""

    def __init__(self, stream: Iterator[LoadedBatch]) -> None:
        self._stream = stream
        self.shards: list[int] = []

    def __next__(self) -> LoadedBatch:
        loaded = next(self._stream)
        self.shards.append(loaded.micro_batch.shard)
        return loaded


def gradient_scale(work: MicroBatchWork, state: TrainState, items_per_sample: int) -> float:
    """Return the factor that losses of the state's step are multiplied with before backward."""
    # A power of two only changes the exponent of a float, so this factor rounds nothing.
    return state.scale.value / power_of_two_below(work.num_samples(state.step) * items_per_sample)


def power_of_two_below(number: int) -> float:
    """Return the largest power of two that is at most `number`, which is at least 1."""
    return float(2 ** (number.bit_length() - 1))


def build_every_step_rule(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule in which all replicas average their gradients in every step."""
    sharded_model, replicas = layout.runner.sharded_model, context.mesh.data
    step, reduction = _build_coded_step(context, sharded_model, state)
    state.extra_states["moved"] = DeltaResidualFlush(sharded_model)
    # Wrappers only observe rounds or choose work; the step itself is the same under all of them.
    rule: SyncRule = step
    num_run: Callable[[int], int] = partial(even_share_micro_batches, context.shards, replicas)
    if context.recipe.strategy.balances_by_speed and context.mesh.replica.size > 1:
        rule = balanced = build_balanced_rule(step, context)
        num_run = balanced.num_micro_batches_run
    factor = context.recipe.health.straggler_factor
    if factor is not None and replicas.size > 1:
        rule = StragglerDetection(rule, num_run, factor, group=replicas, net=context.net, note=context.note)
    if context.rule_inputs.choices and replicas.size > 1:
        rule = SyncChooser(
            rule,
            context.rule_inputs.choices,
            reduction,
            sharded_model.computes,
            group=replicas,
            net=context.net,
            note=context.note,
            warn=context.warn,
        )
    return rule


def _build_coded_step(
    context: SessionContext, sharded_model: ShardedModel, state: TrainState
) -> tuple[EveryStep, GradientReduction]:
    """Build the step of all ranks and its reduction; register the quantisation error of a codec as state."""
    strategy, world, batch = context.recipe.strategy, context.mesh.world, context.recipe.batch
    reduction = build_masked_reduction(context, sharded_model, state)
    if not strategy.uses_error_feedback:
        return _build_clipped_step(context, reduction), reduction
    if world.size == 1 and not context.recipe.is_ordered:
        # One rank sends nothing, so it only applies the error that several ranks left in a checkpoint.
        residual = build_pending_residual(context, sharded_model, state)
        return build_every_step(context, reduction, world, pending_residual=residual), reduction
    num_items = batch.size * context.rule_inputs.items_per_sample
    scale = state.scale.value / power_of_two_below(num_items)
    unit = GradientUnit(reduction.rescale, scale, num_items, divides=batch.reduction == "mean")
    coding_ranks = context.mesh.group_over([*DATA_AXES, *sharded_model.reduction_axes])
    state.extra_states["residual"] = ResidualState(reduction, sharded_model.computes, coding_ranks, unit=unit)
    return _build_clipped_step(context, reduction, on_scale=unit.follow), reduction


def _build_clipped_step(
    context: SessionContext,
    reduction: GradientReduction,
    on_scale: Callable[[float, float], None] | None = None,
) -> EveryStep:
    """Build the step of all ranks; each clips its own gradient first if the codec asks for it."""
    clip_norm, world = context.recipe.strategy.clip_norm, context.mesh.world
    if clip_norm is None or world.size == 1:
        return build_every_step(context, reduction, world, on_scale=on_scale)
    clip = LocalClip(reduction, clip_norm, world.size, divides=context.recipe.batch.reduction == "mean")

    def on_run(sums: LossSums, scale: float) -> None:
        clip.record_items(sums.read()[1], scale)

    return build_every_step(context, clip, world, on_scale=on_scale, on_run=on_run)


def build_every_step(
    context: SessionContext,
    reduction: GradientReduction,
    group: RankGroup,
    *,
    on_scale: Callable[[float, float], None] | None = None,
    on_run: Callable[[LossSums, float], None] | None = None,
    pending_residual: PendingResidual | None = None,
) -> EveryStep:
    """Build the training step of the ranks of a group, of the class that the session's components name."""
    return (context.components.rule or EveryStep)(
        group,
        context.net,
        reduction,
        phases=context.phases,
        items_per_sample=context.rule_inputs.items_per_sample,
        stop_requested=context.rule_inputs.stop_requested,
        by_shard=context.recipe.is_ordered,
        on_scale=on_scale,
        on_run=on_run,
        pending_residual=pending_residual,
    )


def build_pending_residual(
    context: SessionContext, sharded_model: ShardedModel, state: TrainState
) -> PendingResidual:
    """Take over the quantisation error of another rule, for a replica whose gradients are not coded.

    The result is registered in `state`, so that a checkpoint keeps what is still pending.
    """
    counted = {
        held.updates for held in sharded_model.held.values() if held.counts and held.updates is not None
    }
    num_items = items_of_full_batch(context)
    residual = PendingResidual(
        sharded_model.updates, counted, num_items, others=context.mesh.replica.size > 1
    )
    alone, unit = context.mesh.group_over(()), FixedUnit(items=num_items)
    state.extra_states["residual"] = ResidualState(residual, sharded_model.updates, alone, unit=unit)
    return residual


def items_of_full_batch(context: SessionContext) -> float | None:
    """Return the approximate number of items in a full batch; None if updates use sums, not means."""
    batch = context.recipe.batch
    return float(batch.size * context.rule_inputs.items_per_sample) if batch.reduction == "mean" else None
