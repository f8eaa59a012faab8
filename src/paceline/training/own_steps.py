"""Steps of a user's own loop: the reduction, the tally and the update are those of every-step.

A step may make several updates of different parts of the model, each with a loss of its own (a GAN).
Gradients are summed when an update begins, not during backward: nobody knows which backward is the last.
Invariant: with one loss and one update a step, the result is to the bit that of `train`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Tally
from paceline.data import LoadedBatch
from paceline.errors import StrategyError, TaskError
from paceline.layout import Replicate, Sums
from paceline.layout.back_propagate import back_propagate
from paceline.layout.seed import seed_micro_batch
from paceline.layout.sums import MetricNames, checked
from paceline.models.dropout import name_dropouts
from paceline.observe import Stats
from paceline.sync import EveryStep, Update
from paceline.sync.every_step import gradient_scale
from paceline.sync.rule import step_stats
from paceline.task import Loss
from paceline.training.between_ranks import BetweenRanks, Told
from paceline.training.one_update import added, keep_only, require_same_part
from paceline.training.session import Session

_ALL = ""
_NEXT = "for batch in loop.batches(): loss = ...; loop.backward(loss); loop.step()"


def refuse_own_loop(session: Session) -> None:
    """Raises: StrategyError: under this strategy no loop can call the model, with the reason."""
    placed, rule, recipe = session.placed, session.rule, session.recipe
    reasons = {
        "the layout runs forward and backward of its parts itself": type(placed) is not Replicate,
        "gradients or parameters are here only while a run needs them": session.placed.holding.frees,
        "the rule changes on the way": session.strategy != session.whole_strategy,
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


class OwnSteps:
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
        after_round: Callable[[Stats], None],
        is_over: Callable[[], bool],
    ) -> None:
        refuse_own_loop(session)
        self._session = session
        self._after_round, self._is_over = after_round, is_over
        self._placed: Any = session.placed
        self._rule: Any = session.rule
        self._dropouts = name_dropouts(session.placed.holding.model)
        self._ranks = BetweenRanks(session)
        self._names: dict[str, MetricNames] = {}
        self._sums: list[tuple[str, Sums]] = []
        self._losses: list[Loss] = []
        self._made: list[tuple[str, Tally, Update]] = []
        self._loaded: LoadedBatch | None = None
        self._is_last = self._stepped = self._runs_body = False
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
                    seen, autocast = self._placed.holding.seen, self._placed.precision.autocast()
                    with seen(self._loaded.batch) as batch, autocast:
                        yield batch
                    self._require_step()
                if not count:
                    self._follow_others()
                self.end_round()

    def backward(self, loss: Loss) -> None:
        """Add the gradients of a loss to those of the update that comes next."""
        found, session = checked(loss), self._session
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
        back_propagate(found.total, scale)

    def step(self, part: str = _ALL) -> Update | None:
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
            raise TaskError("step() without a loss: nothing was given to backward()", next_step=_NEXT)
        if part:
            self._require_whole_batch("several updates a step need")
        if not self._sums or self._sums[-1][0] != part:
            names = self._names.setdefault(part, MetricNames())
            self._sums.append((part, Sums(names, counts=self._placed.counts)))
        self._sums[-1][1].add(added(self._losses, part))
        self._losses, self._stepped = [], True
        self._placed.buffers.end_micro_batch()
        if not self._is_last:
            return None
        self._ranks.tell(Told("update", part, self._names[part].found or ()))
        return self._update(part)

    def reduce(self, value: Tensor | float, how: str) -> Tensor:
        """See `OwnLoop.reduce`."""
        if self._runs_body:
            self._require_whole_batch("a value of all replicas needs")
        return self._ranks.reduce(value, how, tells=self._runs_body)

    def end_round(self) -> None:
        """The step is complete, if an update was made; called where the loop goes on or ends."""
        if not self._made:
            return
        if self._runs_body:
            self._ranks.tell(None)
            self._placed.buffers.abort_step()  # a forward behind the last update moves no statistics
        self._runs_body = False
        session, state = self._session, self._session.state
        _, tally, update = self._made[-1]
        steps, phases = range(state.step, state.step + 1), self._rule.phases
        stats = step_stats(steps, session.work, state, tally, update, phases, session.net)
        losses = {f"{name} loss": t.total / (t.count or 1.0) for name, t, _ in self._made if name}
        self.updated = tuple(name for name, _, _ in self._made)
        self._made = []
        state.step += 1
        self._after_round(session.finished(replace(stats, metrics={**stats.metrics, **losses})))

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
        if not self._stepped:
            raise TaskError("the loop took the next batch without step()", next_step=_NEXT)

    def _begin_micro_batch(self, *, first: bool) -> None:
        placed, loaded = self._placed, self._loaded
        assert loaded is not None
        self._stepped, self._runs_body = False, True
        if first:
            placed.holding.model.train()
            placed.gradients.begin()
            placed.gradients.open(None)
            placed.buffers.begin_step()
        else:
            placed.buffers.abort_step()  # of a forward behind `step`
        seed_micro_batch(loaded.micro_batch.key, placed.holding.device, self._dropouts)

    def _update(self, part: str) -> Update:
        """Hand on what this part has of gradients, agree, and update."""
        session, placed, rule = self._session, self._placed, self._rule
        _, sums = self._sums.pop()
        if part:
            keep_only(placed.holding.computes, part)
        scale = rule.follow(session.work, session.state)
        rule.reducer.begin()
        placed.gradients.open(rule.reducer)
        placed.gradients.close()
        rule.reducer.close()
        session.net.step = step = session.state.step
        shards = [one.shard for one in session.work.micro_batches(step)]
        tally, update = rule.agree(sums, placed, session.update_step, scale, shards, session.work.shards)
        require_same_part(part, tally)
        torch.clear_autocast_cache()  # it holds weights of before the update
        placed.gradients.begin()
        placed.gradients.open(None)
        placed.buffers.begin_step()
        self._made.append((part, tally, update))
        return update

    def _follow_others(self) -> None:
        """A step in which this rank has no samples: it makes the updates that the others make."""
        self._is_last = True
        while (told := self._ranks.hear_update()) is not None:
            self._sums = [(told.name, Sums(MetricNames(told.metrics), counts=self._placed.counts))]
            self._update(told.name)
