"""A clock on which only what a test says takes long: how busy the machine is must not decide who is slow."""

from __future__ import annotations

import time

from paceline.observe import step_stats


class Clock:
    """In place of the module `time`, where a rank measures itself.

    Args:
        real: how much of the time that really passes counts; a little, so that nothing takes no time.
    """

    def __init__(self, real: float = 1e-3) -> None:
        self.spent, self._real = 0.0, real

    def perf_counter(self) -> float:
        """Seconds that were spent, and some of those that passed."""
        return self.spent + self._real * time.perf_counter()

    def spend(self, seconds: float) -> None:
        """Something takes so long on this rank."""
        self.spent += seconds


def own_clock(real: float = 1e-3) -> Clock:
    """By which all phases of this rank are measured from now on, until its process ends."""
    clock = Clock(real)
    step_stats.time = clock
    return clock
