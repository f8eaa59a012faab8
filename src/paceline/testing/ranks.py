"""Run a function on n real processes that are connected by Gloo over the loopback.

Invariant: `run_ranks` returns or raises soon after its deadline, and no rank is left then. The ranks are
forked from one server that has imported torch, so eight of them start in a fraction of a second.
"""

from __future__ import annotations

import functools
import multiprocessing
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.addresses import loopback
from paceline.cluster import Cluster, process_environment
from paceline.errors import MissingExtraError
from paceline.launch.judge import raised
from paceline.launch.keeper import kill_session
from paceline.launch.outcome import Failure, signal_headline
from paceline.launch.stacks import read_position, request_stacks
from paceline.launch.worker import ErrorReport
from paceline.store import StoreServer
from paceline.testing.failures import RanksFailed
from paceline.testing.rank_process import RankOrder, run_rank

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
        order = RankOrder(
            payload=_pickle(function, args),
            cluster=Cluster(0, n, 0, n, 0, 1, loopback(), 0, None, secrets.token_hex(8), None),
            environ=process_environment(),
            stack_file=folder,
            group_deadline=deadline if group_deadline is None else group_deadline,
        )
        ranks = cleanup.enter_context(_started(order, n))
        _collect(ranks, time.monotonic() + deadline, dying)
        living = [rank for rank in ranks if rank.global_rank not in dying or rank.failure is None]
        _release(living, deadline)
        failures = [rank.failure for rank in living if rank.failure is not None]
        if failures:
            raise RanksFailed(failures)
        return [_unpickle(rank.result) for rank in ranks]


class _Rank:
    """The test's view of one rank."""

    def __init__(self, order: RankOrder, line: socket.socket) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["paceline.testing.preload"])
        self.global_rank = order.cluster.global_rank
        self.stack_file = order.stack_file
        self.pipe, far_end = context.Pipe()
        self.process: ForkServerProcess = context.Process(target=run_rank, args=(order, line, far_end))
        self.process.start()
        far_end.close()
        self.result: bytes | None = None
        self.failure: Failure | None = None

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
            self.failure = raised(self.global_rank, replace(message, details=message.traceback))
        else:
            self.result = message

    def died(self) -> None:
        """It ended without a word."""
        code = self.process.exitcode or 0
        headline = signal_headline(-code) if code < 0 else f"ended with exit code {code}"
        self.failure = Failure(self.global_rank, "signal", time.time(), headline, code)

    def stop(self, why: str) -> None:
        """Kill it, and say where it was."""
        where = read_position(self.stack_file)
        details = self.stack_file.read_text(encoding="utf-8") if self.stack_file.exists() else ""
        headline = f"{why}; it was in {where}" if where else why
        self.failure = Failure(self.global_rank, "stopped", time.time(), headline, 1, details)
        self.end()

    def end(self) -> None:
        """Leave nothing of it, nor of what it started."""
        if self.process.pid is not None:
            kill_session(self.process.pid)
        if self.process.is_alive():
            self.process.kill()  # it had no time to begin its session
        self.process.join(_EXIT_SECONDS)


@contextmanager
def _started(order: RankOrder, n: int) -> Iterator[list[_Rank]]:
    ranks: list[_Rank] = []
    with StoreServer() as store:
        try:
            for number in range(n):
                place = replace(order.cluster, global_rank=number, local_rank=number)
                own = replace(order, cluster=place, stack_file=order.stack_file / f"rank-{number}.stack")
                with store.line_for(number) as line:
                    ranks.append(_Rank(own, line))
            yield ranks
        finally:
            for rank in ranks:
                rank.end()
                rank.pipe.close()
                rank.process.close()


def _collect(ranks: list[_Rank], expires: float, dying: Collection[int]) -> None:
    """Wait for all results; after a failure, give the others a moment, then end them."""
    why = "did not finish before the deadline"
    while waiting := [rank for rank in ranks if rank.open]:
        ready = wait([rank.pipe for rank in waiting], timeout=max(0.0, expires - time.monotonic()))
        for rank in waiting:
            if rank.pipe in ready:
                rank.receive()
        if not ready:
            _stop([rank for rank in waiting if rank.open], why)
        elif any(rank.failure is not None for rank in waiting if rank.global_rank not in dying):
            expires = min(expires, time.monotonic() + _SETTLE_SECONDS)
            why = "was ended because of that"


def _stop(ranks: list[_Rank], why: str) -> None:
    living = [(rank.process.pid, rank.stack_file) for rank in ranks if rank.process.is_alive()]
    request_stacks([(pid, path) for pid, path in living if pid is not None])
    for rank in ranks:
        rank.stop(why)


def _release(ranks: list[_Rank], seconds: float) -> None:
    """All are done: let them disconnect. One that cannot, or that dies of it, has failed."""
    if any(rank.failure is not None for rank in ranks):
        return
    for rank in ranks:
        rank.pipe.send(None)
    for rank in ranks:
        rank.process.join(seconds)
        if rank.process.is_alive():
            _stop([rank], "did not disconnect")
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
