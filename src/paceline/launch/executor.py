"""Processes of a job that an executor starts on nodes, and their restart from the newest checkpoint.

`Executor` is the protocol: reserve nodes, start these processes with these roles there, report what they
print and how each one ends. `LocalExecutor` starts them on this machine, `RayExecutor` as actors in a
placement group of Ray. `run_job` decides what their ends mean. Invariants: no process outlives its executor,
all processes of a job are started together, each restart begins at a later checkpoint than the one before.
Slurm, MPI and Kubernetes have no executor: they start and restart processes, from files of `rendered_job`.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import CommunicationError, MissingExtraError, format_count
from paceline.job.addresses import format_address, loopback_address
from paceline.job.cluster import process_environment
from paceline.launch.outcome import STOPPED_EXIT_CODE
from paceline.launch.worker_process import die_with_parent

_POLL_SECONDS, _END_SECONDS, _CALL_SECONDS = 0.2, 10.0, 60.0
_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True)
class NodeRequest:
    """The nodes that a job requests, and the resources of each.

    Args:
        nodes, processes: number of nodes, and of processes on each.
        cpus, gpus, memory_mib: of one node; 0 GPUs or MiB: not requested.
    """

    nodes: int
    processes: int
    cpus: int = 1
    gpus: int = 0
    memory_mib: int = 0


@dataclass(frozen=True)
class ExecutorProcess:
    """One process of a job.

    Args:
        role: "worker", "server" or "coordinator", for reports.
        node: its node, from 0.
        words: the words after `python -m paceline`.
        environ: variables besides those of the node.
    """

    role: str
    node: int
    words: tuple[str, ...]
    environ: Mapping[str, str]


@dataclass(frozen=True)
class ProcessReport:
    """The news of one process since the last report.

    Args:
        number: of the process, in the order in which they were given.
        output: what it has printed since the last report.
        ended: whether it has ended.
        code: its exit code, negative for a signal; None while it runs, and if it is lost with its node.
        reason: why it is lost, in the words of the engine.
    """

    number: int
    output: str = ""
    ended: bool = False
    code: int | None = None
    reason: str = ""

    @property
    def is_lost(self) -> bool:
        """True if the process was killed, or is gone with its node."""
        return self.ended and (self.code is None or self.code < 0)


class Executor(Protocol):
    """A way to start processes on nodes, which reports when one ends; used by one thread."""

    def reserve(self, request: NodeRequest) -> str:
        """Reserve nodes; returns HOST:PORT for the rendezvous on the first one.

        Raises:
            CommunicationError: there are not that many.
        """

    def start(self, processes: Sequence[ExecutorProcess]) -> None:
        """Start the processes on the reserved nodes."""

    def poll(self) -> Sequence[ProcessReport]:
        """Return what is new about processes that had not ended; returns within seconds."""

    def stop(self) -> None:
        """Send SIGTERM to all processes, which save and exit."""

    def close(self) -> None:
        """Kill what is left, and give the nodes back."""


class ChildProcess:
    """A process that belongs to this one, which can be on another node (as an actor).

    It dies with the thread that has started it. Its output goes to a file, so that no call waits.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, closed with the object
        self._offset = 0

    def free_port(self) -> int:
        """Return a port of this node that is free now."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return int(listener.getsockname()[1])

    def start(self, words: Sequence[str], environ: Mapping[str, str], folder: str) -> None:
        """Start `python -m paceline` with these words, in a folder if this node has it."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline", *words],
            env={**process_environment(), **environ},
            cwd=folder if Path(folder).is_dir() else None,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509, one system call
        )

    def poll(self) -> tuple[str, int | None]:
        """Return new output, and the exit code once all of the output was returned."""
        code = None if self._process is None else self._process.poll()
        data = os.pread(self._output.fileno(), _OUTPUT_BYTES, self._offset)
        if len(data) == _OUTPUT_BYTES or code is None:
            data = data[: data.rfind(b"\n") + 1] or data[: _OUTPUT_BYTES * (len(data) == _OUTPUT_BYTES)]
            code = None
        self._offset += len(data)
        return data.decode(errors="replace"), code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(_END_SECONDS)
        self._output.close()


