"""A user's own training loop: `OwnLoop`, which the loop calls, and the steps behind it.

Reduction, tally and update are those of every-step. A step may make several updates of different parts of
the model, each with its own loss (a GAN), so gradients are reduced when an update begins and not during
backward: which backward is the last is not known before. Invariant: with one loss and one update in a
step, the result equals that of `train` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast
from zlib import crc32

import torch
from torch import Tensor, nn

from paceline.comm.tally import StepTally
from paceline.data.work import LoadedBatch
from paceline.errors import RecipeError, StrategyError, TaskError, format_count
from paceline.models.dropout import name_dropouts
from paceline.models.training_mode import enter_training
from paceline.observe.step_stats import StepStats
from paceline.optim.slot_norms import SlotOptimizer
from paceline.optim.user_optimizer import member_optimizers
from paceline.parallel.batch_gather import gather_scope
from paceline.parallel.data_parallel import ReplicatedRunner, backward_scaled
from paceline.parallel.model_runner import LossSums, MetricNames, check_loss
from paceline.parallel.rng_state import seed_micro_batch
from paceline.recipe.schedule_recipe import ScheduleRecipe
from paceline.session.evaluation import Evaluation, evaluate
from paceline.session.fit_loop import FitInProgress, Result
from paceline.session.model_guard import keep_storages
from paceline.session.own_loop_reduce import LoopAction, LoopCoordinator
from paceline.session.session import Session
from paceline.state.slot import TensorSlot
from paceline.sync.every_step import EveryStep, gradient_scale
from paceline.sync.sync_rule import step_stats
from paceline.sync.update import PendingUpdate, UpdateResult
from paceline.task import Loss, SampleSource

_PART_METRIC, _UPDATERS_METRIC = "_part", "_sayers"  # metrics; names that begin so are not reported


def keep_gradients_of(computes: Mapping[TensorSlot, nn.Parameter], part: str) -> None:
    """Drop the gradients of all parameters outside of one submodule.

    Raises:
        TaskError: the submodule has no trained parameter.
    """
    inside = [p for slot, p in computes.items() if slot.name.startswith(f"{part}.")]
    if not inside:
        names = sorted({slot.name.partition(".")[0] for slot in computes})
        raise TaskError(f"the model has no trained submodule '{part}'; it has {', '.join(names)}")
    updated_ids = {id(p) for p in inside}
    for p in computes.values():
        if id(p) not in updated_ids:
            p.grad = None


def sum_losses(losses: Sequence[Loss], part: str) -> Loss:
    """Add losses of one micro-batch over the same items; a metric holds the part that is updated."""
    total = torch.stack([loss.total.detach().reshape(()) for loss in losses]).sum()
    metrics = {name: value for loss in losses for name, value in loss.metrics.items()}
    # Metrics are summed over ranks, so a hash that is equal on all of them comes back as a multiple
    # of the number of updaters; see `require_same_part`.
    part_metrics = {_PART_METRIC: _hash_of_part(part), _UPDATERS_METRIC: 1.0} if part else {}
    return Loss(total, losses[0].count, {**metrics, **part_metrics})


def _hash_of_part(part: str) -> float:
    return 1.0 + crc32(part.encode()) % 2**20


def require_same_part(part: str, tally: StepTally) -> None:
    """Raise a TaskError if ranks update different parts, which would mix up their gradients."""
    if part and tally.metrics[_PART_METRIC] != _hash_of_part(part) * tally.metrics[_UPDATERS_METRIC]:
        raise TaskError(
            f"this rank updates '{part}', but another rank updates another part",
            next_step="choose the part by loop.step_number, which is equal on all ranks",
        )


_WHOLE_MODEL = ""
_LOOP_ADVICE = "for batch in loop.batches(): loss = ...; loop.backward(loss); loop.step()"


def refuse_own_loop(session: Session) -> None:
    """Raise a StrategyError with the reasons if a loop cannot call the model under this strategy."""
    runner, rule, recipe = session.runner, session.rule, session.recipe
    reasons = {
        "the layout runs forward and backward of its parts itself": type(runner) is not ReplicatedRunner,
        "gradients or parameters are freed between uses": runner.sharded_model.frees_gradients,
        "the sync rule changes during the run": session.strategy != session.full_strategy,
        "the sync rule runs micro-batches itself": type(rule) is not EveryStep,
        "the optimizer takes more than gradients from a step": any(
            isinstance(member, SlotOptimizer) and member.collects_in_backward
            for member in member_optimizers(session.state.optimizer)
        ),
        "reproducible sums need the gradients of each micro-batch separately": recipe.is_ordered,
    }
    why = [reason for reason, holds in reasons.items() if holds]
    if why:
        raise StrategyError(
            f"an own loop is not possible with {session.strategy}: {'; '.join(why)}",
            next_step="use replicas=all, with shard=N zero=1 if memory is short; or write the loss as a"
            " function and use train, which supports every strategy",
        )


@dataclass
class _MicroBatchProgress:
    """Progress of the loop's body in the present micro-batch.

    Args:
        loaded: the micro-batch with its samples.
        is_last: no other micro-batch of this step follows on this rank.
        step_called: the body has called `step` for it.
        in_loop_body: the body runs, or has run last; false between steps.
    """

    loaded: LoadedBatch | None = None
    is_last: bool = False
    step_called: bool = False
    in_loop_body: bool = False


class OwnLoopSteps:
    """Steps of a user's own loop on one rank.

    Args:
        after_round: called after every complete step; collective.
        is_over: returns whether the run ends before its last step.

    Attributes:
        updated: the parts that the last step has updated, in order; an empty name stands for the whole model.
    """

    def __init__(
        self,
        session: Session,
        after_round: Callable[[StepStats], None],
        is_over: Callable[[], bool],
    ) -> None:
        refuse_own_loop(session)
        self._session = session
        self._after_round, self._is_over = after_round, is_over
        self._runner: Any = session.runner
        self._rule: Any = session.rule
        self._dropouts = name_dropouts(session.runner.sharded_model.model)
        self._ranks = LoopCoordinator(session)
        self._rank_gather, self._num_gathers = session.session_base.rank_gather, 0
        self._names: dict[str, MetricNames] = {}
        self._sums: list[tuple[str, LossSums]] = []
        self._losses: list[Loss] = []
        self._updates: list[tuple[str, StepTally, UpdateResult]] = []
        self._progress = _MicroBatchProgress()
        self._storages = session.guard.storages()
        self.updated: tuple[str, ...] = ()

    def batches(self) -> Iterator[Any]:
        """Yield this rank's collated micro-batches on its device, to the end of the run."""
        session = self._session
        with session.feed.from_step(session.state.step) as stream:
            while session.state.step < session.num_steps and not self._is_over():
                self._rule.phases.take()
                session.net.step = step = session.state.step
                count = session.work.num_micro_batches(step)
                for i in range(count):
                    self._rule.phases.begin("data")
                    self._progress.loaded = next(stream)
                    self._progress.is_last = i == count - 1
                    self._rule.phases.begin("forward")
                    self._begin_micro_batch(first=i == 0)
                    seen, autocast = self._runner.sharded_model.seen, self._runner.precision.autocast()
                    # The body of the user's loop runs inside of this block, between
                    # two `next` calls.
                    with (
                        seen(self._progress.loaded.batch) as batch,
                        autocast,
                        gather_scope(self._rank_gather),
                    ):
                        try:
                            yield batch
                        except GeneratorExit:
                            # Other ranks may be in their next step; a hang is explained by this.
                            session.net.activity.leave_loop(inside_step=not self._progress.step_called)
                            raise
                    self._require_step()
                if not count:
                    self._follow_others()
                self.end_round()

    def backward(self, loss: Loss) -> None:
        """Add the gradients of a loss to those of the next update."""
        checked, session = check_loss(loss), self._session
        if self._progress.loaded is None or self._progress.loaded.micro_batch.step != session.state.step:
            raise TaskError(
                "backward() was called after the end of its step, which evaluate() ends",
                next_step="call evaluate() after the last update",
            )
        if self._losses and float(checked.count) != float(self._losses[0].count):
            raise TaskError(
                f"two losses of one update count {float(self._losses[0].count):g} and"
                f" {format_count(float(checked.count), 'item')}, so"
                " one update would weight their means differently than two updates",
                next_step="add them up in one Loss with one count, or call step() after each",
            )
        if self._rank_gather.num_calls > self._num_gathers:
            # The loop has computed the loss of the whole batch on every rank, and each counts its share.
            checked = self._rank_gather.share(checked)
        self._num_gathers = self._rank_gather.num_calls
        self._losses.append(checked)
        scale = gradient_scale(session.work, session.state, self._rule.items_per_sample)
        self._rule.phases.begin("backward")
        backward_scaled(checked.total, scale)

    def step(self, part: str = _WHOLE_MODEL) -> UpdateResult | None:
        """Reduce the gradients over all micro-batches and ranks, and update; collective.

        Args:
            part: name of the submodule whose parameters are updated ("generator"); all by default.
        Returns:
            The result of the update; None if more micro-batches of this step come first.
        Raises:
            TaskError: `backward` was not called since the last update, or a part is updated while a rank has
                several micro-batches.
        """
        if not self._losses:
            raise TaskError("step() was called without backward(loss) before it", next_step=_LOOP_ADVICE)
        if part:
            self._require_whole_batch("several updates in a step need")
        if not self._sums or self._sums[-1][0] != part:
            names = self._names.setdefault(part, MetricNames())
            self._sums.append((part, LossSums(names, counts=self._runner.counts)))
        self._sums[-1][1].add(sum_losses(self._losses, part))
        self._losses, self._progress.step_called = [], True
        self._runner.buffers.end_micro_batch()
        if not self._progress.is_last:
            return None
        self._ranks.announce(LoopAction("update", part, self._names[part].names or ()))
        return self._update(part)

    def reduce(self, value: Tensor | float, how: str) -> Tensor:
        if self._progress.in_loop_body:
            self._require_whole_batch("loop.reduce inside the loop needs")
        return self._ranks.reduce(value, how, announces=self._progress.in_loop_body)

    def end_round(self) -> None:
        """Complete the step, if an update was made in it; called before the next batch and at the end."""
        if not self._updates:
            return
        if self._progress.in_loop_body:
            self._ranks.announce(None)
            self._runner.buffers.abort_step()  # a forward after the last update must not change statistics
        self._progress.in_loop_body = False
        session, state = self._session, self._session.state
        _, tally, update = self._updates[-1]
        steps, phases = range(state.step, state.step + 1), self._rule.phases
        stats = step_stats(steps, session.work, state, tally, update, phases, session.net)
        losses = {f"{name} loss": t.total / (t.count or 1.0) for name, t, _ in self._updates if name}
        self.updated = tuple(name for name, _, _ in self._updates)
        self._updates = []
        state.step += 1
        self._after_round(session.with_reported_metrics(replace(stats, metrics={**stats.metrics, **losses})))

    def drop_rest(self) -> None:
        """Drop an incomplete step when the loop has ended inside of it."""
        if self._sums or self._losses:
            self._sums, self._losses = [], []
            self._session.abort()

    def _require_whole_batch(self, what: str) -> None:
        if self._session.work.num_micro_batches(self._session.state.step) > 1:
            raise TaskError(
                f"{what} the whole batch of a rank at once, but it has several micro-batches",
                next_step=f"set batch.shards = {self._session.mesh.data.size}, the number of replicas",
            )

    def _require_step(self) -> None:
        """Raise a TaskError if the loop continues without a call of `step` for this batch."""
        if not self._progress.step_called:
            raise TaskError("the loop took the next batch without step()", next_step=_LOOP_ADVICE)

    def _begin_micro_batch(self, *, first: bool) -> None:
        runner, loaded = self._runner, self._progress.loaded
        assert loaded is not None
        self._progress.step_called, self._progress.in_loop_body = False, True
        self._check_model()
        if first:
            # Gradients stay in the parameters: without an open reducer the hooks pass nothing
            # on.
            if not runner.sharded_model.model.training:
                enter_training(runner.sharded_model.model)
            runner.gradients.begin()
            runner.gradients.open(None)
            runner.buffers.begin_step()
        else:
            runner.buffers.abort_step()  # drops changes of a forward after `step`
        seed_micro_batch(loaded.micro_batch.key, runner.sharded_model.device, self._dropouts)

    def _check_model(self) -> None:
        """Check what the loop has changed in the model."""
        keep_storages(self._storages)
        self._session.guard.check()

    def _update(self, part: str) -> UpdateResult:
        """Reduce the gradients of a part, agree on the tally, and update; collective."""
        session, runner, rule = self._session, self._runner, self._rule
        self._check_model()
        _, sums = self._sums.pop()
        if part:
            keep_gradients_of(runner.sharded_model.computes, part)
        scale = rule.begin_scale(session.work, session.state)
        rule.reduction.begin()
        runner.gradients.open(rule.reduction)
        runner.gradients.close()
        rule.reduction.close()
        step = session.state.step
        shards = [micro_batch.shard for micro_batch in session.work.micro_batches(step)]
        tally, update = rule.agree(sums, runner, session.update_step, scale, shards, session.work.shards)
        require_same_part(part, tally)
        torch.clear_autocast_cache()  # it holds casts of the weights before the update
        runner.gradients.begin()
        runner.gradients.open(None)
        runner.buffers.begin_step()
        self._updates.append((part, tally, update))
        return update

    def _follow_others(self) -> None:
        """Make the updates of a step in which this rank has no samples; collective."""
        self._progress.is_last = True
        while (action := self._ranks.receive_update()) is not None:
            names = MetricNames(action.metrics)
            self._sums = [(action.name, LossSums(names, counts=self._runner.counts))]
            self._update(action.name)


