"""What to launch: one node's share of a job, as a value.

Invariant: a `Job` that exists can be rendered; impossible values are errors when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import RecipeError

_ADVICE = "one node: leave --nodes out; several: --rendezvous HOST:PORT, an address of node 0, on every node"


@dataclass(frozen=True)
class Job:
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
