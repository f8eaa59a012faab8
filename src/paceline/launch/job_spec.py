"""One node's share of a job as a value, and the exact processes that it becomes. Pure: nothing is started.

Invariants: a `LaunchJob` that exists can be rendered, since impossible values are errors when it is made.
Equal arguments give equal workers, and the variables of an outer launcher never leak into them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from paceline.errors import RecipeError
from paceline.job.launcher_reports import error_file, stack_file
from paceline.launch.shutdown import ShutdownTimeouts

_ADVICE = (
    "on one node, leave --nodes out; on several, pass --rendezvous HOST:PORT, an address of node 0, on each"
)


@dataclass(frozen=True)
class LaunchJob:
    """The processes of one node.

    Args:
        command: the argument vector of every worker; see `script_command` for a user's own script.
        num_processes: number of processes on this node, equal on every node.
        nodes, node_rank: number of nodes, and the rank of this one.
        rendezvous: "HOST:PORT" of node 0; needed with more than one node.
        token: the key of the job, equal on every node. Empty: a random one on one node; on several, one
            derived from the rendezvous, which keeps jobs apart but no stranger out.
        threads: intra-op threads of each process. 0: OMP_NUM_THREADS if it is set, else the cores divided
            by the processes.
        log_dir: folder for the output of all processes but the first of this node; None: a folder that
            is removed at the end.
        output: "files": the output of all processes but the first goes to files; "prefixed": it is printed
            as well, with the rank in front; "logged": the first process has a file too; "shown": it has one,
            and its lines are printed as they are.
        timeouts: how long each step of a shutdown takes.
        announces: the workers report when their first step begins (`enter_phase`); before that there is
            nothing to save, and a signal ends the job at once.
        servers: number of server ranks, which come first. Once a step has begun, only the failure of a server
            ends the job, and rank 0 checks whether enough workers are left; 0: any failure ends it.
        max_replacements: how many workers may be started in place of lost ones, which the other ranks
            continue without; on one node only.
        tls: whether the nodes encrypt their connections to the store of the job; "auto": if there are
            several.
    Raises:
        RecipeError: a value is impossible.
    """

    command: tuple[str, ...]
    num_processes: int
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    token: str = ""
    threads: int = 0
    log_dir: Path | None = None
    output: Literal["files", "prefixed", "logged", "shown"] = "files"
    timeouts: ShutdownTimeouts = field(default_factory=ShutdownTimeouts)
    announces: bool = False
    servers: int = 0
    max_replacements: int = 0
    tls: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        rules = {
            "the command is empty": len(self.command) > 0,
            f"num_processes is {self.num_processes}, expected at least 1": self.num_processes >= 1,
            f"nodes is {self.nodes}, expected at least 1": self.nodes >= 1,
            f"node_rank is {self.node_rank}, expected 0 to {self.nodes - 1}": (
                0 <= self.node_rank < self.nodes
            ),
            f"threads is {self.threads}, expected at least 0": self.threads >= 0,
            f"{self.nodes} nodes need a rendezvous HOST:PORT": self.nodes == 1 or self.rendezvous != "",
        }
        for problem, holds in rules.items():
            if not holds:
                raise RecipeError(problem, where="the launch options", next_step=_ADVICE)
        if self.rendezvous:
            _ = self.endpoint

    @property
    def endpoint(self) -> tuple[str, int]:
        """The host and the port of the rendezvous."""
        host, colon, port = self.rendezvous.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
            raise RecipeError(
                f"the rendezvous is {self.rendezvous!r}, expected HOST:PORT",
                where="the launch options",
                next_step="for example --rendezvous 10.0.0.1:29500, an address of node 0",
            )
        return host.strip("[]"), int(port)

    @property
    def meeting(self) -> tuple[str, int]:
        """The host and the port of the rendezvous; empty and 0 on one node."""
        return self.endpoint if self.rendezvous else ("", 0)

    @property
    def runs_script(self) -> bool:
        """True if the workers run a user's own script, which can use torch's own store."""
        return self.command[1:3] == ("-m", "paceline.launch")

    @property
    def world_size(self) -> int:
        """The number of processes on all nodes."""
        return self.nodes * self.num_processes


STORE_FD, LISTEN_FD = "PACELINE_STORE_FD", "PACELINE_LISTEN_FD"
"""Variables with the number of an inherited open file: the connection to the store, and torch's listener."""

JOINS = "PACELINE_JOINS"
"""Variable of a process that joins a running job; RANK is its number, which no process of the job has had."""

TORCH_PORT = "torch/port"
"""The key in the store under which workers of other nodes find the port of torch's own store."""

_PACELINE_VARIABLES = (
    *(STORE_FD, LISTEN_FD, "PACELINE_STORE_PORT"),
    *("PACELINE_TOKEN", "PACELINE_ERROR_DIR", "PACELINE_TLS", JOINS),
    *("PACELINE_BEACON_PORT", "PACELINE_STANDBY_PORT"),
)
_FOREIGN_PREFIX = "TORCHELASTIC_"


_KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_MMAP_THRESHOLD_": "2147483647"}
"""Settings for glibc, which by default returns large freed blocks to the system.

A step would then pay thousands of page faults to get them back (`benchmarks.heap`). The price is that freed
memory stays with the process.
"""