S = TypeVar("S")


class OwnLoop:
    """Handle of a user's own loop on one rank; see `own_loop`.

    Args:
        after_round: called after every complete step, after evaluations and saves that are due there.

    Attributes:
        session: the session that is trained.
        result: the result of the run, set after the `with` block of `own_loop`.
    """

    def __init__(
        self, session: Session, fitting: FitInProgress, after_round: Callable[[StepStats], Any] | None = None
    ) -> None:
        self.session, self.result = session, _empty_result()
        self._schedule = fitting.schedule
        self._schedule.checks_stop_requests = True
        self._steps = OwnLoopSteps(session, self._completed, fitting.schedule.is_over)
        self._after_round_calls = [fitting.after_round, *([after_round] if after_round is not None else [])]

    @property
    def model(self) -> nn.Module:
        """The model, whole on every rank."""
        return self.session.runner.sharded_model.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the parameters that this rank updates; `step` calls it."""
        return self.session.state.optimizer

    @property
    def step_number(self) -> int:
        """Number of steps before the present one, equal on all ranks.

        A count of batches is not: a rank may have no samples in the last step of an epoch, and then no batch.
        """
        return self.session.state.step

    @property
    def updated(self) -> Sequence[str]:
        """The parts that the last step has updated, in order; an empty name stands for the whole model."""
        return self._steps.updated

    def batches(self) -> Iterator[Any]:
        """Yield this rank's micro-batches from the state's step to the end of the run.

        When a step has ended between two batches, evaluations, checkpoints and callbacks that were due are
        done. Every rank must leave the loop at the same place or reach its end.
        """
        return self._steps.batches()

    def backward(self, loss: Loss) -> None:
        """Add the gradients of a loss to those of the next update; its losses must count the same items."""
        self._steps.backward(loss)

    def step(self, part: str = "") -> UpdateResult | None:
        """Update all parameters, or those of one submodule by name; collective; see `OwnLoopSteps.step`."""
        return self._steps.step(part)

    @property
    def num_replicas(self) -> int:
        """Number of replicas that share the batch of a step."""
        return self.session.mesh.data.size

    def reduce(self, value: Tensor | float, how: str = "sum") -> Tensor:
        """Return the "sum", "max" or "min" of a value over all replicas, equal on all ranks; collective.

        It is for small values: a number of samples, a score, the sum of a statistic. If a rank has several
        micro-batches in a step, call it only outside of the loop over batches; inside, a rank without samples
        contributes nothing. No gradient flows through it.

        Raises:
            TaskError: the reduction is unknown, shapes differ, or a rank has several micro-batches.
        """
        return self._steps.reduce(value, how)

    def evaluate(self, source: SampleSource | None = None) -> Evaluation | None:
        """End the step and evaluate, on the held-out data or on other samples; collective."""
        self._steps.end_round()
        return self._schedule.evaluate() if source is None else evaluate(self.session, source)

    def schedule(self, make: Callable[[torch.optim.Optimizer], S]) -> S:
        """Build and return a scheduler of torch.optim.lr_scheduler, whose `step` the loop calls.

        Checkpoints contain its state and the learning rates.

        Args:
            make: called with the optimizer.
        Raises:
            RecipeError: the recipe has its own schedule, or lowers the rate after a health check.
        """
        if self.session.recipe.schedule != ScheduleRecipe():
            raise RecipeError(
                "the recipe sets [schedule], and the loop has its own scheduler",
                next_step="remove one of them",
            )
        if self.session.recipe.health.lowers_rates:
            raise RecipeError(
                'health: "lower-rate" changes the rates of the recipe, but the loop has its own scheduler',
                next_step='use "stop", "skip" or "roll-back", or let the recipe set [schedule]',
            )
        parts = self.session.update_step.parts
        # The scheduler sets the rate, so the part that would set the recipe's rate is replaced.
        parts["rate"] = _read_rate
        scheduler: Any = make(self.optimizer)
        name = f"scheduler.{len(self.session.state.stateful_objects)}"
        self.session.state.keep(name, _SchedulerState(scheduler, self.optimizer))
        return cast(S, scheduler)

    def stop(self, reason: str) -> None:
        """End the run after this step, on all ranks."""
        self.session.stop(reason)

    def _completed(self, stats: StepStats) -> None:
        for call in self._after_round_calls:
            call(stats)

    def end(self) -> None:
        """Complete the last step, and drop what came after its last update."""
        self._steps.end_round()
        self._steps.drop_rest()


def _empty_result() -> Result:
    return Result(0, None, None, None, None, stopped=False)


def _read_rate(record: PendingUpdate) -> None:
    """Report the learning rate of the user's scheduler, as the part `rate` of the update step."""
    record.lr = float(record.state.optimizer.param_groups[0]["lr"])


class _SchedulerState:
    """State of a scheduler, with the rates that it has set, for checkpoints."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler, self._optimizer = scheduler, optimizer

    def state_dict(self) -> Mapping[str, Any]:
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        return {"scheduler": self._scheduler.state_dict(), "rates": rates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._scheduler.load_state_dict(state_dict["scheduler"])
        for group, rate in zip(self._optimizer.param_groups, state_dict["rates"], strict=True):
            group["lr"] = rate
