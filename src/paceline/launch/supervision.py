"""Supervision of the workers while they run: which are stuck, and which losses the job survives.

A process that is stopped, or stuck in a C call, cannot keep its own deadline, and its peers can have ended
already; so the launcher keeps it. Invariants: time in which the launcher itself was stopped does not count. A
loss is tolerated only while the servers, for which the other ranks work, are alive and training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.job.launcher_reports import (
    LEAVING,
    TRAINING,
    TRAINING_ELASTIC,
    TRAINING_FOR_SERVER,
    WorkerPhase,
    read_phase,
)
from paceline.launch.outcome import (
    STOPPED_EXIT_CODE,
    STOPPED_HEADLINE,
    WorkerFailure,
    diagnose_worker,
    has_failed,
)
from paceline.launch.process_inspection import read_position, request_stack_dumps
from paceline.launch.shutdown import ShutdownPlan
from paceline.launch.worker_process import WorkerProcess
from paceline.observe.process_info import is_stopped

UNKILLABLE_SECONDS = 5.0  # a process in an uninterruptible call (a lost disk, a lost GPU) cannot be killed
_CHECK_SECONDS = 0.25
_SLACK_SECONDS = 5.0  # a worker that can keep its deadline itself ends first, and its error says more
_STOPPED_SECONDS = 10.0
_TRAINING_PHASES = (TRAINING, TRAINING_ELASTIC, TRAINING_FOR_SERVER, LEAVING)


class StuckWorkerMonitor:
    """A periodic check for workers that a signal has stopped, or whose phase takes too long.

    Args:
        workers: all workers of the node.
        stuck_seconds: how long a worker may be stopped; infinity: for any time. While it trains and another
            worker is not stopped, it is at most 10 s: the others wait for it. While it trains for a server
            and another worker does too, it is at most 10 s, once: at the next pause all would wait for it.
        now: on the monotonic clock.
        log: prints that a worker is stopped, and that it continues.
        servers: number of server ranks; see `LaunchJob`.
        nodes: of the job; on another node ranks may wait for the only one of this node.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        stuck_seconds: float,
        now: float,
        log: Callable[[str], object],
        servers: int = 0,
        nodes: int = 1,
    ) -> None:
        self._servers, self._nodes = servers, nodes
        self._workers, self._stuck_seconds, self._log = workers, stuck_seconds, log
        self._stopped_seconds: dict[int, float] = {}
        self._is_logged: set[int] = set()
        self._last_check_at = now

    def begun(self) -> bool:
        """Return whether a worker has reported that it trains."""
        phases = (read_worker_phase(worker) for worker in self._workers)
        return any(phase is not None and phase.what in _TRAINING_PHASES for phase in phases)

    def late(self, now: float) -> list[WorkerProcess]:
        """Return the workers that must be ended; their `overdue` holds the reason."""
        passed = now - self._last_check_at
        if passed < _CHECK_SECONDS:
            return []
        self._last_check_at = now
        late = []
        for i, worker in enumerate(self._workers):
            if worker.ended_at is not None or worker.killed:
                continue
            # a longer gap means that the launcher was stopped, too; the worker is not charged for it
            counted = min(passed, 2 * _CHECK_SECONDS)
            before = self._stopped_seconds.get(i, 0.0)
            stopped_seconds = before + counted if is_stopped(worker.pid) else 0.0
            self._log_stopped(i, stopped_seconds)
            self._stopped_seconds[i] = stopped_seconds
            worker.overdue = self._overdue_reason(worker, stopped_seconds, now)
            late += [worker] if worker.overdue else []
        return late

    def _log_stopped(self, i: int, stopped_seconds: float) -> None:
        worker, before = self._workers[i], self._stopped_seconds.get(i, 0.0)
        name = f"rank {worker.spec.global_rank}"
        # only at the second check: the first one can see a whole job that is just being continued
        if stopped_seconds and before and i not in self._is_logged:
            seconds = self._limit_seconds(worker)
            limit = (
                f"it must continue within {seconds:g} s" if math.isfinite(seconds) else "the job waits for it"
            )
            doing = _format_phase(read_worker_phase(worker))
            self._log(f"{name} is stopped by a signal (SIGSTOP?){doing}: {limit}\n")
            self._is_logged.add(i)
        elif i in self._is_logged and not stopped_seconds:
            self._log(f"{name} continues after {before:.1f} s\n")
            self._is_logged.discard(i)

    def _limit_seconds(self, worker: WorkerProcess) -> float:
        """Return how long a worker may be stopped."""
        if not self._servers:
            # A job that is stopped as a whole (Ctrl-Z, a debugger) is waited for.
            is_awaited = self._nodes > 1 or any(_is_well(one) for one in self._workers if one is not worker)
            phase = read_worker_phase(worker)
            is_training = phase is not None and phase.what in (TRAINING, TRAINING_ELASTIC)
            limited = is_awaited and is_training
            return min(self._stuck_seconds, _STOPPED_SECONDS) if limited else self._stuck_seconds
        served = [other for other in self._workers if self._trains_for_server(other)]
        others = [other for other in served if other is not worker]
        # A server that can continue without one worker may not be able to continue without two.
        is_expendable = worker in served and others and all(map(_is_well, others))
        return min(self._stuck_seconds, _STOPPED_SECONDS) if is_expendable else self._stuck_seconds

    def _trains_for_server(self, worker: WorkerProcess) -> bool:
        phase = read_worker_phase(worker)
        serves = worker.spec.global_rank < self._servers
        return self._servers > 0 and not serves and phase is not None and phase.what == TRAINING_FOR_SERVER

    def _overdue_reason(self, worker: WorkerProcess, stopped_seconds: float, now: float) -> str:
        phase = read_worker_phase(worker)
        doing = _format_phase(phase)
        limit_seconds = self._limit_seconds(worker) if stopped_seconds else math.inf
        if stopped_seconds > limit_seconds:
            return f"{STOPPED_HEADLINE} for more than {limit_seconds:g} s{doing}"
        if phase is None or phase.until is None or now <= phase.until + _SLACK_SECONDS or stopped_seconds:
            return ""
        request_stack_dumps([(worker.pid, worker.spec.stack_file)])
        position = read_position(worker.spec.stack_file)
        return f"did not finish in time{doing}" + (f"; it was in {position}" if position else "")


