"""Starting the workers of a node, with nothing of an earlier job in their way, and tidying up after them.

Invariant: every worker that was started is in the list of those that run, whatever happens next.

Show the lines of the workers that write to files, each with its rank in front, but those of the first.

Invariant: a line is shown once and whole, and reading never waits for a worker.

Run one node's processes to their end: start, watch, stop, report.

Invariant: when `launch` returns or raises, no process of the job is left on this node, and the signal
handlers are what they were. What to start is decided in `render`, when to stop in `stop`.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from paceline.job.cluster import process_environment
from paceline.job.cpu_count import num_cores
from paceline.job.launcher_reports import NOTHING_TO_SAVE, clear_node_list, clear_phase
from paceline.launch.fork_client import ForkClient, fork_server, is_worthwhile
from paceline.launch.job_spec import LaunchJob, NodeContext, WorkerSpec, render_workers, socket_folder
from paceline.launch.node_liveness import NodeLivenessProbe
from paceline.launch.outcome import (
    LaunchOutcome,
    diagnose_worker,
    has_failed,
    has_stopped,
    summarize_failures,
)
from paceline.launch.process_inspection import request_stack_dumps
from paceline.launch.shutdown import ShutdownAction, ShutdownPlan
from paceline.launch.stale_folders import FOLDER_PREFIX, mark_owner, remove_stale_folders
from paceline.launch.store_endpoint import StoreEndpoint, serve_store
from paceline.launch.supervision import StuckWorkerMonitor, ToleratedLosses
from paceline.launch.worker_process import SessionReaper, WorkerProcess, start_worker, wait_for_end

UNKILLABLE_SECONDS = 5.0  # a process in an uninterruptible call (a lost disk, a lost GPU) cannot be killed


def start_workers(
    running: list[WorkerProcess],
    workers: Sequence[WorkerSpec],
    keeper: SessionReaper,
    forks: ForkClient,
    stop: ShutdownPlan,
) -> None:
    """Start one after the other, until a signal says that nobody wants them any more.

    A fork server that does not answer takes those along that it has forked: they are started anew.

    Args:
        running: those that run; each is put there as soon as it does.
    """
    for worker in workers:
        _remove_earlier_files(worker)
        if not stop.stop_requested():
            running.append(start_worker(worker, keeper, forks))
    for i, one in enumerate(running):
        if forks.lost and one.forked:
            one.kill(UNKILLABLE_SECONDS)
            _remove_earlier_files(one.worker)
            running[i] = start_worker(one.worker, keeper, forks)


def _remove_earlier_files(worker: WorkerSpec) -> None:
    """Remove what an earlier job left in the same log folder."""
    worker.error_file.unlink(missing_ok=True)
    worker.stack_file.unlink(missing_ok=True)
    clear_phase(worker.error_file.parent, worker.global_rank)
    clear_node_list(worker.error_file.parent)


def remove_worker_files(worker: WorkerSpec) -> None:
    """Remove what is of no use once the process has ended."""
    worker.stack_file.unlink(missing_ok=True)
    shutil.rmtree(socket_folder(worker.error_file.parent, worker.global_rank), ignore_errors=True)


class LogFollower:
    """What the log files have grown by since the last look.

    Args:
        workers: those with a log file are followed, from what it holds now.
        say: is given one line at a time, with its end.
    """

    def __init__(self, workers: Sequence[WorkerSpec], say: Callable[[str], object]) -> None:
        self._files: dict[int, Path] = {
            worker.global_rank: worker.log_file for worker in workers if worker.log_file is not None
        }
        self._prefixes = {w.global_rank: f"[rank {w.global_rank}] " if w.local_rank else "" for w in workers}
        self._offsets = {rank: path.stat().st_size for rank, path in self._files.items()}
        self._say = say

    def show(self) -> None:
        """Show all whole lines that are new."""
        for rank, path in self._files.items():
            with path.open("rb") as stream:
                stream.seek(self._offsets[rank])
                whole, newline, _ = stream.read().rpartition(b"\n")
            self._offsets[rank] += len(whole) + len(newline)
            for line in whole.decode(errors="replace").split("\n") if newline else ():
                self._say(f"{self._prefixes[rank]}{line}\n")


_TICK_SECONDS = 0.1
_STOP_EXIT_CODES = (128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP)
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

TextOutput = Callable[[str], object]


def launch(
    job: LaunchJob, *, environ: Mapping[str, str] | None = None, say: TextOutput | None = None
) -> LaunchOutcome:
    """Start the processes of this node and wait for their end.

    The output of the first process is the launcher's own; that of the others goes to files. The first
    failure ends all others within a few seconds. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP are passed on as
    SIGTERM; the second one kills. A worker that exits with 143 was asked to stop by someone else: the
    others have the grace time to follow. Signals are handled only when this is called in the main thread.
    The workers die with the calling thread.

    Args:
        environ: the environment that workers inherit; None: that of this process.
        say: shows a text to the user (the report of a failure, the lines of other processes); None:
            standard error.
    Returns:
        The exit code and what failed, the cause first.
    Raises:
        CommunicationError: the rendezvous cannot be bound.
        PacelineError: the command cannot be started.
    """
    tell: TextOutput = sys.stderr.write if say is None else say
    stop = ShutdownPlan(job.settle_seconds, job.kill_seconds, job.grace_seconds, begun=not job.announces)
    with _open_folder(job) as folder, _signals_to(stop):
        inherited = process_environment() if environ is None else environ
        with (
            NodeLivenessProbe(job.nodes, job.node_rank, Path(folder), job.meeting) as peers,
            serve_store(job, tell) as (endpoint, token),
            _running_workers(job, Path(folder), inherited, (endpoint, token, peers.port), stop) as running,
        ):
            shows = job.output in ("prefixed", "shown")
            follow = LogFollower([one.worker for one in running], tell) if shows else None
            watch = StuckWorkerMonitor(running, job.stuck_seconds, time.monotonic(), tell)
            losses = ToleratedLosses(job.servers, tell, endpoint.lose)
            _supervise(
                running, stop, watch, follow, losses, lambda one: _record_end(one, stop, peers, endpoint)
            )
            outcome = _build_outcome(job, losses.judged_workers(running), stop, peers)
    if outcome.report:
        tell(outcome.report)
    elif not stop.begun and outcome.exit_code in _STOP_EXIT_CODES:
        tell(f"{NOTHING_TO_SAVE}\n")
    return outcome


def _build_outcome(
    job: LaunchJob, running: Sequence[WorkerProcess], stop: ShutdownPlan, peers: NodeLivenessProbe
) -> LaunchOutcome:
    failures = [failure for one in running if (failure := diagnose_worker(one, stop)) is not None]
    return summarize_failures(
        failures,
        stop_signal=stop.signal,
        stopped=any(has_stopped(one) for one in running),
        nodes=job.nodes,
        logs=str(job.log_dir or ""),
        lost=peers.lost(),
    )


def _open_folder(job: LaunchJob) -> tempfile.TemporaryDirectory[str] | nullcontext[str]:
    if job.log_dir is None:
        remove_stale_folders()
        folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
        mark_owner(Path(folder.name))
        return folder
    job.log_dir.mkdir(parents=True, exist_ok=True)
    return nullcontext(str(job.log_dir.resolve()))


@contextmanager
def _signals_to(stop: ShutdownPlan) -> Iterator[None]:
    """Let signals change the plan instead of ending this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda number, _: stop.on_signal(number, time.monotonic()))
        for number in _FORWARDED_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup asks
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _running_workers(
    job: LaunchJob,
    folder: Path,
    environ: Mapping[str, str],
    meeting: tuple[StoreEndpoint, str, int],
    stop: ShutdownPlan,
) -> Iterator[Sequence[WorkerProcess]]:
    """Start all workers of the node; at the end, however it comes, none of their sessions is left."""
    endpoint, token, beacon_port = meeting
    running: list[WorkerProcess] = []
    with SessionReaper() as keeper, ExitStack() as forking:
        try:
            keeper.remove_at_death(folder if job.log_dir is None else None)
            workers = render_workers(job, _node_context(endpoint, token, folder, beacon_port), environ)
            with _fork_server_for(
                workers, num_cores(), environ
            ) as variables:  # what it has forked outlives it
                keeper.remove_at_death(*map(Path, variables.values()))
                forks = forking.enter_context(ForkClient({**environ, **variables}, stop.stop_requested))
                start_workers(running, workers, keeper, forks, stop)
            endpoint.hand_over()
            yield running
        finally:
            for one in running:
                one.kill(UNKILLABLE_SECONDS)
                remove_worker_files(one.worker)