class LocalExecutor:
    """Processes of this machine, for any number of nodes."""

    def __init__(self) -> None:
        self.children: list[ChildProcess] = []
        self._open: set[int] = set()

    def reserve(self, request: NodeRequest) -> str:
        """Return an address of this machine."""
        return format_address(loopback_address(), ChildProcess().free_port())

    def start(self, processes: Sequence[ExecutorProcess]) -> None:
        """Start the processes."""
        for process in processes:
            self.children.append(ChildProcess())
            self.children[-1].start(process.words, process.environ, str(Path.cwd()))
        self._open = set(range(len(processes)))

    def poll(self) -> Sequence[ProcessReport]:
        """Return what is new."""
        reports = []
        for number in sorted(self._open):
            output, code = self.children[number].poll()
            reports.append(ProcessReport(number, output, code is not None, code))
            self._open -= {number} if code is not None else set()
        return reports

    def stop(self) -> None:
        """Send SIGTERM to all."""
        for child in self.children:
            child.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Kill what is left."""
        for child in self.children:
            child.close()
        self.children, self._open = [], set()


class RayExecutor:
    """Processes that belong to actors, in one placement group with a bundle on each node.

    Args:
        address: of the cluster; "auto": the one to which this machine belongs.
        wait_seconds: how long to wait for nodes that are free.
    Raises:
        MissingExtraError: Ray is not installed.
        CommunicationError: there is no cluster at the address.
    """

    def __init__(self, address: str, wait_seconds: float) -> None:
        self._ray = _import_ray()
        self._wait_seconds = wait_seconds
        try:
            _require_reachable(address)
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError) as error:
            raise CommunicationError(
                f"there is no cluster of Ray at {address}: {_first_line(error)}",
                where="--option address",
                next_step="start one by `ray start --head`, or name its address: --option address=HOST:6379",
            ) from error
        self.actors: list[Any] = []
        self._group: Any = None
        self._calls: dict[int, Any] = {}

    def reserve(self, request: NodeRequest) -> str:
        """Create the placement group and an actor for each process."""
        group_of, strategy_of = _placement()
        bundle: dict[str, float] = {"CPU": request.cpus}
        bundle |= {"GPU": request.gpus} if request.gpus else {}
        bundle |= {"memory": request.memory_mib * 2**20} if request.memory_mib else {}
        self._group = group_of([bundle] * request.nodes, strategy="STRICT_SPREAD")
        if not self._group.wait(self._wait_seconds):
            raise CommunicationError(
                f"Ray has not found {format_count(request.nodes, 'node')} with {bundle} free within"
                f" {self._wait_seconds:g} s",
                where="the placement group of the job",
                next_step="`ray status` shows what is free; ask for fewer nodes or processes, or wait longer:"
                " --option wait=SECONDS",
            )
        share = {
            "num_cpus": request.cpus / request.processes,
            "num_gpus": request.gpus / request.processes,
            "memory": request.memory_mib * 2**20 // request.processes or None,
        }
        actor = self._ray.remote(_RankActor)
        self.actors = [
            actor.options(
                **share, max_restarts=0, scheduling_strategy=strategy_of(self._group, node)
            ).remote()
            for node in range(request.nodes)
            for _ in range(request.processes)
        ]
        host, port = self._get(self.actors[0].endpoint.remote())
        return format_address(host, port)

    def start(self, processes: Sequence[ExecutorProcess]) -> None:
        """Start a process in each actor; those of a node see all GPUs of its bundle."""
        gpus = self._get([actor.gpus.remote() for actor in self.actors])
        calls = []
        for actor, process in zip(self.actors, processes, strict=True):
            of_node = [
                gpu
                for own, other in zip(gpus, processes, strict=True)
                if other.node == process.node
                for gpu in own
            ]
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(of_node)} if of_node else {}
            environ = {**process.environ, **visible}
            calls.append(actor.start.remote(process.words, environ, str(Path.cwd())))
        self._get(calls)
        self._calls = {number: actor.poll.remote() for number, actor in enumerate(self.actors)}

    def _get(self, calls: Any) -> Any:
        """Return the results of calls.

        Raises:
            CommunicationError: an actor is gone, or has not answered.
        """
        try:
            return self._ray.get(calls, timeout=_CALL_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise CommunicationError(
                f"an actor of the job has not started: {_first_line(error)}",
                where="Ray",
                next_step="install Paceline on every node of the cluster; `ray list actors` has more",
            ) from error

    def poll(self) -> Sequence[ProcessReport]:
        """Return what is new; an actor that is gone is a process that is lost."""
        if not self._calls:
            return []
        ready, _ = self._ray.wait(
            [*self._calls.values()], num_returns=len(self._calls), timeout=_POLL_SECONDS
        )
        reports = []
        for number, call in [*self._calls.items()]:
            if call not in ready:
                continue
            try:
                output, code = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                report = ProcessReport(number, ended=True, reason=_first_line(error))
            else:
                report = ProcessReport(number, output, code is not None, code)
            reports.append(report)
            if report.ended:
                del self._calls[number]
            else:
                self._calls[number] = self.actors[number].poll.remote()
        return reports

    def stop(self) -> None:
        """Send SIGTERM to all processes."""
        for number in self._calls:
            self.actors[number].send_signal.remote(int(signal.SIGTERM))

    def close(self) -> None:
        """Kill the actors, with which their processes die, and remove the placement group."""
        for actor in self.actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
        self.actors, self._group, self._calls = [], None, {}

    def leave(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()


class _RankActor(ChildProcess):
    """A child process in an actor of Ray."""

    def endpoint(self) -> tuple[str, int]:
        """Return the address of this node, and a free port."""
        import ray

        return str(ray.util.get_node_ip_address()), self.free_port()

    def gpus(self) -> list[str]:
        """Return the GPUs of this actor."""
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]


def _require_reachable(address: str) -> None:
    """Raise an error if nothing answers at HOST:PORT, for which Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in host:
        with socket.create_connection((host.strip("[]"), int(port)), _END_SECONDS):
            pass


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            "Ray is not installed in this environment",
            where="--on ray",
            next_step="pip install ray, in the version of the cluster",
        ) from error
    return ray


