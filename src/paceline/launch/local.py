"""Run one node's processes to their end: start, watch, stop, report.

Invariant: when `launch` returns or raises, no process of the job is left on this node, and the signal
handlers are what they were. What to start is decided in `render`, when to stop in `stop`.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from paceline.cluster import process_environment
from paceline.cores import num_cores
from paceline.launch.endpoint import Endpoint, serving
from paceline.launch.follow import Follow
from paceline.launch.forked import ForkClient, fork_server, pays
from paceline.launch.job import Job
from paceline.launch.judge import failed, has_stopped, judge
from paceline.launch.litter import PREFIX, clean_litter, own
from paceline.launch.losses import Losses
from paceline.launch.outcome import Outcome, conclude
from paceline.launch.peers import Peers
from paceline.launch.process import Keeper, Running, wait_for_end
from paceline.launch.render import Place, Worker, render_workers
from paceline.launch.stacks import request_stacks
from paceline.launch.starting import UNKILLABLE_SECONDS, clean_after, start_all
from paceline.launch.stop import Action, Stop
from paceline.launch.watch import Watch
from paceline.phase import NOTHING_TO_SAVE

_TICK_SECONDS = 0.1
_ASKED = (128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP)
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

Say = Callable[[str], object]


def launch(job: Job, *, environ: Mapping[str, str] | None = None, say: Say | None = None) -> Outcome:
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
    tell: Say = sys.stderr.write if say is None else say
    stop = Stop(job.settle_seconds, job.kill_seconds, job.grace_seconds, begun=not job.announces)
    with _open_folder(job) as folder, _signals_to(stop):
        inherited = process_environment() if environ is None else environ
        with (
            Peers(job.nodes, job.node_rank, Path(folder), job.meeting) as peers,
            serving(job, tell) as (endpoint, token),
            _started(job, Path(folder), inherited, (endpoint, token, peers.port), stop) as running,
        ):
            shows = job.output in ("prefixed", "shown")
            follow = Follow([one.worker for one in running], tell) if shows else None
            watch = Watch(running, job.stuck_seconds, time.monotonic(), tell)
            losses = Losses(job.servers, tell, endpoint.lose)
            _supervise(
                running, stop, watch, follow, losses, lambda one: _note_end(one, stop, peers, endpoint)
            )
            outcome = _conclude(job, losses.those_that_count(running), stop, peers)
    if outcome.report:
        tell(outcome.report)
    elif not stop.begun and outcome.exit_code in _ASKED:
        tell(f"{NOTHING_TO_SAVE}\n")
    return outcome


def _conclude(job: Job, running: Sequence[Running], stop: Stop, peers: Peers) -> Outcome:
    failures = [failure for one in running if (failure := judge(one, stop)) is not None]
    return conclude(
        failures,
        stop_signal=stop.signal,
        stopped=any(has_stopped(one) for one in running),
        nodes=job.nodes,
        logs=str(job.log_dir or ""),
        lost=peers.lost(),
    )


def _open_folder(job: Job) -> tempfile.TemporaryDirectory[str] | nullcontext[str]:
    if job.log_dir is None:
        clean_litter()
        folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        own(Path(folder.name))
        return folder
    job.log_dir.mkdir(parents=True, exist_ok=True)
    return nullcontext(str(job.log_dir.resolve()))


@contextmanager
def _signals_to(stop: Stop) -> Iterator[None]:
    """Let signals change the plan instead of ending this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda number, _: stop.on_signal(number, time.monotonic()))
        for number in _PASSED_ON
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup asks
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _started(
    job: Job, folder: Path, environ: Mapping[str, str], meeting: tuple[Endpoint, str, int], stop: Stop
) -> Iterator[Sequence[Running]]:
    """Start all workers of the node; at the end, however it comes, none of their sessions is left."""
    endpoint, token, beacon_port = meeting
    running: list[Running] = []
    with Keeper() as keeper, ExitStack() as forking:
        try:
            keeper.remove_at_death(folder if job.log_dir is None else None)
            workers = render_workers(job, _place(endpoint, token, folder, beacon_port), environ)
            with _server_of(workers, num_cores(), environ) as variables:  # what it has forked outlives it
                keeper.remove_at_death(*map(Path, variables.values()))
                forks = forking.enter_context(ForkClient({**environ, **variables}, stop.is_asked))
                start_all(running, workers, keeper, forks, stop)
            endpoint.hand_over()
            yield running
        finally:
            for one in running:
                one.kill(UNKILLABLE_SECONDS)
                clean_after(one.worker)


def _place(endpoint: Endpoint, token: str, folder: Path, beacon_port: int) -> Place:
    return Place(
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


def _server_of(
    workers: Sequence[Worker], cores: int, environ: Mapping[str, str]
) -> AbstractContextManager[Mapping[str, str]]:
    """A fork server for one job, if that pays; the variables that name it."""
    return fork_server((), environ) if pays(workers, cores) else nullcontext({})


def _supervise(
    running: Sequence[Running],
    stop: Stop,
    watch: Watch,
    follow: Follow | None,
    losses: Losses,
    note_end: Callable[[Running], None],
) -> None:
    """Wait until every worker has ended, and make them end when it is time."""
    while any(one.ended_at is None for one in running):
        wait_for_end(running, _TICK_SECONDS)
        now = time.monotonic()
        ended = [one for one in running if one.poll()]
        if not stop.begun and watch.begun():  # asked after: what one said before it ended counts
            stop.on_begin(now)
        for one in ended:
            if not losses.bears(one, stop):
                note_end(one)
        _give_up([one for one in watch.late(now) if not losses.gives_up(one, stop)], stop, now)
        if follow is not None:
            follow.show()
        if _act(running, stop, now) == "kill":
            break
    if follow is not None:
        follow.show()


def _give_up(late: Sequence[Running], stop: Stop, now: float) -> None:
    """End those that will not go on by themselves; that ends the job."""
    for one in late:
        one.kill(UNKILLABLE_SECONDS)
        stop.on_failure(now)


def _note_end(one: Running, stop: Stop, peers: Peers, endpoint: Endpoint) -> None:
    now = time.monotonic()
    endpoint.lose(one.worker.global_rank)
    one.told = stop.terminated
    if failed(one, stop):
        stop.on_failure(now)
        peers.ask()
    elif has_stopped(one):
        stop.on_leave(now)


def _act(running: Sequence[Running], stop: Stop, now: float) -> Action:
    action = stop.due(now)
    alive = [one for one in running if one.ended_at is None]
    if action == "terminate":
        _ask_where(alive, stop)
        for one in alive:
            one.terminate()
    elif action == "kill":
        for one in alive:
            one.kill(UNKILLABLE_SECONDS)
    return action


def _ask_where(alive: Sequence[Running], stop: Stop) -> None:
    if stop.signal is None:
        request_stacks([(one.pid, one.worker.stack_file) for one in alive])
