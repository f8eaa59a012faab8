"""When one sync rule of a run follows another, and the switch of a session to the next rule.

A phase of a run ends at a step that the recipe names, or after the round in which an event happened (a
rank became slow, the first steps were measured). Events follow from numbers that all ranks have, so all
ranks end the phase after the same round; that step is then part of the state. A run resumed from a later
checkpoint has switched there, one resumed from an earlier checkpoint has not. If a rule has taken over
because of a slow rank, the run returns to the first rule when that rank has recovered, and waits for the
next slow rank.

A switch happens in the same processes. Model, optimizer and data stay where they are; `RuleParts` are
built again and continue from the state as a checkpoint would hold it, which goes from rank to rank in
memory, some tensors at a time. Invariant: a run that switches equals the run that starts under the second
rule from that checkpoint. State that both rules keep (inner optimizers of replicas, outer momentum)
continues, state that only the first knows is dropped, state that only the second knows starts anew.
Quantisation errors are passed on in full: those of gradients to the next gradients (`PendingResidual`),
those of deltas to the parameters (`sync.residuals`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.observe.sinks import EventCallback
from paceline.observe.step_stats import StepStats
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
from paceline.sync.straggler_recovery import RECOVERED, AwaitedRank
from paceline.task import Task

if TYPE_CHECKING:
    from paceline.session.session import RuleParts, Session, SessionBase

RULE_SWITCHES_KEY = "turns"  # in checkpoints, so it stays
_ROUNDS_BEFORE = 4  # rounds of a step: the window of the straggler detection
_STEPS_AFTER = 8  # steps, which may be one round


class RoundTotals(NamedTuple):
    """Totals of one or several rounds.

    Args:
        items: number of items (samples or tokens) that the updates were made of.
    """

    steps: int
    items: float
    seconds: float


class RuleSwitches:
    """The phases of a run, as far as they are known.

    Args:
        asked: the phases as the recipe says them.
        note: receives the event `gain` some steps after a switch.
    Attributes:
        depends_on_events: a phase ends with an event and not at a step of the recipe.
    """

    def __init__(self, configured: str, note: EventCallback) -> None:
        self._configured, self._note = configured, note
        self.depends_on_events = any(isinstance(phase.until, str) for phase in phases_of(configured))
        self._resolved = configured
        self._slow_rank: int | None = None  # the rank that was named, until it has recovered
        self._cause = ""
        self._recent: deque[RoundTotals] = deque(maxlen=_STEPS_AFTER)
        self._before: RoundTotals | None = None

    def phase(self, step: int) -> SyncPhase:
        """Return the rule of a step, and where its phase ends."""
        return phase_at_step(phases_of(self._resolved), step)

    @property
    def choices(self) -> tuple[str, ...]:
        """The rules among which the run has still to choose; empty if the rule is known."""
        return choices_of(self._resolved)

    @property
    def awaited_rank(self) -> AwaitedRank | None:
        """The slow rank whose recovery ends the present phase; None if no rank was named."""
        if self._slow_rank is None:
            return None
        return AwaitedRank(self._slow_rank, self._cause, count_returns(self._configured, self._resolved))

    def record_round(self, stats: StepStats, num_steps: int, events: Mapping[str, Mapping[str, Any]]) -> bool:
        """Record a completed round; return whether another rule begins after it.

        Args:
            num_steps: of the round.
            events: the events of the round with their records, by name.
        """
        self._recent.append(RoundTotals(num_steps, stats.num_items, stats.seconds))
        self._note_gain(stats.step + 1)
        rule, until = self.phase(stats.step)
        if until in events:
            event = events[str(until)]
            chosen = str(event.get(UNTIL_MEASURED, ""))
            self._resolved = resolve_phases(self._resolved, stats.step + 1, chosen)
            self._slow_rank, self._cause = event.get("rank"), str(event.get("cause", ""))
        elif until is None and RECOVERED in events:
            self._resolved = append_return(self._configured, self._resolved, stats.step + 1)
            self._slow_rank = None
        if self.phase(stats.step + 1).rule == rule:
            return False
        self._before = sum_rounds(list(self._recent)[-_ROUNDS_BEFORE:])
        self._recent.clear()
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"sync": self._resolved, "slow": self._slow_rank, "cause": self._cause}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved phases; start anew if the recipe now asks for other phases."""
        saved = str(state.get("sync", self._configured))
        resolved = saved if is_resolved_from(self._configured, saved) else self._configured
        self._slow_rank = state.get("slow") if resolved == saved else None
        self._cause = str(state.get("cause", ""))
        if resolved != self._resolved:
            self._resolved, self._before = resolved, None
            self._recent.clear()

    def _note_gain(self, step: int) -> None:
        after = sum_rounds(self._recent)
        if self._before is not None and after.steps >= _STEPS_AFTER:
            self._note("gain", {"step": step, **measure_gain_of_switch(self._before, after)})
            self._before = None


def sum_rounds(rounds: Collection[RoundTotals]) -> RoundTotals:
    """Return the totals of at least one round."""
    steps, items, seconds = (sum(column) for column in zip(*rounds, strict=True))
    return RoundTotals(int(steps), items, seconds)


def measure_gain_of_switch(before: RoundTotals, after: RoundTotals) -> dict[str, float]:
    """Return the seconds of a step before and after a switch, and the ratio of items per second; pure."""
    rates = [totals.items / max(totals.seconds, 1e-9) for totals in (before, after)]
    return {
        "before": before.seconds / before.steps,
        "after": after.seconds / after.steps,
        "times": rates[1] / rates[0] if rates[0] else 0.0,
    }


def enter_rule(
    session: Session,
    build_parts: Callable[[SessionBase, Task, TrainState], RuleParts],
    step: int,
    *,
    carries_state: bool = True,
) -> None:
    """Switch the session to the sync rule that is active at `step`; collective, between two rounds.

    Args:
        session: changed in place, if it runs under another rule now.
        build_parts: builds the parts that depend on the rule.
        carries_state: the state continues under the new rule; false: another state is about to be loaded.
    """
    switches, context = session.rule_switches, session.session_base.context
    rule = switches.phase(step).rule
    # A state that is loaded may have chosen its rule already: then the chooser around every-step must go.
    chooses_alike = carries_state or bool(context.rule_inputs.choices) == bool(switches.choices)
    if rule == session.strategy.sync and chooses_alike:
        return
    session.wait_for_save()  # a save in the background still reads tensors that are replaced below
    transfer = StateTransfer(session.state, session.mesh, session.net) if carries_state else None
    _release_rule(session)
    context = replace(
        context,
        recipe=context.recipe.with_strategy(session.full_strategy.with_sync(rule)),
        close_callbacks=[],
        rule_inputs=replace(
            context.rule_inputs,
            loss_tolerant_rules=[],
            choices=switches.choices,
            awaited_rank=switches.awaited_rank,
        ),
    )
    session.session_base = replace(session.session_base, context=context)
    session.parts = build_parts(session.session_base, session.task, session.state)
    for install in session.reinstall_hooks:
        install()
    if transfer is not None:
        session.prepare_restore(transfer.scalars)
        session.state.read_from(transfer, transfer.scalars)()
        session.events.add("switch", {"step": step, "sync": rule})


def _release_rule(session: Session) -> None:
    """Drop what the rule keeps outside of `parts`; gradients go too, as they may keep a bucket in memory."""
    session.close_rule()
    session.state.extra_states.clear()
    session.state.has_local_optimizer = False
    sharded_model = session.runner.sharded_model
    for parameter in (*sharded_model.computes.values(), *sharded_model.updates.values()):
        parameter.grad = None
