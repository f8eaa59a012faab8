"""When to ask the workers to exit, and when to kill them. Pure: the clock is an argument.

Invariant: once a shutdown has begun it ends, at the latest after the settle, kill and grace times of the job.
Time in which the launcher itself was suspended does not count, since the workers were suspended as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SETUP_GRACE_SECONDS = 1.5
ShutdownAction = Literal["wait", "terminate", "kill"]
_MAX_GAP_SECONDS = 0.25  # longer pauses between two readings of the clock are left out


@dataclass(frozen=True)
class ShutdownTimeouts:
    """How long the launcher waits before each step of a shutdown.

    Args:
        settle_seconds: after a failure, time for the other workers to notice it and report it themselves.
        kill_seconds: after that, time to exit on SIGTERM.
        grace_seconds: after Ctrl-C or SIGTERM, time to finish the step and save.
        stuck_seconds: how long a process may be stopped by a signal (SIGSTOP) before the job is ended.
    """

    settle_seconds: float = 1.0
    kill_seconds: float = 3.0
    grace_seconds: float = 10.0
    stuck_seconds: float = float("inf")


class SuspendAwareClock:
    """A clock that leaves out the time in which nobody read it.

    A machine that sleeps, or that gives its cores to other virtual machines, stops the launcher and the
    workers alike.
    """

    def __init__(self) -> None:
        self._skipped_seconds, self._last_reading = 0.0, float("inf")

    def at(self, now: float) -> float:
        """Return the seconds of this clock.

        Args:
            now: on the monotonic clock, never earlier than at the reading before.
        """
        self._skipped_seconds += max(0.0, now - self._last_reading - _MAX_GAP_SECONDS)
        self._last_reading = now
        return now - self._skipped_seconds


@dataclass
class ShutdownPlan:
    """The state of a shutdown; `due` is polled several times a second.

    Args:
        timeouts: of the job.
        begun: there is something to save; before that a forwarded signal has only `SETUP_GRACE_SECONDS`.
    Attributes:
        signal: the signal that the launcher received first; None: none.
        terminate_at, kill_at: when the workers are asked to exit and when they are killed; infinity: never.
        terminated: the workers have been asked to exit.
    """

    timeouts: ShutdownTimeouts
    begun: bool = True
    signal: int | None = None
    terminate_at: float = float("inf")
    kill_at: float = float("inf")
    terminated: bool = False
    _kill_at_before_signal: float = float("inf")
    _clock: SuspendAwareClock = field(default_factory=SuspendAwareClock, repr=False)

    def on_signal(self, number: int, now: float) -> None:
        """Handle a signal to the launcher: the first one is passed on, the second one kills."""
        now = self._clock.at(now)
        if self.signal is None:
            self.signal = number
            self.terminate_at = min(self.terminate_at, now)
            self._kill_at_before_signal = self.kill_at
            grace = self.timeouts.grace_seconds if self.begun else SETUP_GRACE_SECONDS
            self.kill_at = min(self.kill_at, now + grace)
        else:
            self.kill_at = now

    @property
    def is_ending(self) -> bool:
        """True if the workers were asked to exit, or soon will be."""
        return self.terminate_at < float("inf")

    def stop_requested(self) -> bool:
        """Return whether a signal has asked this launcher to stop."""
        return self.signal is not None

    def on_begin(self, now: float) -> None:
        """Note that the first step begins; a signal that came a moment before now leaves time to save."""
        now = self._clock.at(now)
        if not self.begun and self.signal is not None and now < self.kill_at:
            self.kill_at = min(self._kill_at_before_signal, now + self.timeouts.grace_seconds)
        self.begun = True

    def on_failure(self, now: float) -> None:
        """Schedule the end of the other workers after one has failed; later failures change nothing."""
        now = self._clock.at(now)
        settled = now + self.timeouts.settle_seconds
        self.terminate_at = min(self.terminate_at, settled)
        self.kill_at = min(self.kill_at, settled + self.timeouts.kill_seconds)

    def on_worker_left(self, now: float) -> None:
        """Limit the time of the other workers after one has exited because something else asked it to."""
        # whatever asked it will ask the others as well; one that stays is stuck
        now = self._clock.at(now)
        self.kill_at = min(self.kill_at, now + self.timeouts.grace_seconds)

    def due(self, now: float) -> ShutdownAction:
        """Return the action that is due: "terminate" once, "kill" at every call from then on."""
        now = self._clock.at(now)
        if now >= self.kill_at:
            return "kill"
        if now >= self.terminate_at and not self.terminated:
            self.terminated = True
            return "terminate"
        return "wait"
