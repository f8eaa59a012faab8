"""What belongs to one update of a user's own loop: losses of a micro-batch, and the gradients of a part.

Steps of a user's own loop: the reduction, the tally and the update are those of every-step.

A step may make several updates of different parts of the model, each with a loss of its own (a GAN).
Gradients are summed when an update begins, not during backward: nobody knows which backward is the last.
Invariant: with one loss and one update a step, the result is to the bit that of `train`.

A user's own loop: what it calls beside its model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast
from zlib import crc32

import torch
from torch import Tensor, nn

from paceline.comm.tally import StepTally
from paceline.data.work import LoadedBatch
from paceline.errors import RecipeError, StrategyError, TaskError
from paceline.models.dropout import name_dropouts
from paceline.observe.step_stats import StepStats
from paceline.parallel.data_parallel import ReplicatedRunner, backward_scaled
from paceline.parallel.model_runner import LossSums, MetricNames, check_loss
from paceline.parallel.rng_state import seed_micro_batch
from paceline.recipe.tables import ScheduleRecipe
from paceline.session.evaluation import Evaluation, evaluate
from paceline.session.fit_loop import FitInProgress, Result
from paceline.session.own_loop_reduce import LoopAction, LoopCoordinator
from paceline.session.session import Session
from paceline.state.slot import TensorSlot
from paceline.sync.every_step import EveryStep, gradient_scale
from paceline.sync.sync_rule import step_stats
from paceline.sync.update import PendingUpdate, UpdateResult
from paceline.task import Loss, SampleSource

_PART_METRIC, _UPDATERS_METRIC = "_part", "_sayers"  # metrics; names that begin so are not reported


def keep_gradients_of(computes: Mapping[TensorSlot, nn.Parameter], part: str) -> None:
    """Leave a gradient to the parameters of one submodule.

    Raises:
        TaskError: no parameter is in it.
    """
    own = [p for slot, p in computes.items() if slot.name.startswith(f"{part}.")]
    if not own:
        names = sorted({slot.name.partition(".")[0] for slot in computes})
        raise TaskError(f"the model has no part '{part}' that is trained, but {', '.join(names)}")
    kept = {id(p) for p in own}
    for p in computes.values():
        if id(p) not in kept:
            p.grad = None


def sum_losses(losses: Sequence[Loss], part: str) -> Loss:
    """Losses of one micro-batch over the same items; ranks that update a part say which."""
    total = torch.stack([loss.total.detach().reshape(()) for loss in losses]).sum()
    metrics = {name: value for loss in losses for name, value in loss.metrics.items()}
    said = {_PART_METRIC: _hash_of_part(part), _UPDATERS_METRIC: 1.0} if part else {}
    return Loss(total, losses[0].count, {**metrics, **said})


def _hash_of_part(part: str) -> float:
    return 1.0 + crc32(part.encode()) % 2**20


def require_same_part(part: str, tally: StepTally) -> None:
    """Raises: TaskError: ranks update different parts, each with what the others have of its gradient."""
    if part and tally.metrics[_PART_METRIC] != _hash_of_part(part) * tally.metrics[_UPDATERS_METRIC]:
        raise TaskError(
            f"this rank updates '{part}', and another rank another part",
            next_step="decide which part is updated by loop.step_number, which is equal on all ranks",
        )


_WHOLE_MODEL = ""
_LOOP_ADVICE = "for batch in loop.batches(): loss = ...; loop.backward(loss); loop.step()"


def refuse_own_loop(session: Session) -> None:
    """Raises: StrategyError: under this strategy no loop can call the model, with the reason."""
    runner, rule, recipe = session.runner, session.rule, session.recipe
    reasons = {
        "the layout runs forward and backward of its parts itself": type(runner) is not ReplicatedRunner,
        "gradients or parameters are here only while a run needs them": session.runner.sharded_model.frees_gradients,
        "the rule changes on the way": session.strategy != session.full_strategy,
        "the rule deals out micro-batches by itself": type(rule) is not EveryStep,
        "reproducible sums take each micro-batch's gradients apart": recipe.is_ordered,
    }
    why = [reason for reason, holds in reasons.items() if holds]
    if why:
        raise StrategyError(
            f"an own loop does not go with {session.strategy}: {'; '.join(why)}",
            next_step="choose replicas=all, with shard=N zero=1 if memory is short; or write the loss as a"
            " function and use train, which runs it under every strategy",
        )


class OwnLoopSteps:
    """What a loop calls.

    Args:
        after_round: is told of every step that is complete; collective.
        is_over: whether the run ends before its last step.

    Attributes:
        updated: the parts that the last step has updated, in their order; an empty name: all of the model.
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
        self._placed: Any = session.runner
        self._rule: Any = session.rule
        self._dropouts = name_dropouts(session.runner.sharded_model.model)
        self._ranks = LoopCoordinator(session)
        self._names: dict[str, MetricNames] = {}
        self._sums: list[tuple[str, LossSums]] = []
        self._losses: list[Loss] = []
        self._made: list[tuple[str, StepTally, UpdateResult]] = []
        self._loaded: LoadedBatch | None = None
        self._is_last = self._step_called = self._in_loop_body = False
        self.updated: tuple[str, ...] = ()

    def batches(self) -> Iterator[Any]:
        """This rank's micro-batches to the end of the run, each on its device, as the task collates them."""
        session = self._session
        with session.feed.from_step(session.state.step) as stream:
            while session.state.step < session.num_steps and not self._is_over():
                self._rule.phases.take()
                step = session.state.step
                count = session.work.num_micro_batches(step)
                for i in range(count):
                    self._rule.phases.begin("data")
                    self._loaded = next(stream)
                    self._is_last = i == count - 1
                    self._rule.phases.begin("forward")
                    self._begin_micro_batch(first=i == 0)
                    seen, autocast = self._placed.sharded_model.seen, self._placed.precision.autocast()
                    with seen(self._loaded.batch) as batch, autocast:
                        yield batch
                    self._require_step()
                if not count:
                    self._follow_others()
                self.end_round()

    def backward(self, loss: Loss) -> None:
        """Add the gradients of a loss to those of the update that comes next."""
        found, session = check_loss(loss), self._session
        if self._loaded is None or self._loaded.micro_batch.step != session.state.step:
            raise TaskError(
                "a loss after the end of its step: evaluate() ends it",
                next_step="evaluate after the last update",
            )
        if self._losses and float(found.count) != float(self._losses[0].count):
            raise TaskError(
                f"two losses of one update count {float(self._losses[0].count):g} and {float(found.count):g}"
                " items: their means would have other weights than they had alone",
                next_step="add them up in one Loss, or make an update after each",
            )
        self._losses.append(found)
        scale = gradient_scale(session.work, session.state, self._rule.items_per_sample)
        self._rule.phases.begin("backward")
        backward_scaled(found.total, scale)

    def step(self, part: str = _WHOLE_MODEL) -> UpdateResult | None:
        """Sum the gradients over all micro-batches and ranks, and update; collective.

        Args:
            part: name of the submodule whose parameters are updated ("generator"); all by default.
        Returns:
            What the update did; None: more micro-batches of this step come before it.
        Raises:
            TaskError: no loss was given since the last update; or a part is updated while a rank has several
                micro-batches.
        """
        if not self._losses:
            raise TaskError("step() without a loss: nothing was given to backward()", next_step=_LOOP_ADVICE)
        if part:
            self._require_whole_batch("several updates a step need")
        if not self._sums or self._sums[-1][0] != part:
            names = self._names.setdefault(part, MetricNames())
            self._sums.append((part, LossSums(names, counts=self._placed.counts)))
        self._sums[-1][1].add(sum_losses(self._losses, part))
        self._losses, self._step_called = [], True
        self._placed.buffers.end_micro_batch()
        if not self._is_last:
            return None
        self._ranks.tell(LoopAction("update", part, self._names[part].found or ()))
        return self._update(part)

    def reduce(self, value: Tensor | float, how: str) -> Tensor:
        """See `OwnLoop.reduce`."""
        if self._in_loop_body:
            self._require_whole_batch("a value of all replicas needs")
        return self._ranks.reduce(value, how, tells=self._in_loop_body)

    def end_round(self) -> None:
        """The step is complete, if an update was made; called where the loop goes on or ends."""
        if not self._made:
            return
        if self._in_loop_body:
            self._ranks.tell(None)
            self._placed.buffers.abort_step()  # a forward behind the last update moves no statistics
        self._in_loop_body = False
        session, state = self._session, self._session.state
        _, tally, update = self._made[-1]
        steps, phases = range(state.step, state.step + 1), self._rule.phases
        stats = step_stats(steps, session.work, state, tally, update, phases, session.net)
        losses = {f"{name} loss": t.total / (t.count or 1.0) for name, t, _ in self._made if name}
        self.updated = tuple(name for name, _, _ in self._made)
        self._made = []
        state.step += 1
        self._after_round(session.with_reported_metrics(replace(stats, metrics={**stats.metrics, **losses})))

    def drop_rest(self) -> None:
        """The loop has ended inside a step: what is half done is as if it had not begun."""
        if self._sums or self._losses:
            self._sums, self._losses = [], []
            self._session.abort()

    def _require_whole_batch(self, what: str) -> None:
        if self._session.work.num_micro_batches(self._session.state.step) > 1:
            raise TaskError(
                f"{what} the whole batch of a rank at once, and it comes in several micro-batches",
                next_step=f"set batch.shards = {self._session.mesh.data.size}, the number of replicas",
            )

    def _require_step(self) -> None:
        """Raises: TaskError: the loop goes on, and a batch has trained nothing."""
        if not self._step_called:
            raise TaskError("the loop took the next batch without step()", next_step=_LOOP_ADVICE)

    def _begin_micro_batch(self, *, first: bool) -> None:
        runner, loaded = self._placed, self._loaded
        assert loaded is not None
        self._step_called, self._in_loop_body = False, True
        if first:
            runner.sharded_model.model.train()
            runner.gradients.begin()
            runner.gradients.open(None)
            runner.buffers.begin_step()
        else:
            runner.buffers.abort_step()  # of a forward behind `step`
        seed_micro_batch(loaded.micro_batch.key, runner.sharded_model.device, self._dropouts)

    def _update(self, part: str) -> UpdateResult:
        """Hand on what this part has of gradients, agree, and update."""
        session, runner, rule = self._session, self._placed, self._rule
        _, sums = self._sums.pop()
        if part:
            keep_gradients_of(runner.sharded_model.computes, part)
        scale = rule.begin_scale(session.work, session.state)
        rule.reducer.begin()
        runner.gradients.open(rule.reducer)
        runner.gradients.close()
        rule.reducer.close()
        session.net.step = step = session.state.step
        shards = [one.shard for one in session.work.micro_batches(step)]
        tally, update = rule.agree(sums, runner, session.update_step, scale, shards, session.work.shards)
        require_same_part(part, tally)
        torch.clear_autocast_cache()  # it holds weights of before the update
        runner.gradients.begin()
        runner.gradients.open(None)
        runner.buffers.begin_step()
        self._made.append((part, tally, update))
        return update

    def _follow_others(self) -> None:
        """A step in which this rank has no samples: it makes the updates that the others make."""
        self._is_last = True
        while (told := self._ranks.receive_update()) is not None:
            self._sums = [(told.name, LossSums(MetricNames(told.metrics), counts=self._placed.counts))]
            self._update(told.name)


