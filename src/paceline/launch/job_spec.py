"""What to launch: one node's share of a job, as a value.

Invariant: a `LaunchJob` that exists can be rendered; impossible values are errors when it is made.

What each worker is given: its argument vector, its variables, its log. Pure: nothing is started here.

Invariant: equal arguments give equal workers, and the variables of an outer launcher never leak into them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import RecipeError

_ADVICE = "one node: leave --nodes out; several: --rendezvous HOST:PORT, an address of node 0, on every node"


@dataclass(frozen=True)
class LaunchJob:
    """One node's processes.

    Args:
        command: the argument vector of every worker; see `script_command` for a user's own script.
        num_processes: how many on this node; the same on every node.
        nodes, node_rank: number of nodes, and which one this is.
        rendezvous: "HOST:PORT" of node 0; needed with more than one node.
        token: the key of the job; the same on every node. Empty: a random one (one node), or one that
            follows from the rendezvous (several nodes), which keeps jobs apart and no stranger out.
        threads: intra-op threads of each process. 0: OMP_NUM_THREADS where it is set, else the cores
            divided by the processes.
        log_dir: folder for the output of all processes but the first of this node; None: a folder that
            is removed at the end.
        output: "files"; "prefixed": the lines of the other processes are shown as well; "logged": the
            first process has a file too; "shown": it too, and its
            lines are shown as they are.
        settle_seconds: after a failure, how long the others may find out and say so themselves.
        kill_seconds: how long they may take to obey SIGTERM after that.
        grace_seconds: how long they may take after Ctrl-C or SIGTERM, for example to finish the step.
        stuck_seconds: how long a process may be stopped by a signal (SIGSTOP) before the job is ended.
        announces: the workers say when their first step begins (see `phase`); before that there is nothing
            to save, and a signal ends the job at once.
        tls: whether the nodes encrypt what they say to the store of the job; "auto": they do.
        servers: so many first ranks serve the others: once a step has begun, a failure of one of them ends
            the job, and rank 0 knows whether enough workers are left; 0: any failure ends it.
    Raises:
        PacelineError: a value is impossible.
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
    settle_seconds: float = 1.0
    kill_seconds: float = 3.0
    grace_seconds: float = 10.0
    stuck_seconds: float = float("inf")
    announces: bool = False
    servers: int = 0
    tls: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        rules = {
            "The command is empty.": len(self.command) > 0,
            f"num_processes is {self.num_processes}, expected at least 1.": self.num_processes >= 1,
            f"nodes is {self.nodes}, expected at least 1.": self.nodes >= 1,
            f"node_rank is {self.node_rank}, expected 0 to {self.nodes - 1}.": (
                0 <= self.node_rank < self.nodes
            ),
            f"threads is {self.threads}, expected at least 0.": self.threads >= 0,
            f"{self.nodes} nodes need a rendezvous HOST:PORT.": self.nodes == 1 or self.rendezvous != "",
        }
        for problem, holds in rules.items():
            if not holds:
                raise RecipeError(problem, where="the launch options", next_step=_ADVICE)
        if self.rendezvous:
            _ = self.endpoint

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the rendezvous."""
        host, colon, port = self.rendezvous.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
            raise RecipeError(
                f"The rendezvous is {self.rendezvous!r}, expected HOST:PORT.",
                where="the launch options",
                next_step="for example --rendezvous 10.0.0.1:29500, an address of node 0",
            )
        return host.strip("[]"), int(port)

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port of the rendezvous; empty and 0 on one node."""
        return self.endpoint if self.rendezvous else ("", 0)

    @property
    def runs_script(self) -> bool:
        """Whether the workers run a user's own script, which may use torch's own store."""
        return self.command[1:3] == ("-m", "paceline.launch")

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return self.nodes * self.num_processes


STORE_FD, LISTEN_FD = "PACELINE_STORE_FD", "PACELINE_LISTEN_FD"
"""Variables that name a file which a worker inherits: its connection to the store, and torch's listener."""

TORCH_PORT = "torch/port"
"""Where the store tells workers of other nodes the port of torch's own."""

_PACELINE_VARIABLES = (
    *(STORE_FD, LISTEN_FD, "PACELINE_STORE_PORT"),
    *("PACELINE_TOKEN", "PACELINE_ERROR_DIR", "PACELINE_BEACON_PORT", "PACELINE_TLS"),
)
_FOREIGN_PREFIX = "TORCHELASTIC_"


_KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_MMAP_THRESHOLD_": "2147483647"}
"""For glibc: by default it returns large blocks, and a step may pay thousands of page faults for them.

Measured in `benchmarks.heap`; the price is that freed memory stays with the process.
"""


@dataclass(frozen=True)
class NodeContext:
    """What only the machine can know: where the store is, where errors and logs go, how many cores.

    Args:
        address, port: where the job's store can be called, or 0.
        torch_port: where a script finds torch's own store; 0: it has to ask the job's.
        listen_fd: the listening socket of that port, given to global rank 0; None: there is none here.
        store_fds: a connection to the store for each worker of this node; empty: they call it.
        token: the job's, never empty.
        folder: logs and error reports of the workers.
        cores: that this process may use.
        beacon_port: where this node's launcher can be asked whether it lives; 0: nowhere.
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


@dataclass(frozen=True)
class WorkerSpec:
    """One process to start.

    Args:
        global_rank, local_rank: its place in the job and on this node.
        argv: the argument vector.
        environ: the whole environment.
        files: open files that it inherits, by the variable that tells it their number.
        log_file: where its output goes; None: to the launcher's own output.
        error_file, stack_file: where it reports an exception, and where its stack goes when asked.
        directory: where it runs; None: where the launcher does.
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
    """What is the same for all workers of all jobs that inherit these variables."""
    return {
        "PYTHONUNBUFFERED": "1",  # what a worker wrote before it was killed must be in its log
        "PYTHONFAULTHANDLER": "1",
        **_KEEP_FREED_MEMORY,
        **{
            name: value
            for name, value in inherited.items()
            if name not in _PACELINE_VARIABLES and not name.startswith(_FOREIGN_PREFIX)
        },
    }


def script_command(script: str, *arguments: str) -> tuple[str, ...]:
    """The argument vector of a worker that runs a user's own script, or a module with "-m" first."""
    return (sys.executable, "-m", "paceline.launch", script, *arguments)


def error_file(folder: Path, global_rank: int) -> Path:
    """Where a worker reports its exception."""
    return folder / f"rank-{global_rank}.json"


def stack_file(folder: Path, global_rank: int) -> Path:
    """Where a worker's stack goes when the launcher asks for it."""
    return folder / f"rank-{global_rank}.stack"


def socket_folder(folder: Path, global_rank: int) -> Path:
    """Where a worker and its children meet."""
    return folder / f"rank-{global_rank}.sockets"


def render_workers(job: LaunchJob, place: NodeContext, environ: Mapping[str, str]) -> tuple[WorkerSpec, ...]:
    """The workers of one node, by local rank.

    Args:
        environ: the environment to inherit; the variables of the job are set over it.
    """
    common = common_environment(environ)
    return tuple(_render_worker(job, place, common, local) for local in range(job.num_processes))


def _render_worker(
    job: LaunchJob, place: NodeContext, common: Mapping[str, str], local_rank: int
) -> WorkerSpec:
    global_rank = job.node_rank * job.num_processes + local_rank
    files = {STORE_FD: place.store_fds[local_rank]} if place.store_fds else {}
    if global_rank == 0 and place.listen_fd is not None:
        files[LISTEN_FD] = place.listen_fd
    own = {"PACELINE_BEACON_PORT": str(place.beacon_port)} if place.beacon_port else {}
    return WorkerSpec(
        global_rank=global_rank,
        local_rank=local_rank,
        argv=job.command,
        environ={
            **common,
            **_thread_variables(job, place.cores, common),
            "RANK": str(global_rank),
            "WORLD_SIZE": str(job.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(job.num_processes),
            "GROUP_RANK": str(job.node_rank),
            "GROUP_WORLD_SIZE": str(job.nodes),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(place.torch_port),
            "PACELINE_STORE_PORT": str(place.port),
            "PACELINE_TOKEN": place.token,
            "PACELINE_ERROR_DIR": str(place.folder),
            "PACELINE_TLS": job.tls,
            **{name: str(file) for name, file in files.items()},
            **own,
        },
        files=files,
        log_file=None
        if local_rank == 0 and job.output not in ("logged", "shown")
        else place.folder / f"rank-{global_rank}.log",
        error_file=error_file(place.folder, global_rank),
        stack_file=stack_file(place.folder, global_rank),
    )


def _thread_variables(job: LaunchJob, cores: int, inherited: Mapping[str, str]) -> dict[str, str]:
    default = inherited.get("OMP_NUM_THREADS", str(max(1, cores // job.num_processes)))
    threads = str(job.threads) if job.threads else default
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
