"""When the phases of a run end, as far as it is known; and what a change of rule has gained.

A phase that waits for something ends after the round in which that has happened, on all ranks, since what
happens is found from numbers that all have. From then on its step is known, and is state: a run that goes on
from a later checkpoint has switched there, one from an earlier checkpoint has not. Where a rule has taken
over from a slow rank, the run goes back once that has recovered, and waits for the next one.

A session goes on under another rule, in the same processes: what hangs on the rule is made again.

As after a change of members (`renewal`), model, optimizer and data stay where they are, and reduction, guard,
update step and rule are new. What they go on from is the state as a checkpoint would hold it, which goes from
rank to rank in memory, some tensors at a time.

Invariant: a run that switches is the run that starts under the second rule from that checkpoint. What both
rules keep (inner optimizers of replicas, outer momentum) goes on; what the second does not know ends; what it
alone has begins. What coding has lost is handed over in full: gradients' to whoever has the next gradients
(`PendingResidual`), movements' to the parameters (`sync.moved`). Every sample is used once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.observe.step_stats import StepStats
from paceline.parallel.model_layout import SessionBase
from paceline.parallel.state_transfer import StateTransfer
from paceline.recipe.strategy_text import (
    UNTIL_MEASURED,
    SyncPhase,
    append_return,
    choices_of,
    count_returns,
    is_resolved_from,
    phase_at_step,
    phases_of,
    resolve_phases,
)
from paceline.state.train_state import TrainState
from paceline.sync.health import EventCallback
from paceline.sync.straggler_recovery import RECOVERED, AwaitedRank
from paceline.task import Task

if TYPE_CHECKING:
    from paceline.session.session import Session

RULE_SWITCHES_KEY = "turns"
_ROUNDS_BEFORE = 4  # rounds of a step: a window of those who name slow ranks
_STEPS_AFTER = 8  # steps, which may be one round


class RoundTotals(NamedTuple):
    """What a round did.

    Args:
        items: that its updates were made of.
    """

    steps: int
    items: float
    seconds: float


class RuleSwitches:
    """The phases of a run.

    Args:
        asked: as the recipe says.
        note: is told what a change of rule has gained.
    Attributes:
        waits: a phase was asked to end where something happens.
    """

    def __init__(self, asked: str, note: EventCallback) -> None:
        self._asked, self._note = asked, note
        self.waits = any(isinstance(phase.until, str) for phase in phases_of(asked))
        self._found = asked
        self._slow: int | None = None  # the rank that was named, until it has recovered
        self._cause = ""
        self._recent: deque[RoundTotals] = deque(maxlen=_STEPS_AFTER)
        self._before: RoundTotals | None = None

    def phase(self, step: int) -> SyncPhase:
        """The rule of a step, and until when it holds."""
        return phase_at_step(phases_of(self._found), step)

    @property
    def choices(self) -> tuple[str, ...]:
        """The rules that the run may still choose from; empty: it is known."""
        return choices_of(self._found)

    @property
    def awaited(self) -> AwaitedRank | None:
        """Who has to recover, for the run to go back; None: nobody was named."""
        if self._slow is None:
            return None
        return AwaitedRank(self._slow, self._cause, count_returns(self._asked, self._found))

    def passed(self, stats: StepStats, steps: int, events: Mapping[str, Mapping[str, Any]]) -> bool:
        """A round is over; whether another rule begins here, by one of these events.

        Args:
            steps: of the round.
            events: what has happened in it, by name.
        """
        self._recent.append(RoundTotals(steps, stats.num_items, stats.seconds))
        self._tell_gain(stats.step + 1)
        rule, until = self.phase(stats.step)
        if until in events:
            happened = events[str(until)]
            self._found = resolve_phases(self._found, stats.step + 1, str(happened.get(UNTIL_MEASURED, "")))
            self._slow, self._cause = happened.get("rank"), str(happened.get("cause", ""))
        elif until is None and RECOVERED in events:
            self._found, self._slow = append_return(self._asked, self._found, stats.step + 1), None
        if self.phase(stats.step + 1).rule == rule:
            return False
        self._before = sum_rounds(list(self._recent)[-_ROUNDS_BEFORE:])
        self._recent.clear()
        return True

    def state_dict(self) -> dict[str, Any]:
        """What is known."""
        return {"sync": self._found, "slow": self._slow, "cause": self._cause}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was known; a recipe that asks for other phases begins anew."""
        known = str(state.get("sync", self._asked))
        found = known if is_resolved_from(self._asked, known) else self._asked
        self._slow = state.get("slow") if found == known else None
        self._cause = str(state.get("cause", ""))
        if found != self._found:
            self._found, self._before = found, None
            self._recent.clear()

    def _tell_gain(self, step: int) -> None:
        after = sum_rounds(self._recent)
        if self._before is not None and after.steps >= _STEPS_AFTER:
            self._note("gain", {"step": step, **measure_gain_of_switch(self._before, after)})
            self._before = None


def sum_rounds(rounds: Collection[RoundTotals]) -> RoundTotals:
    """Rounds as one."""
    steps, items, seconds = (sum(column) for column in zip(*rounds, strict=True))
    return RoundTotals(int(steps), items, seconds)


def measure_gain_of_switch(before: RoundTotals, after: RoundTotals) -> dict[str, float]:
    """Seconds of a step, and how many times as many items a second are trained on; pure."""
    rates = [one.items / max(one.seconds, 1e-9) for one in (before, after)]
    return {
        "before": before.seconds / before.steps,
        "after": after.seconds / after.steps,
        "times": rates[1] / rates[0] if rates[0] else 0.0,
    }


BuildRuleParts = Callable[[SessionBase, Task, TrainState], dict[str, Any]]


def enter_rule(session: Session, arrange: BuildRuleParts, step: int, *, carries: bool = True) -> None:
    """Have a session run under the rule of a step; collective, between two rounds. Changes the session.

    Args:
        arrange: makes what hangs on the rule.
        carries: the state goes on; false: another one is about to be restored.
    """
    session_base, strategy = session.session_base, session.strategy
    rule = session.turns.phase(step).rule
    if session_base is None:
        return
    chooses = carries or bool(session_base.setting.choices) == bool(session.turns.choices)
    if rule == strategy.sync and chooses:
        return
    session.settle()
    handover = StateTransfer(session.state, session.mesh, session.net) if carries else None
    _release_rule(session)
    recipe = session_base.setting.recipe.under(session.full_strategy.under(rule))
    setting = replace(session_base.setting, recipe=recipe, closers=[], loss_tolerant_rules=[])
    setting = replace(setting, choices=session.turns.choices, awaited=session.turns.awaited)
    session.session_base = replace(session_base, setting=setting)
    state = session.state
    for name, value in arrange(session.session_base, session.task, state).items():
        setattr(session, name, value)
    for put in session.reinstall_hooks:
        put()
    if handover is not None:
        session.prepare_restore(handover.scalars)
        state.read_from(handover, handover.scalars)()
        session.notes.add("switch", {"step": step, "sync": rule})


def _release_rule(session: Session) -> None:
    """Of what the rule keeps beside the session, and of gradients, which may keep a bucket in memory."""
    session.release()
    session.state.extra_states.clear()
    session.state.alone = False
    sharded_model = session.runner.sharded_model
    for parameter in (*sharded_model.computes.values(), *sharded_model.updates.values()):
        parameter.grad = None
