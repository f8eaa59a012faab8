"""The launcher's view of a job in which nothing moves: when that is so, what all ranks do, and the end of it.

The status lines of the ranks are files that this process reads without their help. How long nothing may move
is learned from the run: from its steps, and from the pauses that it has made before.

Invariants: nothing is sent to a process that would end by it. Time in which the launcher itself was stopped
does not count. Only a hang in which no step can end any more is ended early, and a link that carries nothing;
all others end by the deadlines of the ranks (`supervision` ends a rank that a signal has stopped). Behind a
blocked link the job continues on the node that serves its store, if the ranks there can: that node counts the
others as lost, and all other nodes end their ranks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from paceline.job.launcher_reports import TRAINING_ELASTIC, read_run_folder, request_abort
from paceline.launch.hang_explainer import HangExplanation, RankSituation, explain_hang
from paceline.launch.process_inspection import (
    handles_stack_requests,
    read_position,
    request_stack_dumps,
    session_cpu_seconds,
)
from paceline.launch.supervision import read_worker_phase
from paceline.launch.worker_process import WorkerProcess
from paceline.observe.process_info import is_stopped
from paceline.observe.rank_activity import RankOperation, read_operations

_CHECK_SECONDS = 0.5
_MIN_SECONDS = 5.0
_STEPS_BEFORE = 3  # the first steps compile, and fill caches
_USUAL_STEPS, _LONGEST_PAUSES = 20.0, 3.0
_SHARE_OF_DEADLINE = 0.75  # the ranks give up after the deadline, and then nothing is left to be explained
_SAMPLE_SECONDS = 1.0
_BUSY_SHARE = 0.05  # of a core: on a full machine a rank that computes gets little of one
_END_SECONDS = 12.0
_DEFAULT_DEADLINE_SECONDS = 120.0
_SLOW_LINK_BYTES = 2**16  # in a second: more than heartbeats and retries, and less than a link that is slow


def measure_cpu_seconds(operations: Sequence[RankOperation]) -> dict[int, float]:
    """Return the CPU time of each rank of this host and its child processes so far, in seconds."""
    return {one.rank: session_cpu_seconds(one.pid) for one in operations if one.alive}


def describe_ranks(
    operations: Sequence[RankOperation], cpu_seconds_before: Mapping[int, float], seconds: float
) -> list[RankSituation]:
    """Return what each rank does, with the positions of those of this host, which takes up to 2 s.

    Args:
        cpu_seconds_before: of `measure_cpu_seconds`, some time ago.
        seconds: how long ago that was.
    """
    cpu_seconds = measure_cpu_seconds(operations)
    prepared = {
        one.rank: (one.pid, one.stack)
        for one in operations
        if one.alive and one.stack is not None and handles_stack_requests(one.pid)
    }
    sizes = {rank: _size(path) for rank, (_, path) in prepared.items()}
    request_stack_dumps(list(prepared.values()))
    return [
        RankSituation(
            rank=one.rank,
            step=one.step,
            operation=one.operation,
            seconds=max(0.0, time.time() - one.since),
            group=one.group,
            call=one.call,
            num_bytes=one.num_bytes,
            calls=one.calls,
            process=_process_state(one),
            is_computing=cpu_seconds.get(one.rank, 0.0) - cpu_seconds_before.get(one.rank, math.inf)
            > _BUSY_SHARE * seconds,
            # The stack of a process that was stopped since an earlier request is not its present one.
            position=read_position(prepared[one.rank][1])
            if one.rank in prepared and _size(prepared[one.rank][1]) > sizes[one.rank]
            else "",
            host=one.host,
        )
        for one in operations
    ]


def received_bytes(path: Path = Path("/proc/net/dev")) -> int:
    """Return the bytes that the interfaces of this host have received so far; 0 if they are not known."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()[2:]
        return sum(int(line.partition(":")[2].split()[0]) for line in lines)
    except (OSError, ValueError, IndexError):
        return 0


def ranks_that_left(operations: Sequence[RankOperation]) -> list[int]:
    """Return the ranks of the job that have ended their run while others have not."""
    present = {one.rank for one in operations}
    return [rank for rank in range(operations[0].num_ranks) if rank not in present] if operations else []


def _process_state(one: RankOperation) -> Literal["running", "stopped", "ended", "unknown"]:
    if one.alive is None:
        return "unknown"
    if not one.alive:
        return "ended"
    return "stopped" if is_stopped(one.pid) else "running"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class PauseLimit:
    """The time for which nothing may move in a run, learned from its steps and its pauses so far.

    Args:
        deadline_seconds: after which the ranks themselves give up.
    """

    def __init__(self, deadline_seconds: float) -> None:
        deadline = deadline_seconds if math.isfinite(deadline_seconds) else _DEFAULT_DEADLINE_SECONDS
        self.most_seconds = _SHARE_OF_DEADLINE * deadline
        self._steps: deque[float] = deque(maxlen=20)
        self._longest_pause = 0.0
        self._step: tuple[int, float] | None = None
        self._num_steps = 0

    @property
    def usual_step_seconds(self) -> float:
        """Median of the last steps; 0 before the first one."""
        return median(self._steps) if self._steps else 0.0

    @property
    def seconds(self) -> float:
        """Seconds in which nothing may move now; infinity if the ranks give up earlier."""
        if self.most_seconds < _MIN_SECONDS:
            return math.inf
        if self._num_steps < _STEPS_BEFORE:
            return self.most_seconds
        learned = max(_USUAL_STEPS * self.usual_step_seconds, _LONGEST_PAUSES * self._longest_pause)
        return min(self.most_seconds, max(_MIN_SECONDS, learned))

    def observe(self, step: int, pause: float, now: float) -> None:
        """Record that something has moved.

        Args:
            step: of the rank that is furthest.
            pause: seconds since something moved before.
        """
        if self._num_steps >= _STEPS_BEFORE:
            self._longest_pause = max(self._longest_pause, pause)
        before = self._step
        if before is None or step < before[0]:
            self._step = step, now
        elif step > before[0]:
            self._steps.append((now - before[1]) / (step - before[0]))
            self._num_steps += step - before[0]
            self._step = step, now


