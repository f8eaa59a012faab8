"""When the phases of a run end, as far as it is known; and what a change of rule has gained.

A phase that waits for something ends after the round in which that has happened, on all ranks, since what
happens is found from numbers that all have. From then on its step is known, and is state: a run that goes on
from a later checkpoint has switched there, one from an earlier checkpoint has not. Where a rule has taken
over from a slow rank, the run goes back once that has recovered, and waits for the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from paceline.observe import Stats
from paceline.recipe.phases import (
    CHOSEN,
    Phase,
    at_step,
    choices_of,
    ended,
    is_reading,
    num_returns,
    phases_of,
    returned,
)
from paceline.sync.health import Note
from paceline.sync.recovery import RECOVERED, Awaited

KEPT_AS = "turns"
_BEFORE = 4  # rounds of a step: a window of those who name slow ranks
_AFTER = 8  # steps, which may be one round


class Round(NamedTuple):
    """What a round did.

    Args:
        items: that its updates were made of.
    """

    steps: int
    items: float
    seconds: float


class Turns:
    """The phases of a run.

    Args:
        asked: as the recipe says.
        note: is told what a change of rule has gained.
    Attributes:
        waits: a phase was asked to end where something happens.
    """

    def __init__(self, asked: str, note: Note) -> None:
        self._asked, self._note = asked, note
        self.waits = any(isinstance(phase.until, str) for phase in phases_of(asked))
        self._found = asked
        self._slow: int | None = None  # the rank that was named, until it has recovered
        self._cause = ""
        self._recent: deque[Round] = deque(maxlen=_AFTER)
        self._before: Round | None = None

    def phase(self, step: int) -> Phase:
        """The rule of a step, and until when it holds."""
        return at_step(phases_of(self._found), step)

    @property
    def choices(self) -> tuple[str, ...]:
        """The rules that the run may still choose from; empty: it is known."""
        return choices_of(self._found)

    @property
    def awaited(self) -> Awaited | None:
        """Who has to recover, for the run to go back; None: nobody was named."""
        if self._slow is None:
            return None
        return Awaited(self._slow, self._cause, num_returns(self._asked, self._found))

    def passed(self, stats: Stats, steps: int, events: Mapping[str, Mapping[str, Any]]) -> bool:
        """A round is over; whether another rule begins here, by one of these events.

        Args:
            steps: of the round.
            events: what has happened in it, by name.
        """
        self._recent.append(Round(steps, stats.num_items, stats.seconds))
        self._tell_gain(stats.step + 1)
        rule, until = self.phase(stats.step)
        if until in events:
            happened = events[str(until)]
            self._found = ended(self._found, stats.step + 1, str(happened.get(CHOSEN, "")))
            self._slow, self._cause = happened.get("rank"), str(happened.get("cause", ""))
        elif until is None and RECOVERED in events:
            self._found, self._slow = returned(self._asked, self._found, stats.step + 1), None
        if self.phase(stats.step + 1).rule == rule:
            return False
        self._before = add_up(list(self._recent)[-_BEFORE:])
        self._recent.clear()
        return True

    def state_dict(self) -> dict[str, Any]:
        """What is known."""
        return {"sync": self._found, "slow": self._slow, "cause": self._cause}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was known; a recipe that asks for other phases begins anew."""
        known = str(state.get("sync", self._asked))
        found = known if is_reading(self._asked, known) else self._asked
        self._slow = state.get("slow") if found == known else None
        self._cause = str(state.get("cause", ""))
        if found != self._found:
            self._found, self._before = found, None
            self._recent.clear()

    def _tell_gain(self, step: int) -> None:
        after = add_up(self._recent)
        if self._before is not None and after.steps >= _AFTER:
            self._note("gain", {"step": step, **gain(self._before, after)})
            self._before = None


def add_up(rounds: Collection[Round]) -> Round:
    """Rounds as one."""
    steps, items, seconds = (sum(column) for column in zip(*rounds, strict=True))
    return Round(int(steps), items, seconds)


def gain(before: Round, after: Round) -> dict[str, float]:
    """Seconds of a step, and how many times as many items a second are trained on; pure."""
    rates = [one.items / max(one.seconds, 1e-9) for one in (before, after)]
    return {
        "before": before.seconds / before.steps,
        "after": after.seconds / after.steps,
        "times": rates[1] / rates[0] if rates[0] else 0.0,
    }
