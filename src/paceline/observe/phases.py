"""Where the time of a step goes, on this rank.

Invariant: a phase lasts until the next one begins, so that each moment of a step is in one phase: their
seconds are those of the step. What belongs to a phase is said by whoever begins the next.

Seconds are wall time between marks on the host. On a GPU the host runs ahead of the device, so there the
shares say where the host waited. It does not synchronise the device.
"""

from __future__ import annotations

import time
from typing import Literal, get_args

Phase = Literal["data", "forward", "backward", "communication", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)
OWN: tuple[Phase, ...] = ("data", "forward", "backward")
"""Those in which a rank waits for nobody."""


class Phases:
    """Seconds by phase since the last `take`; what lies before the first phase is in none."""

    def __init__(self) -> None:
        self._opened = self._since = time.perf_counter()
        self._present = ""
        self._spent = dict.fromkeys(("", *PHASES), 0.0)

    def begin(self, phase: Phase) -> None:
        """From here on time belongs to `phase`, until another begins."""
        now = time.perf_counter()
        self._spent[self._present] += now - self._since
        self._present, self._since = phase, now

    def spent(self, *phases: Phase) -> float:
        """Seconds of some phases since the last take."""
        now = time.perf_counter()
        self._spent[self._present] += now - self._since
        self._since = now
        return sum(self._spent[phase] for phase in phases)

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last take, and how they fall on the phases; starts anew, in no phase."""
        now = time.perf_counter()
        self._spent[self._present] += now - self._since
        whole, self._opened, self._since = now - self._opened, now, now
        spent: dict[str, float] = {phase: self._spent[phase] for phase in PHASES}
        self._present = ""
        self._spent = dict.fromkeys(self._spent, 0.0)
        return whole, spent
