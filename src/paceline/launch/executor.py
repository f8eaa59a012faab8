"""Processes of a job that an executor starts on nodes, and their restart from the newest checkpoint.

`Executor` is the protocol: reserve nodes, start these processes with these roles there, report what they
print and how each one ends. `LocalExecutor` starts them on this machine, `SlurmExecutor` as steps of an
allocation, `ray_executor.RayExecutor` as actors of Ray. `run_job` decides what their ends mean. Invariants:
no process outlives its executor, all processes of a job are started together, each restart begins at a later
checkpoint than the one before. A whole job of Slurm, MPI or Kubernetes is started and started again by that
engine, from files of `rendered_job`.
"""

from __future__ import annotations

import os
import re
import secrets
import select
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
from typing import Protocol

from paceline.errors import CommunicationError, format_count
from paceline.job.addresses import format_address, loopback_address
from paceline.job.cluster import process_environment
from paceline.launch.engine_clients import call_client, explain_client_error, require_client
from paceline.launch.outcome import STOPPED_EXIT_CODE
from paceline.launch.worker_process import die_with_parent

_POLL_SECONDS, _END_SECONDS, _STOP_SECONDS = 0.2, 10.0, 150.0
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
        role: "worker", "server", "coordinator" or "client", for reports.
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

    def start(
        self, words: Sequence[str], environ: Mapping[str, str], folder: str, starter: Sequence[str] = ()
    ) -> None:
        """Start `python -m paceline` with these words, in a folder if this node has it.

        Args:
            starter: words of a command that starts the process, such as `srun`; empty: it is started here.
        """
        self._process = subprocess.Popen(
            [*starter, sys.executable, "-m", "paceline", *words],
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


_HOLD = 'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat >/dev/null'
_FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
_LOST_NODE = re.compile(r"^srun: error: .*(Node failure|Unable to|Communication|Job/step already).*$", re.M)


class SlurmExecutor:
    """Processes that are steps of one allocation, each started by an `srun` of this machine.

    The allocation belongs to a shell that reads from this process, so it ends with this process, also if that
    is killed. Steps of a node share its cores and GPUs. A key in `environ` is in no file and no command line.

    Args:
        options: of `salloc`, by name, such as partition and account.
        wait_seconds: how long to wait for nodes that are free.
    Raises:
        PacelineError: the clients of Slurm are not installed.
    """

    def __init__(self, options: Mapping[str, str], wait_seconds: float) -> None:
        require_client("salloc")
        self._options, self._wait_seconds = options, wait_seconds
        self._holder: subprocess.Popen[bytes] | None = None
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115, closed with the object
        self.job, self.nodes = "", list[str]()
        self.children: list[ChildProcess] = []
        self._output: dict[int, str] = {}

    def reserve(self, request: NodeRequest) -> str:
        """Allocate the nodes."""
        per_process = -(-request.cpus // request.processes)
        words = ["salloc", f"--nodes={request.nodes}", f"--ntasks-per-node={request.processes}"]
        words += [f"--cpus-per-task={per_process}", "--job-name=paceline"]
        words += [f"--gpus-per-node={request.gpus}"] if request.gpus else []
        words += [f"--mem={request.memory_mib}M"] if request.memory_mib else []
        words += [f"--{name}={value}" if value else f"--{name}" for name, value in self._options.items()]
        self._messages.truncate(0)
        # not killed with this process: it gives the allocation back when its shell reads the end of this pipe
        self._holder = subprocess.Popen(
            [*words, "sh", "-c", _HOLD],
            env=_without_slurm_variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
        )
        self.job, _, nodes = self._first_line(self._holder, request).partition(" ")
        self.nodes = call_client(["scontrol", "show", "hostnames", nodes.strip()]).split()
        port = self._call_on(0, sys.executable, "-c", _FREE_PORT)
        return format_address(self.nodes[0], int(port))

    def _first_line(self, holder: subprocess.Popen[bytes], request: NodeRequest) -> str:
        """Return the job and its nodes, as the shell in the allocation prints them.

        Raises:
            PacelineError: Slurm refuses the request.
            CommunicationError: the nodes are not free in time.
        """
        assert holder.stdout is not None
        ready, _, _ = select.select([holder.stdout], [], [], self._wait_seconds)
        line = holder.stdout.readline().decode() if ready else ""
        if line:
            return line.strip()
        self._messages.seek(0)
        printed = self._messages.read().decode(errors="replace")
        self.close()
        if ready:
            raise explain_client_error("salloc", printed)
        raise CommunicationError(
            f"Slurm has not found {format_count(request.nodes, 'node')} with"
            f" {format_count(request.cpus, 'core')} free within"
            f" {self._wait_seconds:g} s",
            where="the allocation of the job",
            next_step="`sinfo` and `squeue` show what is free; ask for fewer nodes or processes, or wait"
            " longer: --option wait=SECONDS",
        )

    def _call_on(self, node: int, *words: str) -> str:
        return call_client([*self._srun(node), *words]).strip()

    def _srun(self, node: int) -> list[str]:
        """Return the words that start one process on a node, without the variables of a task of Slurm."""
        step = [
            f"--jobid={self.job}",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={self.nodes[node]}",
        ]
        task = [word for name in _TASK_VARIABLES for word in ("-u", name)]
        own = [word for name in process_environment() if _is_of_slurm(name) for word in ("-u", name)]
        return ["env", *own, "srun", *step, "--cpu-bind=none", "--unbuffered", "--input=none", "env", *task]

    def start(self, processes: Sequence[ExecutorProcess]) -> None:
        """Start a step for each process."""
        for process in processes:
            child = ChildProcess()
            self.children.append(child)
            child.start(process.words, process.environ, str(Path.cwd()), self._srun(process.node))
        self._output = dict.fromkeys(range(len(processes)), "")

    def poll(self) -> Sequence[ProcessReport]:
        """Return what is new; `srun` returns 128 and the signal of a process that was killed."""
        reports = []
        for number in sorted(self._output):
            output, code = self.children[number].poll()
            self._output[number] = (self._output[number] + output)[-_OUTPUT_BYTES:]
            lost = _LOST_NODE.search(self._output[number]) if code else None
            if code is not None:
                del self._output[number]
            if lost is not None:
                reports.append(ProcessReport(number, output, ended=True, reason=lost[0]))
            else:
                killed_by = code - 128 if code is not None and 128 < code < 128 + signal.NSIG else None
                reports.append(
                    ProcessReport(number, output, code is not None, code if killed_by is None else -killed_by)
                )
        return reports

    def stop(self) -> None:
        """Send SIGTERM to the processes of all steps."""
        if self.job:
            call_client(["scancel", "--signal=TERM", self.job])

    def close(self) -> None:
        """Give the allocation back, with which its steps are killed."""
        if self._holder is not None and self._holder.stdin is not None:
            self._holder.stdin.close()
            try:
                self._holder.wait(_END_SECONDS if self.job else 0)
            except subprocess.TimeoutExpired:
                self._holder.terminate()  # an allocation that waits is given up
                with suppress(subprocess.TimeoutExpired):
                    self._holder.wait(_END_SECONDS)
                self._holder.kill()
        for child in self.children:
            child.close()
        self._holder, self.job, self.nodes, self.children, self._output = None, "", [], [], {}


_TASK_VARIABLES = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_STEPID")


def _is_of_slurm(name: str) -> bool:
    """Return whether a variable describes a job around this process, and not the cluster."""
    return name.startswith(("SLURM_", "SBATCH_", "SALLOC_")) and name != "SLURM_CONF"


def _without_slurm_variables() -> dict[str, str]:
    return {name: value for name, value in process_environment().items() if not _is_of_slurm(name)}


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
            processes = plan_processes(job, endpoint, secrets.token_hex(32))
            executor.start(processes)
            names = [f"rank {number} ({process.role})" for number, process in enumerate(processes)]
            ends = _follow(executor, names, write, stop_requested, job.patience_seconds)
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


def run_independent(
    executor: Executor,
    request: NodeRequest,
    processes: Mapping[str, ExecutorProcess],
    write: Callable[[str], object],
    stop_requested: Callable[[], bool] = lambda: False,
) -> dict[str, ProcessReport]:
    """Run processes that do not need each other, such as clients, to their ends; closes the executor.

    Args:
        request: their nodes, with as many processes as the node that has most.
        processes: by name, which begins each line of their output.
        write: prints the output of the processes, and a line for each that fails.
        stop_requested: whether the processes have to stop.
    Returns:
        the end of each process, by name.
    Raises:
        CommunicationError: the executor has too few nodes.
    """
    try:
        executor.reserve(request)
        executor.start([*processes.values()])
        ends = _follow(executor, [*processes], write, stop_requested, None)
    finally:
        executor.close()
    return {[*processes][end.number]: end for end in ends}


def _follow(
    executor: Executor,
    names: Sequence[str],
    write: Callable[[str], object],
    stop_requested: Callable[[], bool],
    patience_seconds: float | None,
) -> list[ProcessReport]:
    """Print what the processes print until all have ended; returns their ends.

    Args:
        patience_seconds: how long the others may print nothing after one has failed; None: they do not need
            it, and only have to end soon after a stop was requested.
    """
    ends: list[ProcessReport] = []
    is_stopping, expires = False, 0.0
    # rank 0 of a job speaks for all
    prefixes = names if patience_seconds is None else ["", *map(str, range(1, len(names)))]
    while len(ends) < len(names):
        reports = executor.poll()
        for report in reports:
            write(_with_prefix(report.output, prefixes[report.number]))
            if report.ended:
                ends.append(report)
                if report.is_lost or report.code:
                    write(_describe_end(report, names[report.number]))
        if stop_requested() and not is_stopping:
            is_stopping = True
            executor.stop()
        has_news = any(report.output or report.ended for report in reports)
        has_failed = patience_seconds is not None and any(end.is_lost or end.code for end in ends)
        if has_news or not (is_stopping or has_failed):
            expires = time.monotonic() + (patience_seconds or _STOP_SECONDS)
        if time.monotonic() > expires:
            left = {*range(len(names))} - {end.number for end in ends}
            ends += [ProcessReport(number, ended=True, reason="it does not end") for number in sorted(left)]
            write("".join(_describe_end(end, names[end.number]) for end in ends[-len(left) :]))
        if not has_news:
            time.sleep(_POLL_SECONDS)
    return ends


def _with_prefix(output: str, prefix: str) -> str:
    if not prefix:
        return output
    return "".join(f"[{prefix}] {line}\n" for line in output.splitlines())


def _describe_end(report: ProcessReport, name: str) -> str:
    if report.code is None:
        how = f"is lost: {report.reason}"
    elif report.code < 0:
        how = f"was killed by {signal.Signals(-report.code).name}"
    else:
        how = f"ended with exit code {report.code}"
    return f"{name} {how}\n"