class HangMonitor:
    """A periodic comparison of the status lines of all ranks, which explains a hang once.

    Args:
        folder: folder of the launcher, in which the workers report where their status lines are.
        workers: of this node.
        deadline_seconds: `runtime.deadline_seconds`; infinity: that of recipes that set none.
        now: on the monotonic clock.
        log: prints the explanation.
        mark_lost: receives the rank of each process behind a blocked link, so that the store counts it as
            gone; None: this is not the first node, which serves the store.
    """

    def __init__(
        self,
        folder: Path,
        workers: Sequence[WorkerProcess],
        deadline_seconds: float,
        now: float,
        log: Callable[[str], object],
        mark_lost: Callable[[int], object] | None = None,
    ) -> None:
        self._folder, self._workers, self._log, self._mark_lost = folder, workers, log, mark_lost
        self._elsewhere: list[int] = []
        self._limit = PauseLimit(deadline_seconds)
        self._seen: dict[int, int] = {}
        self._last_check_at = self._moved_at = now
        self._sample: tuple[float, dict[int, float]] | None = None
        self._explained: tuple[float, HangExplanation] | None = None
        self._shown: set[int] = set()
        self._received_bytes, self._shows_all = 0, False

    def overdue(self, now: float) -> list[WorkerProcess]:
        """Return workers that must be ended, since no step can end any more; `overdue` holds the reason."""
        passed = now - self._last_check_at
        if passed < _CHECK_SECONDS:
            return []
        self._last_check_at = now
        # A longer gap means that the launcher was stopped as well.
        self._moved_at += max(0.0, passed - 2 * _CHECK_SECONDS)
        run_dir = read_run_folder(self._folder)
        operations = [] if run_dir is None else read_operations(run_dir)
        seen = {one.rank: one.number for one in operations}
        self._shown |= seen.keys()
        if not operations or seen != self._seen:
            self._observe(operations, now)
            self._seen = seen
            return []
        pause = now - self._moved_at
        if self._explained is None and pause >= self._limit.seconds - _SAMPLE_SECONDS:
            self._explain(operations, pause, now)
        return self._end_certain_hang(now)

    def _observe(self, operations: Sequence[RankOperation], now: float) -> None:
        if self._explained is not None:
            self._log(f"the job continues after {now - self._moved_at:.0f} s\n")
        step = max((one.step for one in operations), default=0)
        self._limit.observe(step, now - self._moved_at, now)
        self._moved_at, self._sample, self._explained = now, None, None

    def _explain(self, operations: Sequence[RankOperation], pause: float, now: float) -> None:
        if self._sample is None:
            self._sample = now, measure_cpu_seconds(operations)
            return
        began, cpu_seconds = self._sample
        if now - began < _SAMPLE_SECONDS:
            return
        situations = describe_ranks(operations, cpu_seconds, now - began)
        # A rank that has never shown anything may be on a host that does not share the run folder.
        left = [rank for rank in ranks_that_left(operations) if rank in self._shown]
        explanation = explain_hang(situations, left)
        self._sample, self._shows_all = None, len(operations) == operations[0].num_ranks
        if explanation.kind == "slow" and pause < self._limit.most_seconds - _SAMPLE_SECONDS:
            return
        usual = self._limit.usual_step_seconds
        steps = f" (a step takes {usual:.2g} s)" if usual else ""
        self._log(f"nothing has moved for {pause:.0f} s{steps}: {explanation.text}\n")
        self._explained, self._received_bytes = (now, explanation), received_bytes()
        self._elsewhere = [one.rank for one in operations if one.alive is None]

    def _end_certain_hang(self, now: float) -> list[WorkerProcess]:
        if self._explained is None:
            return []
        explained_at, explanation = self._explained
        if now - explained_at < _END_SECONDS:
            return []
        if not explanation.is_certain:
            if not self._is_link_blocked(now - explained_at):
                return []
            if self._leave_others():
                self._explained, self._moved_at = None, now
                return []
        late = [worker for worker in self._workers if worker.ended_at is None and not worker.killed]
        for worker in late:
            worker.overdue = f"hung: {explanation.text.partition(' Next: ')[0].rstrip('.')}"
        return late

    def _leave_others(self) -> bool:
        """Count the ranks of other hosts as lost if those of this node can continue without them."""
        alive = [worker for worker in self._workers if worker.ended_at is None and not worker.killed]
        phases = [read_worker_phase(worker) for worker in alive]
        can_continue = all(phase is not None and phase.what == TRAINING_ELASTIC for phase in phases)
        if self._mark_lost is None or not self._elsewhere or not can_continue:
            return False
        ranks = ", ".join(map(str, self._elsewhere))
        self._log(f"the ranks behind the link count as lost ({ranks}): the job continues without them\n")
        for rank in self._elsewhere:
            self._mark_lost(rank)
        request_abort(self._folder)
        return True

    def _is_link_blocked(self, seconds: float) -> bool:
        """Return whether all ranks wait in one call, and almost nothing has arrived here since that was seen.

        Args:
            seconds: since then.
        """
        kind = None if self._explained is None else self._explained[1].kind
        arrived = received_bytes() - self._received_bytes
        return kind == "link" and self._shows_all and arrived < _SLOW_LINK_BYTES * seconds
