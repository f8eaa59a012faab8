"""Run the processes of one node to their end: start, supervise, shut down, report.

Invariants: when `launch` returns or raises, no process of the job is left on this node, and the signal
handlers are what they were. Every worker that was started is in the list of workers, whatever happens next.
What to start is decided in `job_spec`, when to stop in `shutdown`, and which failure is the cause in
`outcome`.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from paceline.job.cluster import current_place, process_environment
from paceline.job.cpu_count import num_cores
from paceline.job.handshake import needs_encryption
from paceline.job.launcher_reports import (
    NOTHING_TO_SAVE,
    clear_node_list,
    clear_phase,
    clear_run_folder,
    read_node_list,
)
from paceline.job.standby_store import announce_end
from paceline.launch.fork_client import ForkClient, fork_server, is_worthwhile
from paceline.launch.hang_monitor import HangMonitor
from paceline.launch.job_spec import (
    JOINS,
    LaunchJob,
    NodeContext,
    WorkerSpec,
    render_replacement,
    render_workers,
    socket_folder,
)
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
from paceline.launch.supervision import UNKILLABLE_SECONDS, StuckWorkerMonitor, ToleratedLosses
from paceline.launch.worker_guard import ErrorReport
from paceline.launch.worker_process import SessionReaper, WorkerProcess, start_worker, wait_for_end

_TICK_SECONDS = 0.1
_STOP_EXIT_CODES = (128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP)
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

TextOutput = Callable[[str], object]


def launch(
    job: LaunchJob, *, environ: Mapping[str, str] | None = None, log: TextOutput | None = None
) -> LaunchOutcome:
    """Start the processes of this node and wait for their end.

    The output of the first process is the launcher's own; that of the others goes to files. The first
    failure ends all others within a few seconds. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP are passed on as
    SIGTERM; the second one kills. If a worker exits with 143, something else has asked it to stop, and the
    others have the grace time to follow. Signals are handled only when this is called in the main thread.
    The workers die with the calling thread.

    Args:
        environ: the environment that workers inherit; None: that of this process.
        log: prints a text for the user (the report of a failure, the lines of other processes); None:
            standard error.
    Returns:
        The exit code and the failures, the cause first.
    Raises:
        CommunicationError: the rendezvous address cannot be bound.
        PacelineError: the command cannot be started.
    """
    write: TextOutput = sys.stderr.write if log is None else log
    shutdown = ShutdownPlan(job.timeouts, begun=not job.announces)
    place = current_place() if job.nodes > 1 else None
    # An engine that starts a lost node again needs the end of the others, so that all meet anew.
    stands_by = place is None or not place.starts_launchers
    with _open_folder(job) as folder, _signals_to(shutdown):
        inherited = process_environment() if environ is None else environ
        with (
            NodeLivenessProbe(job.nodes, job.node_rank, Path(folder), job.meeting) as peers,
            serve_store(job, write, stands_by=stands_by) as (endpoint, token),
            _running_workers(job, Path(folder), inherited, (endpoint, token, peers.port), shutdown) as (
                workers,
                replacements,
            ),
        ):
            shows = job.output in ("prefixed", "shown")
            follower = LogFollower([worker.spec for worker in workers], write) if shows else None
            monitor = StuckWorkerMonitor(
                workers, job.timeouts.stuck_seconds, time.monotonic(), write, job.servers, job.nodes
            )
            losses = ToleratedLosses(
                workers, job.servers, write, endpoint.mark_lost, replacements.is_replacement
            )
            _supervise(
                workers,
                shutdown,
                monitor,
                follower,
                losses,
                lambda worker: _record_end(worker, shutdown, peers, endpoint),
                replacements.start,
                HangMonitor(
                    Path(folder),
                    workers,
                    job.timeouts.stuck_seconds,
                    time.monotonic(),
                    write,
                    None if endpoint.server is None else endpoint.mark_lost,
                ),
            )
            outcome = _build_outcome(job, losses.judged_workers(workers), shutdown, peers)
            # Ranks of other nodes continue without this one only if it has lost its ranks, and not after an
            # error, which they would run into as well, or a stop.
            is_loss = [one.kind for one in outcome.failures[:1]] == ["signal"] and not shutdown.signal
            if outcome.exit_code and not is_loss and endpoint.server is not None:
                nodes = read_node_list(Path(folder))  # empty in a job of one node
                announce_end(nodes, token, tls=needs_encryption(job.tls, job.nodes))
    if outcome.report:
        write(outcome.report)
    elif not shutdown.begun and outcome.exit_code in _STOP_EXIT_CODES:
        write(f"{NOTHING_TO_SAVE}\n")
    return outcome


def _build_outcome(
    job: LaunchJob, workers: Sequence[WorkerProcess], shutdown: ShutdownPlan, peers: NodeLivenessProbe
) -> LaunchOutcome:
    for worker in workers if job.log_dir is not None else ():
        append_traceback(worker.spec)
    failures = [failure for worker in workers if (failure := diagnose_worker(worker, shutdown)) is not None]
    return summarize_failures(
        failures,
        stop_signal=shutdown.signal,
        stopped=any(has_stopped(worker) for worker in workers),
        nodes=job.nodes,
        logs=str(job.log_dir or ""),
        lost=peers.lost(),
    )


def _open_folder(job: LaunchJob) -> tempfile.TemporaryDirectory[str] | nullcontext[str]:
    """Return the folder for logs and reports of the workers: the user's, or a temporary one."""
    if job.log_dir is None:
        # A launcher that was killed could not remove its folder, so the next one does.
        remove_stale_folders()
        folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
        mark_owner(Path(folder.name))
        return folder
    job.log_dir.mkdir(parents=True, exist_ok=True)
    clear_run_folder(job.log_dir)
    return nullcontext(str(job.log_dir.resolve()))


