"""When to ask the workers to end and when to end them. Pure: the clock is an argument.

Invariant: once stopping has begun it ends, at the latest after the settle, kill and grace times of the job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["wait", "terminate", "kill"]


@dataclass
class Stop:
    """The plan for the end of a job. Times are seconds of one monotonic clock; infinity: not planned.

    Args:
        settle_seconds: after a failure, until SIGTERM.
        kill_seconds: after that, until SIGKILL.
        grace_seconds: after a forwarded signal, or the first worker that left, until SIGKILL.
    """

    settle_seconds: float
    kill_seconds: float
    grace_seconds: float
    signal: int | None = None
    terminate_at: float = float("inf")
    kill_at: float = float("inf")
    terminated: bool = False

    def on_signal(self, number: int, now: float) -> None:
        """The launcher was told to stop: the first time pass it on, the second time kill."""
        if self.signal is None:
            self.signal = number
            self.terminate_at = min(self.terminate_at, now)
            self.kill_at = min(self.kill_at, now + self.grace_seconds)
        else:
            self.kill_at = now

    def on_failure(self, now: float) -> None:
        """A worker failed: let the others find out, then end them. Later failures change nothing."""
        self.terminate_at = min(self.terminate_at, now + self.settle_seconds)
        self.kill_at = min(self.kill_at, now + self.settle_seconds + self.kill_seconds)

    def on_leave(self, now: float) -> None:
        """A worker was asked to stop by someone else, and has left: so will the others, or they are stuck."""
        self.kill_at = min(self.kill_at, now + self.grace_seconds)

    def due(self, now: float) -> Action:
        """What to do now. "terminate" is said once, "kill" as long as it is asked."""
        if now >= self.kill_at:
            return "kill"
        if now >= self.terminate_at and not self.terminated:
            self.terminated = True
            return "terminate"
        return "wait"
