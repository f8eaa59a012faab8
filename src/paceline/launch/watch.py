"""Workers that will not go on by themselves: a signal has stopped them, or their phase has taken too long.

A process that is stopped, or that is stuck in a C call, cannot keep its own deadline, and the others may have
ended already. One that a signal has stopped is named at the second look, and may go on until it has had its
time. Invariant: time in which the launcher itself was stopped does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.launch.process import Running
from paceline.launch.procfs import is_stopped
from paceline.launch.stacks import read_position, request_stacks
from paceline.phase import LEAVING, SERVED, TRAINING, Phase, read_phase

_LOOK_SECONDS = 0.25
_SLACK_SECONDS = 5.0  # the worker keeps its deadline itself where it can, and its error says more
_BEGUN = (TRAINING, SERVED, LEAVING)


class Watch:
    """Looks at the workers of a node from time to time.

    Args:
        running: all of them.
        stuck_seconds: how long a worker may be stopped; infinity: for ever.
        now: on the monotonic clock.
        tell: hears of a worker that is stopped, and that it goes on.
    """

    def __init__(
        self, running: Sequence[Running], stuck_seconds: float, now: float, tell: Callable[[str], object]
    ) -> None:
        self._running, self._stuck_seconds, self._tell = running, stuck_seconds, tell
        self._stopped_seconds, self._told = [0.0] * len(running), [False] * len(running)
        self._looked_at = now

    def begun(self) -> bool:
        """Whether a worker has said that it trains."""
        phases = (phase_of(one) for one in self._running)
        return any(phase is not None and phase.what in _BEGUN for phase in phases)

    def late(self, now: float) -> list[Running]:
        """Workers that must be ended; `overdue` holds the reason."""
        passed = now - self._looked_at
        if passed < _LOOK_SECONDS:
            return []
        self._looked_at = now
        found = []
        for i, one in enumerate(self._running):
            if one.ended_at is not None or one.killed:
                continue
            still = self._stopped_seconds[i] + min(passed, 2 * _LOOK_SECONDS) if is_stopped(one.pid) else 0.0
            self._notice(i, still)
            self._stopped_seconds[i] = still
            one.overdue = self._why(one, still, now)
            found += [one] if one.overdue else []
        return found

    def _notice(self, i: int, stopped_seconds: float) -> None:
        """Tell once that a worker is stopped: at the second look, as the first may see a whole job go on."""
        one, before = self._running[i], self._stopped_seconds[i]
        name = f"rank {one.worker.global_rank}"
        if stopped_seconds and before and not self._told[i]:
            ends = math.isfinite(self._stuck_seconds)
            then = f"it has {self._stuck_seconds:g} s to go on" if ends else "the job waits for it"
            self._tell(f"{name} is stopped by a signal (SIGSTOP?){_doing(phase_of(one))}: {then}\n")
            self._told[i] = True
        elif self._told[i] and not stopped_seconds:
            self._tell(f"{name} goes on after {before:.1f} s\n")
            self._told[i] = False

    def _why(self, one: Running, stopped_seconds: float, now: float) -> str:
        phase = phase_of(one)
        doing = _doing(phase)
        if stopped_seconds > self._stuck_seconds:
            return f"was stopped by a signal (SIGSTOP?) for more than {self._stuck_seconds:g} s{doing}"
        if phase is None or phase.until is None or now <= phase.until + _SLACK_SECONDS or stopped_seconds:
            return ""
        request_stacks([(one.pid, one.worker.stack_file)])
        where = read_position(one.worker.stack_file)
        return f"did not come to an end{doing}" + (f"; it was in {where}" if where else "")


def phase_of(one: Running) -> Phase | None:
    """What a worker said last, of this node."""
    return read_phase(one.worker.error_file.parent, one.worker.global_rank)


def _doing(phase: Phase | None) -> str:
    return f" while {phase.what}" if phase is not None else ""