@contextmanager
def _signals_to(shutdown: ShutdownPlan) -> Iterator[None]:
    """Let signals change the plan instead of ending this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda number, _: shutdown.on_signal(number, time.monotonic()))
        for number in _FORWARDED_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores SIGHUP, and that must stay so
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
    rendezvous: tuple[StoreEndpoint, str, int],
    shutdown: ShutdownPlan,
) -> Iterator[tuple[list[WorkerProcess], ReplacementStarter]]:
    """Start all workers of the node; at the end of the block, none of their sessions is left.

    Yields the workers, and what starts others in place of lost ones.

    Args:
        rendezvous: the store, the key of the job, and the port on which this launcher can be probed.
    """
    endpoint, token, beacon_port = rendezvous
    workers: list[WorkerProcess] = []
    with SessionReaper() as reaper, ExitStack() as forking:
        try:
            reaper.remove_at_death(folder if job.log_dir is None else None)
            context = NodeContext(
                endpoint.address,
                endpoint.port,
                endpoint.torch_port,
                None if endpoint.listener is None else endpoint.listener.fileno(),
                tuple(connection.fileno() for connection in endpoint.connections),
                token,
                folder,
                num_cores(),
                beacon_port,
                endpoint.standby_port,
            )
            specs = render_workers(job, context, environ)
            # The server may end at once: the processes that it has forked belong to a child of its own. Where
            # workers may be replaced it stays, so that a new one starts in a moment.
            with ExitStack() as serving:
                stays = forking if job.max_replacements else serving
                variables = stays.enter_context(_fork_server_for(specs, num_cores(), environ))
                reaper.remove_at_death(*map(Path, variables.values()))
                forks = forking.enter_context(ForkClient({**environ, **variables}, shutdown.stop_requested))
                _start_workers(workers, specs, reaper, forks, shutdown)
            endpoint.hand_over()
            yield workers, ReplacementStarter(job, context, environ, endpoint, reaper, forks)
        finally:
            for worker in workers:
                worker.kill(UNKILLABLE_SECONDS)
                remove_worker_files(worker.spec)


class ReplacementStarter:
    """A starter of workers that join the running job in place of lost ones.

    Args:
        job, context: of the node; the store must be served here.
        environ: the variables that workers inherit.
    """

    def __init__(
        self,
        job: LaunchJob,
        context: NodeContext,
        environ: Mapping[str, str],
        endpoint: StoreEndpoint,
        reaper: SessionReaper,
        forks: ForkClient,
    ) -> None:
        self._job, self._context, self._environ = job, context, environ
        self._endpoint, self._reaper = endpoint, reaper
        self._forks = forks
        self._num_started = 0

    def is_replacement(self, worker: WorkerProcess) -> bool:
        """Return whether this worker was started in place of another one."""
        return worker.spec.global_rank >= self._job.world_size

    def start(self, lost: WorkerProcess) -> WorkerProcess | None:
        """Start a worker in place of a lost one; None if no more may be started."""
        job = self._job
        if self._num_started >= job.max_replacements or job.nodes > 1:
            return None
        number = job.world_size + self._num_started
        connection = self._endpoint.new_connection(number)
        if connection is None:
            return None
        self._num_started += 1
        with connection:
            context = replace(self._context, store_fds=(connection.fileno(),))
            spec = render_replacement(job, context, self._environ, number, lost.spec.local_rank)
            _remove_earlier_files(spec)
            return start_worker(spec, self._reaper, self._forks)


def _fork_server_for(
    specs: Sequence[WorkerSpec], cores: int, environ: Mapping[str, str]
) -> AbstractContextManager[Mapping[str, str]]:
    """Return a fork server for this job, if that saves time; it yields the variables that name it."""
    return fork_server((), environ) if is_worthwhile(specs, cores) else nullcontext({})


def _start_workers(
    workers: list[WorkerProcess],
    specs: Sequence[WorkerSpec],
    reaper: SessionReaper,
    forks: ForkClient,
    shutdown: ShutdownPlan,
) -> None:
    """Start one worker after the other, until a stop is requested.

    Args:
        workers: the running workers; each one is appended as soon as it runs, so that it is always ended.
    """
    for spec in specs:
        _remove_earlier_files(spec)
        if not shutdown.stop_requested():
            workers.append(start_worker(spec, reaper, forks))
    # a fork server that stops answering takes the workers that it has forked with it: start those again
    for i, worker in enumerate(workers):
        if forks.lost and worker.forked:
            worker.kill(UNKILLABLE_SECONDS)
            _remove_earlier_files(worker.spec)
            workers[i] = start_worker(worker.spec, reaper, forks)


def _remove_earlier_files(spec: WorkerSpec) -> None:
    """Remove what an earlier job left in the same log folder, which would be read as this job's."""
    spec.error_file.unlink(missing_ok=True)
    spec.stack_file.unlink(missing_ok=True)
    clear_phase(spec.error_file.parent, spec.global_rank)
    clear_node_list(spec.error_file.parent)


