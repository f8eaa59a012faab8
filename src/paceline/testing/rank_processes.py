"""Rank processes for tests: run a function on n real processes that are connected by Gloo over the loopback.

Invariant: `run_ranks` returns or raises soon after its deadline, and no rank runs the function then. A rank
that fails ends at once, so that its peers lose the connection and report it; a rank that is done keeps its
connections until all are done. No rank outlives the fork server or the test process. Ranks are forked from a
server that has imported torch, so eight of them start in a fraction of a second.
"""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import os
import random
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import recv_handle, send_handle
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
    """One call of a function on one rank, as it is sent to the process of the rank.

    Args:
        payload: (function, arguments), pickled by cloudpickle.
        cluster: the place of the rank; `store_fd` is not set yet.
        environ, directory: environment and working directory of the test.
        group_deadline: seconds, for the rendezvous and for every collective.
    """

    payload: bytes
    cluster: Cluster
    environ: Mapping[str, str]
    directory: Path
    group_deadline: float


def run_rank(stack_file: Path, pipe: Connection) -> None:
    """Serve calls until the test closes the pipe, or until a call has left something behind.

    For each request the rank sends a pickled result or an `ErrorReport`. Whatever comes next through the pipe
    releases it: it disconnects and sends whether it can serve another call.

    Args:
        stack_file: file for the stack of this process, on request.
        pipe: the rank's end of the pipe.
    """
    os.setsid()
    die_with_parent(os.getppid())
    stack = enable_stack_dump(stack_file)
    with _ErrorReporter(pipe):
        import torch

        torch.set_num_threads(1)
        gc.freeze()  # what is imported is not looked at by the collections of every call
        initial = RankState.capture()
        reusable = True
        while reusable:
            try:
                request = pipe.recv()
            except EOFError:
                break
            with socket.socket(fileno=recv_handle(pipe)) as store:
                _call_function(request, store, pipe)
            os.chdir("/")  # the folder of the test may be removed
            reusable = initial.restore()
            pipe.send(reusable)
    stack.close()


