"""Run a function on n real processes that are connected by Gloo over the loopback.

Invariant: `run_ranks` returns or raises soon after its deadline, and no rank is left then. The ranks are
forked from one server that has imported torch, so eight of them start in a fraction of a second.

The inside of one rank of `run_ranks`: connect, run the function, send what came of it.

Invariant: a rank that has failed ends at once, so that its peers lose it and say so; a rank that is done
keeps its connections until all are done. It never outlives the fork server, nor that the test process.

What `run_ranks` raises: every rank's failure in full, the likely cause first.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from paceline.errors import MissingExtraError
from paceline.job.addresses import loopback_address
from paceline.job.cluster import Cluster, change_environment, process_environment
from paceline.job.store_server import StoreServer
from paceline.launch.outcome import WorkerFailure, failure_from_report, signal_headline, summarize_failures
from paceline.launch.process_inspection import enable_stack_dump, read_position, request_stack_dumps
from paceline.launch.reaper import kill_session
from paceline.launch.worker_guard import ErrorReport
from paceline.launch.worker_process import die_with_parent


@dataclass(frozen=True)
class RankRequest:
    """What a rank is told.

    Args:
        payload: (function, arguments), pickled by cloudpickle.
        cluster: its place; `store_fd` is not set yet.
        environ: the environment of the test, which may differ from the fork server's.
        stack_file: where its stack goes when it is asked.
        group_deadline: seconds, for meeting and for every collective.
    """

    payload: bytes
    cluster: Cluster
    environ: Mapping[str, str]
    stack_file: Path
    group_deadline: float


def run_rank(order: RankRequest, line: socket.socket, results: Connection) -> None:
    """The main of a rank; sends a pickled result, or an `ErrorReport`.

    Args:
        line: to the store.
        results: this rank's end of the pipe; whatever comes from the other end releases the rank.
    """
    os.setsid()
    die_with_parent(os.getppid())
    stack = enable_stack_dump(order.stack_file)
    with _ErrorReporter(results):
        import cloudpickle
        import torch

        change_environment({**dict.fromkeys(process_environment()), **order.environ, "OMP_NUM_THREADS": "1"})
        torch.set_num_threads(1)
        place = replace(order.cluster, store_fd=line.fileno())
        cluster = place.connect("cpu", order.group_deadline)
        function, arguments = cloudpickle.loads(order.payload)
        results.send(cloudpickle.dumps(function(cluster, *arguments)))
        results.recv()
        cluster.disconnect()
    line.close()
    stack.close()


class _ErrorReporter:
    """Sends an exception to the test and ends the process."""

    def __init__(self, results: Connection) -> None:
        self._results = results

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._results.send(ErrorReport.of(error))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


class RanksFailed(Exception):
    """Some ranks of a `run_ranks` raised, died, or were stuck at the deadline.

    Args:
        failures: in any order; kept with the likely cause first. `kind` is "error" (raised), "connection"
            (raised because another rank was gone), "signal" (died) or "stopped" (was stuck).
    """

    def __init__(self, failures: Sequence[WorkerFailure]) -> None:
        self.failures = summarize_failures(failures).failures
        super().__init__("\n".join(_render_failure(failure) for failure in self.failures))

    def of(self, global_rank: int) -> WorkerFailure:
        """The failure of one rank.

        Raises:
            LookupError: that rank did not fail.
        """
        for failure in self.failures:
            if failure.global_rank == global_rank:
                return failure
        raise LookupError(f"rank {global_rank} did not fail")


def _render_failure(failure: WorkerFailure) -> str:
    lines = [f"rank {failure.global_rank} {failure.headline}", *failure.details.splitlines()]
    return "\n    ".join(lines)


_SETTLE_SECONDS = 2.0
_EXIT_SECONDS = 10.0


def run_ranks(
    function: Callable[..., Any],
    n: int,
    *args: Any,
    deadline: float = 240.0,
    group_deadline: float | None = None,
    dying: Collection[int] = (),
) -> list[Any]:
    """Call `function(cluster, *args)` on n connected ranks.

    Args:
        function: any callable, also a local one; it is sent by value, like `args` and its result.
        n: number of ranks; with one rank there is no process group.
        deadline: seconds, from when all ranks have started, until those that are not done are killed and
            reported with their stacks.
        group_deadline: seconds for every collective; None: `deadline`.
        dying: ranks that may die; that is no failure, and the others go on.
    Returns:
        What the ranks returned, by rank; None of one that has died.
    Raises:
        RanksFailed: a rank raised, died or was stuck; holds the failures of all ranks, the cause first.
        MissingExtraError: cloudpickle is not installed.
    """
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="paceline-ranks-")))
        order = RankRequest(
            payload=_pickle(function, args),
            cluster=Cluster(0, n, 0, n, 0, 1, loopback_address(), 0, None, secrets.token_hex(8), None),
            environ=process_environment(),
            stack_file=folder,
            group_deadline=deadline if group_deadline is None else group_deadline,
        )
        ranks = cleanup.enter_context(_started_ranks(order, n))
        _collect_results(ranks, time.monotonic() + deadline, dying)
        living = [rank for rank in ranks if rank.global_rank not in dying or rank.failure is None]
        _release_ranks(living, deadline)
        failures = [rank.failure for rank in living if rank.failure is not None]
        if failures:
            raise RanksFailed(failures)
        return [_unpickle(rank.result) for rank in ranks]


class _RankProcess:
    """The test's view of one rank."""

    def __init__(self, order: RankRequest, line: socket.socket) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["paceline.testing.rank_preload"])
        self.global_rank = order.cluster.global_rank
        self.stack_file = order.stack_file
        self.pipe, far_end = context.Pipe()
        self.process: ForkServerProcess = context.Process(target=run_rank, args=(order, line, far_end))
        self.process.start()
        far_end.close()
        self.result: bytes | None = None
        self.failure: WorkerFailure | None = None

    @property
    def open(self) -> bool:
        """It has neither a result nor a failure yet."""
        return self.result is None and self.failure is None

    def receive(self) -> None:
        """Take what it sent, or notice that it died."""
        try:
            message = self.pipe.recv()
        except EOFError:
            self.process.join(_EXIT_SECONDS)
            self.died()
            return
        if isinstance(message, ErrorReport):
            # whoever writes a test wants the traceback of every error
            self.failure = failure_from_report(self.global_rank, replace(message, details=message.traceback))
        else:
            self.result = message

    def died(self) -> None:
        """It ended without a word."""
        code = self.process.exitcode or 0
        headline = signal_headline(-code) if code < 0 else f"ended with exit code {code}"
        self.failure = WorkerFailure(self.global_rank, "signal", time.time(), headline, code)

    def stop(self, why: str) -> None:
        """Kill it, and say where it was."""
        where = read_position(self.stack_file)
        details = self.stack_file.read_text(encoding="utf-8") if self.stack_file.exists() else ""
        headline = f"{why}; it was in {where}" if where else why
        self.failure = WorkerFailure(self.global_rank, "stopped", time.time(), headline, 1, details)
        self.end()

    def end(self) -> None:
        """Leave nothing of it, nor of what it started."""
        if self.process.pid is not None:
            kill_session(self.process.pid)
        if self.process.is_alive():
            self.process.kill()  # it had no time to begin its session
        self.process.join(_EXIT_SECONDS)


