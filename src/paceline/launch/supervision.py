"""Workers that will not go on by themselves: a signal has stopped them, or their phase has taken too long.

A process that is stopped, or that is stuck in a C call, cannot keep its own deadline, and the others may have
ended already. One that a signal has stopped is named at the second look, and may go on until it has had its
time. Invariant: time in which the launcher itself was stopped does not count.

Workers that a job can lose: which failures do not end it, and what is said of them.

Invariant: a failure is borne only while the servers, whose workers the others are, live and are trained with
(a run may begin under another rule); in the end a job is what they made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.job.launcher_reports import LEAVING, TRAINING, TRAINING_FOR_SERVER, WorkerPhase, read_phase
from paceline.launch.outcome import diagnose_worker, has_failed
from paceline.launch.process_inspection import is_stopped, read_position, request_stack_dumps
from paceline.launch.shutdown import ShutdownPlan
from paceline.launch.worker_process import WorkerProcess

_CHECK_SECONDS = 0.25
_SLACK_SECONDS = 5.0  # the worker keeps its deadline itself where it can, and its error says more
_TRAINING_PHASES = (TRAINING, TRAINING_FOR_SERVER, LEAVING)


class StuckWorkerMonitor:
    """Looks at the workers of a node from time to time.

    Args:
        running: all of them.
        stuck_seconds: how long a worker may be stopped; infinity: for ever.
        now: on the monotonic clock.
        tell: hears of a worker that is stopped, and that it goes on.
    """

    def __init__(
        self,
        running: Sequence[WorkerProcess],
        stuck_seconds: float,
        now: float,
        tell: Callable[[str], object],
    ) -> None:
        self._running, self._stuck_seconds, self._tell = running, stuck_seconds, tell
        self._stopped_seconds, self._told = [0.0] * len(running), [False] * len(running)
        self._last_look_at = now

    def begun(self) -> bool:
        """Whether a worker has said that it trains."""
        phases = (read_worker_phase(one) for one in self._running)
        return any(phase is not None and phase.what in _TRAINING_PHASES for phase in phases)

    def late(self, now: float) -> list[WorkerProcess]:
        """Workers that must be ended; `overdue` holds the reason."""
        passed = now - self._last_look_at
        if passed < _CHECK_SECONDS:
            return []
        self._last_look_at = now
        found = []
        for i, one in enumerate(self._running):
            if one.ended_at is not None or one.killed:
                continue
            still = self._stopped_seconds[i] + min(passed, 2 * _CHECK_SECONDS) if is_stopped(one.pid) else 0.0
            self._log_stopped(i, still)
            self._stopped_seconds[i] = still
            one.overdue = self._overdue_reason(one, still, now)
            found += [one] if one.overdue else []
        return found

    def _log_stopped(self, i: int, stopped_seconds: float) -> None:
        """Tell once that a worker is stopped: at the second look, as the first may see a whole job go on."""
        one, before = self._running[i], self._stopped_seconds[i]
        name = f"rank {one.worker.global_rank}"
        if stopped_seconds and before and not self._told[i]:
            ends = math.isfinite(self._stuck_seconds)
            then = f"it has {self._stuck_seconds:g} s to go on" if ends else "the job waits for it"
            self._tell(
                f"{name} is stopped by a signal (SIGSTOP?){_format_phase(read_worker_phase(one))}: {then}\n"
            )
            self._told[i] = True
        elif self._told[i] and not stopped_seconds:
            self._tell(f"{name} goes on after {before:.1f} s\n")
            self._told[i] = False

    def _overdue_reason(self, one: WorkerProcess, stopped_seconds: float, now: float) -> str:
        phase = read_worker_phase(one)
        doing = _format_phase(phase)
        if stopped_seconds > self._stuck_seconds:
            return f"was stopped by a signal (SIGSTOP?) for more than {self._stuck_seconds:g} s{doing}"
        if phase is None or phase.until is None or now <= phase.until + _SLACK_SECONDS or stopped_seconds:
            return ""
        request_stack_dumps([(one.pid, one.worker.stack_file)])
        where = read_position(one.worker.stack_file)
        return f"did not come to an end{doing}" + (f"; it was in {where}" if where else "")


def read_worker_phase(one: WorkerProcess) -> WorkerPhase | None:
    """What a worker said last, of this node."""
    return read_phase(one.worker.error_file.parent, one.worker.global_rank)


def _format_phase(phase: WorkerPhase | None) -> str:
    return f" while {phase.what}" if phase is not None else ""


_UNKILLABLE_SECONDS = 5.0


class ToleratedLosses:
    """The workers that a node has lost.

    Args:
        servers: see `Job`.
        tell: shows a line to the user.
        lose: is given the rank of every worker that is lost; the store knows from then on that it is gone.
    """

    def __init__(self, servers: int, tell: Callable[[str], object], lose: Callable[[int], object]) -> None:
        self._servers, self._tell, self._lose = servers, tell, lose
        self._lost: list[WorkerProcess] = []

    def tolerates(self, one: WorkerProcess, stop: ShutdownPlan) -> bool:
        """Whether the job goes on although this worker has ended; the user is told."""
        if not (self._is_expendable(one, stop) and has_failed(one, stop)):
            return False
        failure = diagnose_worker(one, stop)
        headline = "has ended" if failure is None else failure.headline
        self._lost.append(one)
        self._lose(one.worker.global_rank)
        self._tell(f"rank {one.worker.global_rank} {headline}; the server goes on without it where it can\n")
        return True

    def kill_if_tolerated(self, one: WorkerProcess, stop: ShutdownPlan) -> bool:
        """End a worker that will not go on by itself; whether the job goes on without it."""
        if not self._is_expendable(one, stop):
            return False
        one.kill(_UNKILLABLE_SECONDS)
        return self.tolerates(one, stop)

    def judged_workers(self, running: Sequence[WorkerProcess]) -> Sequence[WorkerProcess]:
        """Those by which the job is judged: all, if a server has not ended well."""
        servers = [one for one in running if one.worker.global_rank < max(1, self._servers)]
        if not all(one.process.returncode in (0, 143) for one in servers):
            return running
        return [one for one in running if one not in self._lost]

    def _is_expendable(self, one: WorkerProcess, stop: ShutdownPlan) -> bool:
        asked = stop.terminated or stop.signal is not None
        is_worker = one.worker.global_rank >= self._servers > 0
        return stop.begun and not asked and is_worker and not _is_indispensable(one)


def _is_indispensable(one: WorkerProcess) -> bool:
    """Whether it trains under a rule that needs all."""
    phase = read_worker_phase(one)
    return phase is not None and phase.what == TRAINING