S = TypeVar("S")


class OwnLoop:
    """One rank of a run whose loop is the user's; see `own_loop`.

    Args:
        after_round: is told of every complete step, behind what is due there.

    Attributes:
        session: what everything is made of.
        result: how the run ended, behind the block.
    """

    def __init__(
        self, session: Session, fitting: FitInProgress, after_round: Callable[[StepStats], Any] | None = None
    ) -> None:
        self.session, self.result = session, _empty_result()
        self._course = fitting.course
        self._course.checks_stop_requests = True
        self._steps = OwnLoopSteps(session, self._completed, fitting.course.is_over)
        self._told = [fitting.after_round, *([after_round] if after_round is not None else [])]

    @property
    def model(self) -> nn.Module:
        """What the loop calls; whole on every rank."""
        return self.session.runner.sharded_model.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Over what this rank updates. `step` calls it."""
        return self.session.state.optimizer

    @property
    def step_number(self) -> int:
        """Steps taken before this one: equal on all ranks, where a count of batches need not be.

        A rank may have no samples in the last step of an epoch; then it has no batch in it.
        """
        return self.session.state.step

    @property
    def updated(self) -> Sequence[str]:
        """What the last step has updated, in its order; an empty name stands for all of the model."""
        return self._steps.updated

    def batches(self) -> Iterator[Any]:
        """This rank's micro-batches from the state's step to the end of the run.

        Between two of them a step may have ended: then evaluations, checkpoints and callbacks that are due
        have been. Every rank leaves the loop at the same place, or reaches its end.
        """
        return self._steps.batches()

    def backward(self, loss: Loss) -> None:
        """Add the gradients of a loss to those of the next update; several add up if they count alike."""
        self._steps.backward(loss)

    def step(self, part: str = "") -> UpdateResult | None:
        """Update all parameters, or those of one submodule by name; see `OwnLoopSteps.step`. Collective."""
        return self._steps.step(part)

    @property
    def num_replicas(self) -> int:
        """How many share the batch of a step."""
        return self.session.mesh.data.size

    def reduce(self, value: Tensor | float, how: str = "sum") -> Tensor:
        """A value of every rank as one, equal on all: their "sum", "max" or "min"; collective.

        For what is small: a number of samples, a score, the mean of a statistic. Where a rank has several
        micro-batches in a step it can only be asked outside of the loop over batches; a rank that has none
        has no part in it. No gradient flows through it: what is trained on goes to `backward`.

        Raises:
            TaskError: values cannot come together so, or the batch of a rank comes in parts.
        """
        return self._steps.reduce(value, how)

    def evaluate(self, source: SampleSource | None = None) -> Evaluation | None:
        """Evaluate now, on the held-out data or on other samples; collective; ends the step."""
        self._steps.end_round()
        return self._course.evaluate() if source is None else evaluate(self.session, source)

    def schedule(self, make: Callable[[torch.optim.Optimizer], S]) -> S:
        """Use a scheduler of torch.optim.lr_scheduler; the loop calls its `step` when it wants.

        Its state, and the rates, are in checkpoints.

        Raises:
            RecipeError: the recipe has a schedule of its own, or lowers rates.
        """
        if self.session.recipe.schedule != ScheduleRecipe():
            raise RecipeError(
                "the recipe sets [schedule], and the loop brings a scheduler", next_step="leave one out"
            )
        if self.session.recipe.health.lowers_rates:
            raise RecipeError(
                'health: "lower-rate" lowers the rates of the recipe, and the loop brings a scheduler',
                next_step='choose "stop", "skip" or "roll-back", or let the recipe set [schedule]',
            )
        parts = self.session.update_step.parts
        parts["rate"] = _read_rate
        made: Any = make(self.optimizer)
        name = f"scheduler.{len(self.session.state.others)}"
        self.session.state.keep(name, _SchedulerState(made, self.optimizer))
        return cast(S, made)

    def stop(self, reason: str) -> None:
        """End the run after this step, on all ranks."""
        self.session.stop(reason)

    def _completed(self, stats: StepStats) -> None:
        for tell in self._told:
            tell(stats)

    def end(self) -> None:
        """The loop has ended: what it has done of a step counts."""
        self._steps.end_round()
        self._steps.drop_rest()


def _empty_result() -> Result:
    return Result(0, None, None, None, None, stopped=False)


def _read_rate(record: PendingUpdate) -> None:
    """The part `rate` of an update whose scheduler is the user's."""
    record.lr = float(record.state.optimizer.param_groups[0]["lr"])


class _SchedulerState:
    """A scheduler and the rates that it has set."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler, self._optimizer = scheduler, optimizer

    def state_dict(self) -> Mapping[str, Any]:
        """See `Stateful`."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        return {"scheduler": self._scheduler.state_dict(), "rates": rates}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `Stateful`."""
        self._scheduler.load_state_dict(state_dict["scheduler"])
        for group, rate in zip(self._optimizer.param_groups, state_dict["rates"], strict=True):
            group["lr"] = rate