@contextmanager
def _started_ranks(order: RankRequest, n: int) -> Iterator[list[_RankProcess]]:
    ranks: list[_RankProcess] = []
    with StoreServer() as store:
        try:
            for number in range(n):
                place = replace(order.cluster, global_rank=number, local_rank=number)
                own = replace(order, cluster=place, stack_file=order.stack_file / f"rank-{number}.stack")
                with store.connection_for(number) as line:
                    ranks.append(_RankProcess(own, line))
            yield ranks
        finally:
            for rank in ranks:
                rank.end()
                rank.pipe.close()
                rank.process.close()


def _collect_results(ranks: list[_RankProcess], expires: float, dying: Collection[int]) -> None:
    """Wait for all results; after a failure, give the others a moment, then end them."""
    why = "did not finish before the deadline"
    while waiting := [rank for rank in ranks if rank.open]:
        ready = wait([rank.pipe for rank in waiting], timeout=max(0.0, expires - time.monotonic()))
        for rank in waiting:
            if rank.pipe in ready:
                rank.receive()
        if not ready:
            _stop_ranks([rank for rank in waiting if rank.open], why)
        elif any(rank.failure is not None for rank in waiting if rank.global_rank not in dying):
            expires = min(expires, time.monotonic() + _SETTLE_SECONDS)
            why = "was ended because of that"


def _stop_ranks(ranks: list[_RankProcess], why: str) -> None:
    living = [(rank.process.pid, rank.stack_file) for rank in ranks if rank.process.is_alive()]
    request_stack_dumps([(pid, path) for pid, path in living if pid is not None])
    for rank in ranks:
        rank.stop(why)


def _release_ranks(ranks: list[_RankProcess], seconds: float) -> None:
    """All are done: let them disconnect. One that cannot, or that dies of it, has failed."""
    if any(rank.failure is not None for rank in ranks):
        return
    for rank in ranks:
        rank.pipe.send(None)
    for rank in ranks:
        rank.process.join(seconds)
        if rank.process.is_alive():
            _stop_ranks([rank], "did not disconnect")
        elif rank.process.exitcode != 0:
            rank.died()


def _pickle(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """By value where the function is defined: a test module cannot be imported by a rank."""
    try:
        import cloudpickle
    except ImportError as error:
        raise MissingExtraError(
            "run_ranks needs cloudpickle, which is not installed.", next_step="pip install 'paceline[dev]'"
        ) from error
    unknown = [
        m
        for m in _modules_of((function, *args))
        if m.__name__ not in cloudpickle.list_registry_pickle_by_value()
    ]
    for module in unknown:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps((function, args)))
    finally:
        for module in unknown:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_of(values: Iterable[Any]) -> set[ModuleType]:
    """Modules that define the given functions and classes, and that a rank may not be able to import."""
    found = set()
    for value in values:
        if isinstance(value, functools.partial):
            found |= _modules_of((value.func, *value.args, *value.keywords.values()))
            continue
        name = str(getattr(value, "__module__", ""))
        top = name.partition(".")[0]
        if (
            callable(value)
            and name in sys.modules
            and top not in {"__main__", "paceline", "torch", "builtins"}
        ):
            found.add(sys.modules[name])
    return found


def _unpickle(result: bytes | None) -> Any:
    import cloudpickle

    return None if result is None else cloudpickle.loads(result)