def _is_well(worker: WorkerProcess) -> bool:
    return not (worker.ended_at or worker.killed or worker.overdue or is_stopped(worker.pid))


def read_worker_phase(worker: WorkerProcess) -> WorkerPhase | None:
    """Return the phase that a worker of this node reported last; None if it has reported none."""
    return read_phase(worker.spec.error_file.parent, worker.spec.global_rank)


def _format_phase(phase: WorkerPhase | None) -> str:
    return f" while {phase.what}" if phase is not None else ""


class ToleratedLosses:
    """The workers that this node has lost and that the job continues without.

    Args:
        workers: all workers of the node.
        servers: number of server ranks; see `LaunchJob`.
        log: prints a line for each tolerated loss.
        mark_lost: receives the rank of each one, so that the store counts it as gone.
        is_replacement: returns whether a worker was started in place of a lost one.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        servers: int,
        log: Callable[[str], object],
        mark_lost: Callable[[int], object],
        is_replacement: Callable[[WorkerProcess], bool] = lambda worker: False,
    ) -> None:
        self._workers, self._servers, self._log, self._mark_lost = workers, servers, log, mark_lost
        self._is_replacement = is_replacement
        self._lost: list[WorkerProcess] = []

    def tolerates(self, worker: WorkerProcess, shutdown: ShutdownPlan) -> bool:
        """Return whether the job continues although this worker has ended, and log it if so."""
        if not (self._is_expendable(worker, shutdown) and has_failed(worker, shutdown)):
            return False
        failure = diagnose_worker(worker, shutdown)
        if not self._servers and not self._is_unjoined(worker) and not _is_loss(worker, failure):
            return False
        headline = "has ended" if failure is None else failure.headline
        rank = worker.spec.global_rank
        self._lost.append(worker)
        self._mark_lost(rank)
        outlook = "the server continues without it if it can"
        if failure is not None and failure.kind == "connection":
            outlook = "if the server is alive, it continues without it"  # it may be what the worker has lost
        if not self._servers:
            outlook = "the other ranks continue without it"
        self._log(f"rank {rank} {headline}; {outlook}\n")
        return True

    def kill_if_tolerated(self, worker: WorkerProcess, shutdown: ShutdownPlan) -> bool:
        """Kill a stuck worker if the job can continue without it; returns whether it can."""
        if not self._is_expendable(worker, shutdown):
            return False
        worker.kill(UNKILLABLE_SECONDS)
        return self.tolerates(worker, shutdown)

    def is_replaceable(self, worker: WorkerProcess) -> bool:
        """Return whether a process may be started in place of a lost worker."""
        return not self._servers and not self._is_unjoined(worker)

    def end_unjoined(self) -> None:
        """End workers that wait to join a job whose other workers have ended."""
        alive = [worker for worker in self._workers if worker.ended_at is None]
        if alive and all(map(self._is_unjoined, alive)):
            for worker in alive:
                self._lost.append(worker)
                worker.kill(UNKILLABLE_SECONDS)

    def judged_workers(self, workers: Sequence[WorkerProcess]) -> Sequence[WorkerProcess]:
        """Return the workers that decide the outcome: without the losses, if the servers ended well."""
        remaining = [worker for worker in workers if worker not in self._lost]
        servers = [worker for worker in workers if worker.spec.global_rank < max(1, self._servers)]
        decisive = servers if self._servers else remaining
        # Without anyone left, the losses themselves are the outcome.
        if not decisive or not all(
            worker.process.returncode in (0, STOPPED_EXIT_CODE) for worker in decisive
        ):
            return workers
        return remaining

    def _is_expendable(self, worker: WorkerProcess, shutdown: ShutdownPlan) -> bool:
        serves = worker.spec.global_rank < self._servers
        # after the end of a server, the others end because of it
        if not shutdown.begun or shutdown.is_ending or serves:
            return False
        if not self._servers:
            return self._is_replica(worker) or self._is_unjoined(worker)
        # a run can begin under a sync rule without servers, which needs every worker
        phase = read_worker_phase(worker)
        return phase is None or phase.what != TRAINING

    def _is_unjoined(self, worker: WorkerProcess) -> bool:
        """Return whether a worker was started in place of a lost one and does not train yet."""
        phase = read_worker_phase(worker)
        return self._is_replacement(worker) and (phase is None or phase.what not in _TRAINING_PHASES)

    def _is_replica(self, worker: WorkerProcess) -> bool:
        """Return whether the worker was one of several replicas, of which another one is well."""
        phase = read_worker_phase(worker)
        others = [other for other in self._workers if other is not worker]
        return phase is not None and phase.what == TRAINING_ELASTIC and any(map(_is_well, others))


def _is_loss(worker: WorkerProcess, failure: WorkerFailure | None) -> bool:
    """Return whether a worker was lost, and did not end by an error that others would raise as well."""
    return bool(worker.overdue) or (failure is not None and failure.kind in ("signal", "connection"))
