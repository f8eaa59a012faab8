"""A user's own loop: what it calls beside its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from paceline.errors import RecipeError
from paceline.observe import Stats
from paceline.recipe import ScheduleRecipe
from paceline.sync import Update
from paceline.sync.update import Updating
from paceline.task import Loss, Source
from paceline.training.evaluation import Evaluation, evaluate
from paceline.training.loop import Fitting, Result
from paceline.training.own_steps import OwnSteps
from paceline.training.session import Session

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
        self, session: Session, fitting: Fitting, after_round: Callable[[Stats], Any] | None = None
    ) -> None:
        self.session, self.result = session, _not_yet()
        self._course = fitting.course
        self._course.heeds_stop = True
        self._steps = OwnSteps(session, self._completed, fitting.course.is_over)
        self._told = [fitting.after_round, *([after_round] if after_round is not None else [])]

    @property
    def model(self) -> nn.Module:
        """What the loop calls; whole on every rank."""
        return self.session.placed.holding.model

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

    def step(self, part: str = "") -> Update | None:
        """Update all parameters, or those of one submodule by name; see `OwnSteps.step`. Collective."""
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

    def evaluate(self, source: Source | None = None) -> Evaluation | None:
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
        self.session.state.keep(name, _Scheduled(made, self.optimizer))
        return cast(S, made)

    def stop(self, reason: str) -> None:
        """End the run after this step, on all ranks."""
        self.session.stop(reason)

    def _completed(self, stats: Stats) -> None:
        for tell in self._told:
            tell(stats)

    def end(self) -> None:
        """The loop has ended: what it has done of a step counts."""
        self._steps.end_round()
        self._steps.drop_rest()


def _not_yet() -> Result:
    return Result(0, None, None, None, None, stopped=False)


def _read_rate(record: Updating) -> None:
    """The part `rate` of an update whose scheduler is the user's."""
    record.lr = float(record.state.optimizer.param_groups[0]["lr"])


class _Scheduled:
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