def _node_context(endpoint: StoreEndpoint, token: str, folder: Path, beacon_port: int) -> NodeContext:
    return NodeContext(
        endpoint.address,
        endpoint.port,
        endpoint.torch_port,
        None if endpoint.listener is None else endpoint.listener.fileno(),
        tuple(line.fileno() for line in endpoint.lines),
        token,
        folder,
        num_cores(),
        beacon_port,
    )


def _fork_server_for(
    workers: Sequence[WorkerSpec], cores: int, environ: Mapping[str, str]
) -> AbstractContextManager[Mapping[str, str]]:
    """A fork server for one job, if that pays; the variables that name it."""
    return fork_server((), environ) if is_worthwhile(workers, cores) else nullcontext({})


def _supervise(
    running: Sequence[WorkerProcess],
    stop: ShutdownPlan,
    watch: StuckWorkerMonitor,
    follow: LogFollower | None,
    losses: ToleratedLosses,
    record_end: Callable[[WorkerProcess], None],
) -> None:
    """Wait until every worker has ended, and make them end when it is time."""
    while any(one.ended_at is None for one in running):
        wait_for_end(running, _TICK_SECONDS)
        now = time.monotonic()
        ended = [one for one in running if one.poll()]
        if not stop.begun and watch.begun():  # asked after: what one said before it ended counts
            stop.on_begin(now)
        for one in ended:
            if not losses.tolerates(one, stop):
                record_end(one)
        _kill_stuck([one for one in watch.late(now) if not losses.kill_if_tolerated(one, stop)], stop, now)
        if follow is not None:
            follow.show()
        if _carry_out_shutdown(running, stop, now) == "kill":
            break
    if follow is not None:
        follow.show()


