"""When something is due: every so many steps, every so many minutes, the same on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable


def reached(every_steps: int, before: int, step: int) -> bool:
    """Whether a round from step `before` to `step` has reached or passed a multiple of the interval."""
    return every_steps > 0 and step // every_steps > before // every_steps


class EveryMinutes:
    """A clock that all ranks read alike: rank 0 looks, and says when to look again.

    Ranks talk at few steps: at about half of what is left, then at half of that.

    Args:
        minutes: the interval; 0: never due, and nobody talks.
        is_first: whether this is the rank whose clock counts.
        total: adds up a number of every rank; collective.
        now: seconds on a clock that never goes back.
    Wire: one all_reduce of 8 bytes at some steps.
    """

    def __init__(
        self,
        minutes: float,
        is_first: bool,
        total: Callable[[float], float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._is_first, self._total, self._now = 60.0 * minutes, is_first, total, now
        self._since, self._steps, self._ask_in = now(), 0, 1

    @property
    def asks(self) -> bool:
        """Whether ranks talk about the time at all."""
        return self._seconds > 0

    def due(self, steps: int) -> bool:
        """Whether the interval is over; collective.

        Args:
            steps: taken since the last call.
        """
        self._steps += steps
        self._ask_in -= steps
        if not self.asks or self._ask_in > 0:
            return False
        answer = int(self._total(self._steps_left() if self._is_first else 0.0))
        self._ask_in = max(1, answer)
        return answer == 0

    def restart(self) -> None:
        """Something has just been done: the next time is an interval from now."""
        self._since, self._steps, self._ask_in = self._now(), 0, 1

    def _steps_left(self) -> float:
        """0 if it is time, else half of the steps that are left at the pace so far."""
        passed = self._now() - self._since
        if passed >= self._seconds:
            return 0.0
        pace = max(passed / max(1, self._steps), 1e-6)
        return float(max(1, int((self._seconds - passed) / pace / 2)))