@dataclass(frozen=True)
class NodeContext:
    """The facts that only the running launcher knows: where the store is, where files go, how many cores.

    Args:
        address, port: address of the job's store; port 0: it cannot be connected to.
        torch_port: port of torch's own store for a script; 0: the script finds it in the job's store.
        listen_fd: the listening socket of that port, for global rank 0; None: it is on another node.
        store_fds: a connection to the store for each worker of this node; empty: they connect themselves.
        token: the key of the job, never empty.
        folder: folder for logs and error reports of the workers.
        cores: number of cores that this process can use.
        beacon_port: port on which this node's launcher can be probed; 0: none.
        standby_port: port on which it serves a store, in case that of the job is lost; 0: none.
    """

    address: str
    port: int
    torch_port: int
    listen_fd: int | None
    store_fds: tuple[int, ...]
    token: str
    folder: Path
    cores: int
    beacon_port: int = 0
    standby_port: int = 0


@dataclass(frozen=True)
class WorkerSpec:
    """One process to start.

    Args:
        global_rank, local_rank: its rank in the job and on this node.
        argv: the argument vector.
        environ: the whole environment.
        files: open files that it inherits, by the variable that holds their number.
        log_file: file for its output; None: the launcher's own output.
        error_file: file in which it reports an exception.
        stack_file: file to which it writes its stack on request.
        directory: its working directory; None: that of the launcher.
    """

    global_rank: int
    local_rank: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    files: Mapping[str, int]
    log_file: Path | None
    error_file: Path
    stack_file: Path
    directory: Path | None = None


def common_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all workers of all jobs share, given the inherited ones."""
    return {
        "PYTHONUNBUFFERED": "1",  # the log must hold what a worker wrote before it was killed
        "PYTHONFAULTHANDLER": "1",
        **_KEEP_FREED_MEMORY,
        **{
            name: value
            for name, value in inherited.items()
            if name not in _PACELINE_VARIABLES and not name.startswith(_FOREIGN_PREFIX)
        },
    }


def script_command(script: str, *arguments: str) -> tuple[str, ...]:
    """Return the argument vector of a worker that runs a user's own script, or a module after "-m"."""
    return (sys.executable, "-m", "paceline.launch", script, *arguments)


def socket_folder(folder: Path, global_rank: int) -> Path:
    """Return the folder for the sockets of a worker and its child processes."""
    return folder / f"rank-{global_rank}.sockets"


def render_workers(
    job: LaunchJob, context: NodeContext, environ: Mapping[str, str]
) -> tuple[WorkerSpec, ...]:
    """Return the workers of one node, by local rank.

    Args:
        environ: the environment to inherit; the variables of the job override it.
    """
    common = common_environment(environ)
    return tuple(_render_worker(job, context, common, local) for local in range(job.num_processes))


def render_replacement(
    job: LaunchJob, context: NodeContext, environ: Mapping[str, str], number: int, local_rank: int
) -> WorkerSpec:
    """Return a worker that joins the running job in place of a lost one.

    Args:
        context: its `store_fds` has one connection, that of the new process.
        number: the number of the new process, which no other process of the job has had.
        local_rank: of the lost worker, whose device it takes over.
    """
    spec = _render_worker(job, replace(context, listen_fd=None), common_environment(environ), 0)
    changed = {
        "RANK": str(number),
        "LOCAL_RANK": str(local_rank),
        JOINS: "1",
    }
    folder = context.folder
    return replace(
        spec,
        global_rank=number,
        local_rank=local_rank,
        environ={**spec.environ, **changed},
        log_file=folder / f"rank-{number}.log",
        error_file=error_file(folder, number),
        stack_file=stack_file(folder, number),
    )


def _render_worker(
    job: LaunchJob, context: NodeContext, common: Mapping[str, str], local_rank: int
) -> WorkerSpec:
    global_rank = job.node_rank * job.num_processes + local_rank
    files = {STORE_FD: context.store_fds[local_rank]} if context.store_fds else {}
    if global_rank == 0 and context.listen_fd is not None:
        files[LISTEN_FD] = context.listen_fd
    ports = {"PACELINE_BEACON_PORT": context.beacon_port, "PACELINE_STANDBY_PORT": context.standby_port}
    return WorkerSpec(
        global_rank=global_rank,
        local_rank=local_rank,
        argv=job.command,
        environ={
            **common,
            **_thread_variables(job, context.cores, common),
            "RANK": str(global_rank),
            "WORLD_SIZE": str(job.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(job.num_processes),
            "GROUP_RANK": str(job.node_rank),
            "GROUP_WORLD_SIZE": str(job.nodes),
            "MASTER_ADDR": context.address,
            "MASTER_PORT": str(context.torch_port),
            "PACELINE_STORE_PORT": str(context.port),
            "PACELINE_TOKEN": context.token,
            "PACELINE_ERROR_DIR": str(context.folder),
            "PACELINE_TLS": job.tls,
            **{name: str(file) for name, file in files.items()},
            **{name: str(port) for name, port in ports.items() if port},
        },
        files=files,
        log_file=None
        if local_rank == 0 and job.output not in ("logged", "shown")
        else context.folder / f"rank-{global_rank}.log",
        error_file=error_file(context.folder, global_rank),
        stack_file=stack_file(context.folder, global_rank),
    )


def _thread_variables(job: LaunchJob, cores: int, inherited: Mapping[str, str]) -> dict[str, str]:
    default = inherited.get("OMP_NUM_THREADS", str(max(1, cores // job.num_processes)))
    threads = str(job.threads) if job.threads else default
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