def _kill_stuck(late: Sequence[WorkerProcess], stop: ShutdownPlan, now: float) -> None:
    """End those that will not go on by themselves; that ends the job."""
    for one in late:
        one.kill(UNKILLABLE_SECONDS)
        stop.on_failure(now)


def _record_end(
    one: WorkerProcess, stop: ShutdownPlan, peers: NodeLivenessProbe, endpoint: StoreEndpoint
) -> None:
    now = time.monotonic()
    endpoint.lose(one.worker.global_rank)
    one.told = stop.terminated
    if has_failed(one, stop):
        stop.on_failure(now)
        peers.ask()
    elif has_stopped(one):
        stop.on_worker_left(now)


def _carry_out_shutdown(running: Sequence[WorkerProcess], stop: ShutdownPlan, now: float) -> ShutdownAction:
    action = stop.due(now)
    alive = [one for one in running if one.ended_at is None]
    if action == "terminate":
        _request_positions(alive, stop)
        for one in alive:
            one.terminate()
    elif action == "kill":
        for one in alive:
            one.kill(UNKILLABLE_SECONDS)
    return action


def _request_positions(alive: Sequence[WorkerProcess], stop: ShutdownPlan) -> None:
    if stop.signal is None:
        request_stack_dumps([(one.pid, one.worker.stack_file) for one in alive])