def _placement() -> tuple[Any, Any]:
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return placement_group, lambda group, node: PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=node
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# A job of an executor


@dataclass(frozen=True)
class ExecutorJob:
    """A training job as an executor runs it: all ranks are started by it, and again if one is lost.

    Args:
        request: its nodes.
        words: the words after `python -m paceline`, equal on all ranks.
        roles: the role of every rank.
        max_restarts: how often it is started again.
        patience_seconds: how long the other processes may print nothing after one has failed.
    """

    request: NodeRequest
    words: tuple[str, ...]
    roles: tuple[str, ...]
    max_restarts: int = 3
    patience_seconds: float = 150.0


def plan_processes(job: ExecutorJob, endpoint: str, key: str) -> list[ExecutorProcess]:
    """Return the ranks of a job, node by node, with the variables that Ray Train sets; pure."""
    host, _, port = endpoint.rpartition(":")
    nodes, per_node = job.request.nodes, job.request.processes
    common = {
        "PACELINE_RENDEZVOUS": endpoint,
        "PACELINE_TOKEN": key,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    return [
        ExecutorProcess(
            job.roles[rank],
            rank // per_node,
            job.words,
            {
                **common,
                "RANK": str(rank),
                "WORLD_SIZE": str(nodes * per_node),
                "LOCAL_RANK": str(rank % per_node),
                "LOCAL_WORLD_SIZE": str(per_node),
                "NODE_RANK": str(rank // per_node),
            },
        )
        for rank in range(nodes * per_node)
    ]


def judge_ends(ends: Sequence[ProcessReport]) -> int | None:
    """Return the exit code of a job, given the ends of its processes in order; None: one was lost; pure.

    A job of which rank 0 has succeeded is complete, even if another rank was lost: those that remain may
    finish it. A lost connection is a consequence, as long as there is another reason.
    """
    consequences = (0, CommunicationError.exit_code, STOPPED_EXIT_CODE)
    causes = [end for end in ends if end.is_lost or end.code not in consequences]
    if any(end.number == 0 and end.code == 0 for end in ends):
        causes = [end for end in causes if not end.is_lost]
    elif not causes:
        codes = [end.code for end in ends if end.code]
        return STOPPED_EXIT_CODE if STOPPED_EXIT_CODE in codes else (codes or [0])[0]
    if not causes:
        return 0
    return None if causes[0].is_lost else causes[0].code


def run_job(
    executor: Executor,
    job: ExecutorJob,
    newest_step: Callable[[], int],
    write: Callable[[str], object],
    stop_requested: Callable[[], bool] = lambda: False,
) -> int:
    """Run a job to its end; returns its exit code.

    Args:
        newest_step: returns the step of the newest checkpoint; 0: there is none.
        write: prints the output of the ranks, and a line for each restart.
        stop_requested: whether the job has to save and stop.
    Raises:
        CommunicationError: the executor has too few nodes.
    """
    last_step, num_restarts = newest_step(), 0
    while True:
        try:
            endpoint = executor.reserve(job.request)
            executor.start(plan_processes(job, endpoint, secrets.token_hex(32)))
            ends = _follow(executor, job, write, stop_requested)
        finally:
            executor.close()
        code = judge_ends(ends)
        if code is not None:
            return code
        step = newest_step()
        if num_restarts >= job.max_restarts or step <= last_step or stop_requested():
            reason = f"after {num_restarts} restarts" if num_restarts else "and there is no newer checkpoint"
            write(f"a process was lost {reason}: the job ends\n")
            return 128 + signal.SIGKILL
        last_step, num_restarts = step, num_restarts + 1
        write(f"restart {num_restarts} of {job.max_restarts} from step {step}\n")


def _follow(
    executor: Executor,
    job: ExecutorJob,
    write: Callable[[str], object],
    stop_requested: Callable[[], bool],
) -> list[ProcessReport]:
    """Print what the processes print until all have ended; returns their ends in their order."""
    ends: list[ProcessReport] = []
    is_stopping, expires = False, 0.0
    while len(ends) < len(job.roles):
        reports = executor.poll()
        for report in reports:
            write(_prefixed(report))
            if report.ended:
                ends.append(report)
                if report.is_lost or report.code:
                    write(_describe_end(report, job.roles[report.number]))
        if stop_requested() and not is_stopping:
            is_stopping = True
            executor.stop()
        has_news = any(report.output or report.ended for report in reports)
        if has_news or not (is_stopping or any(end.is_lost or end.code for end in ends)):
            expires = time.monotonic() + job.patience_seconds
        if time.monotonic() > expires:
            left = {*range(len(job.roles))} - {end.number for end in ends}
            ends += [ProcessReport(number, ended=True, reason="it does not end") for number in sorted(left)]
            write("".join(_describe_end(end, job.roles[end.number]) for end in ends[-len(left) :]))
        if not has_news:
            time.sleep(_POLL_SECONDS)
    return ends


def _prefixed(report: ProcessReport) -> str:
    if report.number == 0 or not report.output:
        return report.output
    return "".join(f"[{report.number}] {line}\n" for line in report.output.splitlines())


def _describe_end(report: ProcessReport, role: str) -> str:
    if report.code is None:
        how = f"is lost: {report.reason}"
    elif report.code < 0:
        how = f"was killed by {signal.Signals(-report.code).name}"
    else:
        how = f"ended with exit code {report.code}"
    return f"rank {report.number} ({role}) {how}\n"