def remove_worker_files(spec: WorkerSpec) -> None:
    """Remove the files that nobody needs once the process has ended."""
    spec.stack_file.unlink(missing_ok=True)
    shutil.rmtree(socket_folder(spec.error_file.parent, spec.global_rank), ignore_errors=True)


def append_traceback(spec: WorkerSpec) -> None:
    """Append the traceback of a worker, of which the report has one line or the user's frames, to its log."""
    report = ErrorReport.load(spec.error_file)
    if report is not None and spec.log_file is not None:
        with suppress(OSError), spec.log_file.open("a", encoding="utf-8") as log:
            log.write(report.traceback)


def _supervise(
    workers: list[WorkerProcess],
    shutdown: ShutdownPlan,
    monitor: StuckWorkerMonitor,
    follower: LogFollower | None,
    losses: ToleratedLosses,
    record_end: Callable[[WorkerProcess], None],
    start_replacement: Callable[[WorkerProcess], WorkerProcess | None],
    hangs: HangMonitor,
) -> None:
    """Wait until every worker has ended, and end them when it is time.

    Args:
        workers: those that are started in place of lost ones are appended.
    """
    while any(worker.ended_at is None for worker in workers):
        wait_for_end(workers, _TICK_SECONDS)
        now = time.monotonic()
        ended = [worker for worker in workers if worker.poll()]
        if ended:
            # A server that ended during the poll, before the workers that lost it, is the first of all.
            ended = [worker for worker in workers if worker in ended or worker.poll()]
        # After the poll: what a worker reported before it ended counts.
        if not shutdown.begun and monitor.begun():
            shutdown.on_begin(now)
        tolerated = []
        for worker in ended:
            if losses.tolerates(worker, shutdown):
                tolerated.append(worker)
            else:
                record_end(worker)
        for worker in monitor.late(now):
            if losses.kill_if_tolerated(worker, shutdown):
                tolerated.append(worker)
            else:
                worker.kill(UNKILLABLE_SECONDS)
                shutdown.on_failure(now)
        # No rank can continue after such a hang, with or without another one.
        for worker in hangs.overdue(now) if not shutdown.is_ending else ():
            worker.kill(UNKILLABLE_SECONDS)
            shutdown.on_failure(now)
        for worker in filter(losses.is_replaceable, tolerated):
            replacement = start_replacement(worker)
            if replacement is not None:
                workers.append(replacement)
                if follower is not None:
                    follower.add(replacement.spec)
        losses.end_unjoined()
        if follower is not None:
            follower.show()
        if _carry_out_shutdown(workers, shutdown, now) == "kill":
            break
    if follower is not None:
        follower.show()