def _call_function(request: RankRequest, store: socket.socket, pipe: Connection) -> None:
    """Connect, call the function, send its result, and disconnect when the test says so."""
    import cloudpickle
    import torch

    change_environment({**dict.fromkeys(process_environment()), **request.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    os.chdir(request.directory)
    cluster = replace(request.cluster, store_fd=store.fileno()).connect("cpu", request.group_deadline)
    function, arguments = cloudpickle.loads(request.payload)
    pipe.send(cloudpickle.dumps(function(cluster, *arguments)))
    pipe.recv()
    cluster.disconnect()


@dataclass(frozen=True)
class RankState:
    """The state of a rank's process that a call could change for the next one.

    Args:
        patched: identity of every attribute of Paceline's modules and classes, and of some of torch's: a call
            that patched one and did not put it back is noticed.
        settings: settings of torch and of the process.
        num_files: open file descriptors.
        random: states of the random number generators of torch, NumPy and Python.
    """

    patched: Mapping[str, Mapping[str, int]]
    settings: tuple[Any, ...]
    num_files: int
    random: tuple[Any, Any, Any]

    @classmethod
    def capture(cls) -> RankState:
        """Return the present state."""
        import numpy as np
        import torch

        states = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        return cls(_attribute_identities(), _process_settings(), _num_open_files(), states)

    def restore(self) -> bool:
        """Restore what can be restored; return whether the process is as it was."""
        import numpy as np
        import torch

        torch.set_rng_state(self.random[0])
        np.random.set_state(self.random[1])
        random.setstate(self.random[2])
        if _num_open_files() > self.num_files:
            gc.collect()  # file descriptors in reference cycles
        attributes = _attribute_identities()
        return (
            all(attributes.get(name) == before for name, before in self.patched.items())
            and _process_settings() == self.settings
            and _num_open_files() <= self.num_files
        )


def _attribute_identities() -> dict[str, dict[str, int]]:
    """Return the identities of all attributes of the modules and classes that tests patch, by dotted name."""
    identities: dict[str, dict[str, int]] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "paceline" and name not in _PATCHED_MODULES:
            continue
        attributes = vars(module)
        hidden = "__" if name.startswith("paceline") else "_"  # torch keeps its present backend in one
        identities[name] = {
            key: id(value)
            for key, value in attributes.items()
            if not key.startswith(hidden)
            and not issubclass(type(value), ModuleType)  # a submodule that was imported
        }
        for key, value in attributes.items():
            if issubclass(type(value), type) and value.__module__ == name:  # isinstance would call properties
                members = {k: id(v) for k, v in vars(value).items() if k[:2] != "__" and k[:4] != "_abc"}
                identities[f"{name}.{key}"] = members
    return identities


def _process_settings() -> tuple[Any, ...]:
    """Return process settings that a function may change and that would affect the next call."""
    import torch

    handlers = tuple(signal.getsignal(number) for number in signal.valid_signals())
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return (
        handlers,
        children.read_text() if children.exists() else "",
        [thread.name for thread in threading.enumerate()],
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
        torch.distributed.is_initialized(),
    )


def _num_open_files() -> int:
    files = Path("/proc/self/fd")
    return sum(1 for _ in files.iterdir()) if files.exists() else 0


class _ErrorReporter:
    """A context manager that sends an exception to the test and ends the process."""

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
    """The failure of a `run_ranks` call: ranks raised, died, or were stuck at the deadline.

    Args:
        failures: in any order; kept with the likely cause first. `kind` is "error" (raised), "connection"
            (raised because another rank was gone), "signal" (died) or "stopped" (was stuck).
    """

    def __init__(self, failures: Sequence[WorkerFailure]) -> None:
        self.failures = summarize_failures(failures).failures
        super().__init__("\n".join(_render_failure(failure) for failure in self.failures))

    def of(self, global_rank: int) -> WorkerFailure:
        """Return the failure of one rank.

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
_MAX_IDLE_RANKS = 4  # most calls have two to four ranks
_PATCHED_MODULES = frozenset(
    {"torch", "torch.distributed", "torch.distributed.distributed_c10d", "torch.nn.functional", "time", "os"}
)


def run_ranks(
    function: Callable[..., Any],
    n: int,
    *args: Any,
    deadline: float = 240.0,
    group_deadline: float | None = None,
    may_die: Collection[int] = (),
    reuse: bool = True,
) -> list[Any]:
    """Call `function(cluster, *args)` on n connected ranks.

    Processes that come out of a call as they went in wait for the next call of this test process, which saves
    the time of starting them; see `RankState` for what is compared.

    Args:
        function: any callable, also a local one; it is sent by value, like `args` and its result.
        n: number of ranks; with one rank there is no process group.
        deadline: seconds, from when all ranks have started, until those that are not done are killed and
            reported with their stacks.
        group_deadline: seconds for every collective; None: `deadline`.
        may_die: ranks that can die without a failure; the others go on.
        reuse: use processes of earlier calls. False: start new ones, for example to measure their memory.
    Returns:
        What the ranks returned, by rank; None of one that has died.
    Raises:
        RanksFailed: a rank raised, died or was stuck; holds the failures of all ranks, the cause first.
        MissingExtraError: cloudpickle is not installed.
    """
    request = RankRequest(
        payload=_pickle(function, args),
        cluster=Cluster(0, n, 0, n, 0, 1, loopback_address(), 0, None, secrets.token_hex(8), None),
        environ=process_environment(),
        directory=Path.cwd(),
        group_deadline=deadline if group_deadline is None else group_deadline,
    )
    with _running_ranks(request, n, reuse=reuse and not may_die) as ranks:
        _collect_results(ranks, time.monotonic() + deadline, may_die)
        living = [rank for rank in ranks if rank.global_rank not in may_die or rank.failure is None]
        _release_ranks(living, deadline)
        failures = [rank.failure for rank in living if rank.failure is not None]
        if failures:
            raise RanksFailed(failures)
        return [_unpickle(rank.result) for rank in ranks]


class _RankProcess:
    """The process of one rank, as the test sees it."""

    def __init__(self, stack_file: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["paceline.testing.rank_preload"])
        self.stack_file = stack_file
        self.pipe, far_end = context.Pipe()
        self.process: ForkServerProcess = context.Process(target=run_rank, args=(stack_file, far_end))
        self.process.start()
        far_end.close()
        self.global_rank = -1
        self.result: bytes | None = None
        self.failure: WorkerFailure | None = None
        self.reusable = False

    def send(self, request: RankRequest, store: socket.socket) -> None:
        """Send a call and the connection to the store; a process that has died is noticed by `receive`."""
        self.global_rank, self.result, self.failure = request.cluster.global_rank, None, None
        self.reusable = False
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(request)
            send_handle(self.pipe, store.fileno(), self.process.pid or 0)

    @property
    def open(self) -> bool:
        """Return whether the rank has neither a result nor a failure yet."""
        return self.result is None and self.failure is None

    def receive(self) -> None:
        """Receive its result or its error, or record that it died."""
        try:
            message = self.pipe.recv()
        except EOFError:
            self.process.join(_EXIT_SECONDS)
            self.died()
            return
        if isinstance(message, ErrorReport):
            self.fail(message)
        else:
            self.result = message

    def fail(self, report: ErrorReport) -> None:
        """Record an error with its traceback, which the author of a test needs."""
        self.failure = failure_from_report(self.global_rank, replace(report, details=report.traceback))

    def died(self) -> None:
        """Record that it ended without a result."""
        code = self.process.exitcode or 0
        headline = signal_headline(-code) if code < 0 else f"ended with exit code {code}"
        self.failure = WorkerFailure(self.global_rank, "signal", time.time(), headline, code)

    def stop(self, why: str) -> None:
        """Kill it, and record the position in its stack."""
        where = read_position(self.stack_file)
        details = self.stack_file.read_text(encoding="utf-8") if self.stack_file.exists() else ""
        headline = f"{why}; it was in {where}" if where else why
        self.failure = WorkerFailure(self.global_rank, "stopped", time.time(), headline, 1, details)
        self.end()

    def end(self) -> None:
        """Kill it and every process that it started."""
        if self.process.pid is not None:
            kill_session(self.process.pid)
        if self.process.is_alive():
            self.process.kill()  # it has not begun its session yet
        self.process.join(_EXIT_SECONDS)

    def close(self) -> None:
        """End the process, and release its resources."""
        if self.reusable:
            self.pipe.close()  # then an idle process ends by itself
            self.process.join(_EXIT_SECONDS)
        self.end()
        self.pipe.close()
        self.process.close()


class RankPool:
    """The idle rank processes of one test process.

    Args:
        folder: for the stack files of the processes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: list[_RankProcess] = []
        self._lock = threading.Lock()
        self._num_started = 0

    @property
    def pids(self) -> set[int]:
        """The processes that wait for a call; a test does not leak them."""
        with self._lock:
            return {rank.process.pid or 0 for rank in self._idle}

    def take(self, n: int, *, reuse: bool) -> list[_RankProcess]:
        """Return n processes, idle ones first; the caller ends them or gives them back."""
        with self._lock:
            ready = [self._idle.pop(0) for _ in range(min(n, len(self._idle)))] if reuse else []
            first, self._num_started = self._num_started, self._num_started + n
        alive = [rank for rank in ready if rank.process.is_alive()]
        new = [_RankProcess(self._folder / f"rank-{first + k}.stack") for k in range(n - len(alive))]
        return alive + new

    def give_back(self, ranks: Sequence[_RankProcess]) -> None:
        """Keep reusable processes for the next call, and end the others."""
        for rank in ranks:
            with self._lock:
                keep = rank.reusable and len(self._idle) < _MAX_IDLE_RANKS
                if keep:
                    self._idle.append(rank)
            if not keep:
                rank.close()

    def close(self) -> None:
        """End all idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for rank in idle:
            rank.close()


@functools.cache
def rank_pool(pid: int) -> RankPool:
    """Return the pool of the calling process, whose number is `pid`: a fork has a pool of its own."""
    folder = tempfile.TemporaryDirectory(prefix="paceline-ranks-")
    pool = RankPool(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(pool.close)  # before multiprocessing waits for its children
    return pool


@contextmanager
def _running_ranks(request: RankRequest, n: int, *, reuse: bool) -> Iterator[list[_RankProcess]]:
    pool = rank_pool(os.getpid())
    ranks = pool.take(n, reuse=reuse)
    with StoreServer() as store:
        try:
            for number, rank in enumerate(ranks):
                cluster = replace(request.cluster, global_rank=number, local_rank=number)
                with store.connection_for(number) as connection:
                    rank.send(replace(request, cluster=cluster), connection)
            yield ranks
        finally:
            pool.give_back(ranks)


def _collect_results(ranks: list[_RankProcess], expires: float, may_die: Collection[int]) -> None:
    """Wait for all results; after a failure the other ranks get two seconds, then they are ended."""
    why = "did not finish before the deadline"
    while waiting := [rank for rank in ranks if rank.open]:
        ready = wait([rank.pipe for rank in waiting], timeout=max(0.0, expires - time.monotonic()))
        for rank in waiting:
            if rank.pipe in ready:
                rank.receive()
        if not ready:
            _stop_ranks([rank for rank in waiting if rank.open], why)
        elif any(rank.failure is not None for rank in waiting if rank.global_rank not in may_die):
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
    expires = time.monotonic() + seconds
    for rank in ranks:
        if not rank.pipe.poll(max(0.0, expires - time.monotonic())):
            _stop_ranks([rank], "did not disconnect")
            continue
        try:
            answer = rank.pipe.recv()
        except EOFError:
            rank.process.join(_EXIT_SECONDS)
            rank.died()
            continue
        if isinstance(answer, ErrorReport):
            rank.fail(answer)
        else:
            rank.reusable = bool(answer)


def _pickle(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a call with the modules of its function by value."""
    # A rank cannot import a test module by name.
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
    """Return the modules of functions and classes that a rank may not be able to import."""
    modules = set()
    for value in values:
        if isinstance(value, functools.partial):
            modules |= _modules_of((value.func, *value.args, *value.keywords.values()))
            continue
        name = str(getattr(value, "__module__", ""))
        top = name.partition(".")[0]
        if (
            callable(value)
            and name in sys.modules
            and top not in {"__main__", "paceline", "torch", "builtins"}
        ):
            modules.add(sys.modules[name])
    return modules


def _unpickle(result: bytes | None) -> Any:
    import cloudpickle

    return None if result is None else cloudpickle.loads(result)
