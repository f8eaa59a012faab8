"""Time in which a launcher looked at its workers. Pure: the clock is an argument.

Whoever stands still, as everything does on a machine that is asleep or that gives its cores to others for a
while, sees nothing of what the workers have done since; they stood still as well.

When to ask the workers to end and when to end them. Pure: the clock is an argument.

Invariant: once stopping has begun it ends, at the latest after the settle, kill and grace times of the job.
Of these, time in which the launcher stood still does not count: the workers had none of it either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

_MAX_GAP_SECONDS = 0.25  # between two looks; what is more is left out


class SuspendAwareClock:
    """A clock that leaves out the time in which nobody looked at it."""

    def __init__(self) -> None:
        self._skipped_seconds, self._last_look_at = 0.0, float("inf")

    def at(self, now: float) -> float:
        """Seconds of this clock, at a look.

        Args:
            now: on the monotonic clock, never earlier than at the look before.
        """
        self._skipped_seconds += max(0.0, now - self._last_look_at - _MAX_GAP_SECONDS)
        self._last_look_at = now
        return now - self._skipped_seconds


SETUP_GRACE_SECONDS = 1.5
ShutdownAction = Literal["wait", "terminate", "kill"]


@dataclass
class ShutdownPlan:
    """The plan for the end of a job; `due` is asked several times a second. Infinity: not planned.

    Args:
        settle_seconds: after a failure, until SIGTERM.
        kill_seconds: after that, until SIGKILL.
        grace_seconds: after a forwarded signal, or the first worker that left, until SIGKILL.
        begun: there may be something to save; else a forwarded signal has `SETUP_GRACE_SECONDS`.
    """

    settle_seconds: float
    kill_seconds: float
    grace_seconds: float
    begun: bool = True
    signal: int | None = None
    terminate_at: float = float("inf")
    kill_at: float = float("inf")
    terminated: bool = False
    _before_kill: float = float("inf")
    _awake: SuspendAwareClock = field(default_factory=SuspendAwareClock, repr=False)

    def on_signal(self, number: int, now: float) -> None:
        """The launcher was told to stop: the first time pass it on, the second time kill."""
        now = self._awake.at(now)
        if self.signal is None:
            self.signal = number
            self.terminate_at = min(self.terminate_at, now)
            self._before_kill = self.kill_at
            grace = self.grace_seconds if self.begun else SETUP_GRACE_SECONDS
            self.kill_at = min(self.kill_at, now + grace)
        else:
            self.kill_at = now

    def stop_requested(self) -> bool:
        """Whether a signal has asked this launcher to stop."""
        return self.signal is not None

    def on_begin(self, now: float) -> None:
        """The first step begins: if a signal has come a moment before, it can still be saved."""
        now = self._awake.at(now)
        if not self.begun and self.signal is not None and now < self.kill_at:
            self.kill_at = min(self._before_kill, now + self.grace_seconds)
        self.begun = True

    def on_failure(self, now: float) -> None:
        """A worker failed: let the others find out, then end them. Later failures change nothing."""
        now = self._awake.at(now)
        self.terminate_at = min(self.terminate_at, now + self.settle_seconds)
        self.kill_at = min(self.kill_at, now + self.settle_seconds + self.kill_seconds)

    def on_worker_left(self, now: float) -> None:
        """A worker was asked to stop by someone else, and has left: so will the others, or they are stuck."""
        now = self._awake.at(now)
        self.kill_at = min(self.kill_at, now + self.grace_seconds)

    def due(self, now: float) -> ShutdownAction:
        """What to do now. "terminate" is said once, "kill" as long as it is asked."""
        now = self._awake.at(now)
        if now >= self.kill_at:
            return "kill"
        if now >= self.terminate_at and not self.terminated:
            self.terminated = True
            return "terminate"
        return "wait"