def _record_end(
    worker: WorkerProcess, shutdown: ShutdownPlan, peers: NodeLivenessProbe, endpoint: StoreEndpoint
) -> None:
    now = time.monotonic()
    # its connection may outlive it in a child process, and the others would wait for it
    endpoint.mark_lost(worker.spec.global_rank)
    worker.was_signalled = shutdown.terminated
    if has_failed(worker, shutdown):
        shutdown.on_failure(now)
        peers.start_query()
    elif has_stopped(worker):
        shutdown.on_worker_left(now)


def _carry_out_shutdown(
    workers: Sequence[WorkerProcess], shutdown: ShutdownPlan, now: float
) -> ShutdownAction:
    action = shutdown.due(now)
    alive = [worker for worker in workers if worker.ended_at is None]
    if action == "terminate":
        if shutdown.signal is None:  # after a failure the report says where the others were
            request_stack_dumps([(worker.pid, worker.spec.stack_file) for worker in alive])
        for worker in alive:
            worker.terminate()
    elif action == "kill":
        for worker in alive:
            worker.kill(UNKILLABLE_SECONDS)
    return action


class LogFollower:
    """The lines by which the log files of the workers have grown since the last call.

    Invariant: a line is shown once and whole, and reading never waits for a worker.

    Args:
        specs: the workers; those with a log file are followed, from its present end.
        write: receives one line at a time, with its newline.
    """

    def __init__(self, specs: Sequence[WorkerSpec], write: TextOutput) -> None:
        self._files: dict[int, Path] = {}
        self._prefixes: dict[int, str] = {}
        self._offsets: dict[int, int] = {}
        self._write = write
        for spec in specs:
            self.add(spec)

    def add(self, spec: WorkerSpec) -> None:
        """Follow one more worker, if it has a log file."""
        if spec.log_file is None:
            return
        rank = spec.global_rank
        self._files[rank], self._offsets[rank] = spec.log_file, spec.log_file.stat().st_size
        self._prefixes[rank] = f"[rank {rank}] " if spec.local_rank or JOINS in spec.environ else ""

    def show(self) -> None:
        """Write all complete lines that are new."""
        for rank, path in self._files.items():
            with path.open("rb") as stream:
                stream.seek(self._offsets[rank])
                complete, newline, _ = stream.read().rpartition(b"\n")
            self._offsets[rank] += len(complete) + len(newline)
            for line in complete.decode(errors="replace").split("\n") if newline else ():
                self._write(f"{self._prefixes[rank]}{line}\n")
