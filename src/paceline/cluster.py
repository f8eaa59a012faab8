"""Who this process is among the others, and how it meets them.

Invariant: this module is the only place in the package that touches the environment, and a process group
exists only between `Cluster.connect` and `Cluster.disconnect`. It imports torch only when it connects, so
a launcher may import it. It starts no processes: that is `paceline.launch`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CommunicationError, DeviceError
from paceline.group import await_ranks, make_group
from paceline.phase import enter_phase
from paceline.process_group import is_connected, let_go
from paceline.rendezvous import Member, announcements, check_in, interface_towards, open_store
from paceline.roster import announce, write_roster

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

LOOPBACK = "127.0.0.1"


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for those who start other processes."""
    return dict(os.environ)


def change_environment(changes: Mapping[str, str | None]) -> None:
    """Set variables of this process, or remove those whose value is None."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def token_from_environment() -> str:
    """The key of the job that the user has put into PACELINE_TOKEN; empty: none."""
    return os.environ.get("PACELINE_TOKEN", "")


@dataclass(frozen=True)
class Cluster:
    """One process's place in the job.

    Args:
        global_rank, world_size: this process and the number of processes, over all nodes.
        local_rank, local_world_size: the same, counted on this node.
        node_rank, num_nodes: this node and the number of nodes.
        address, port: where the job's store is.
        listen_fd: a listening socket of that port, made by the launcher, for global rank 0; None: bind here.
        token: the key of the job; it is never sent, and a process with another one is turned away.
        error_dir: where a worker writes what went wrong, for the launcher; None: no launcher reads it.
        agent_store: the store is already served by someone else (torchrun's agent).
        attempt: how often an agent has restarted the job; keeps the keys of each attempt apart.
        launched: the environment gave this process a rank, so it is a worker.
        beacon_port: where this node's launcher can be asked whether it lives; 0: nowhere.
        faults_dir: where the lab and this worker meet to carry out a fault plan; None: no faults.
    """

    global_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    address: str
    port: int
    listen_fd: int | None
    token: str
    error_dir: Path | None
    agent_store: bool = False
    attempt: int = 0
    launched: bool = False
    beacon_port: int = 0
    faults_dir: Path | None = None

    @classmethod
    def single(cls) -> Cluster:
        """A job of one process; needs no store and no process group."""
        return cls(0, 1, 0, 1, 0, 1, LOOPBACK, 0, None, "", None)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Cluster:
        """Read the variables that torchrun or Paceline's launcher set; without them: a single process.

        Raises:
            CommunicationError: some variables are missing or contradict each other.
        """
        values = process_environment() if environ is None else environ
        if "RANK" not in values and "WORLD_SIZE" not in values:
            return cls.single()
        world_size = _integer(values, "WORLD_SIZE")
        local_world_size = _integer(values, "LOCAL_WORLD_SIZE", 1 if world_size == 1 else None)
        return cls(
            global_rank=_integer(values, "RANK"),
            world_size=world_size,
            local_rank=_integer(values, "LOCAL_RANK", 0 if world_size == 1 else None),
            local_world_size=local_world_size,
            node_rank=_integer(values, "GROUP_RANK", 0 if local_world_size == world_size else None),
            num_nodes=_integer(values, "GROUP_WORLD_SIZE", -(-world_size // max(1, local_world_size))),
            address=_text(values, "MASTER_ADDR", LOOPBACK if world_size == 1 else None),
            port=_integer(values, "MASTER_PORT", 0 if world_size == 1 else None),
            listen_fd=_integer(values, "PACELINE_LISTEN_FD") if "PACELINE_LISTEN_FD" in values else None,
            token=values.get("PACELINE_TOKEN", ""),
            error_dir=Path(values["PACELINE_ERROR_DIR"]) if values.get("PACELINE_ERROR_DIR") else None,
            agent_store=values.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_integer(values, "TORCHELASTIC_RESTART_COUNT", 0),
            launched=True,
            beacon_port=_integer(values, "PACELINE_BEACON_PORT", 0),
            faults_dir=Path(values["PACELINE_FAULTS"]) if values.get("PACELINE_FAULTS") else None,
        )._checked()

    def _checked(self) -> Cluster:
        one_node = (self.local_rank, self.local_world_size) == (self.global_rank, self.world_size)
        consistent = (
            0 <= self.global_rank < self.world_size
            and 0 <= self.local_rank < self.local_world_size <= self.world_size
            and 0 <= self.node_rank < self.num_nodes <= self.world_size
            and (self.num_nodes > 1 or one_node)
        )
        if not consistent:
            raise _environment_error(
                f"Contradicting environment: RANK={self.global_rank} of WORLD_SIZE={self.world_size}, "
                f"LOCAL_RANK={self.local_rank} of LOCAL_WORLD_SIZE={self.local_world_size}, "
                f"GROUP_RANK={self.node_rank} of GROUP_WORLD_SIZE={self.num_nodes}."
            )
        return self

    def connect(self, device_type: str, deadline_seconds: float) -> torch.device:
        """Meet the other ranks and make the default process group; a world of one needs none.

        Args:
            device_type: "cpu" (Gloo), or "cuda" (NCCL for GPU tensors, Gloo for CPU tensors).
            deadline_seconds: for meeting, and afterwards for every collective of the group.
        Returns:
            This rank's device; for "cuda" it is also torch's current device.
        Raises:
            DeviceError: this node has fewer GPUs than processes.
            DeadlineError: the store or some ranks did not appear in time; names the ranks.
            CommunicationError: the token or the world size is another job's, the rank has already
                joined, or the port is taken. Only this process fails; the running job does not notice.
        """
        device = _claim_device(device_type, self.local_rank)
        if self.world_size > 1 and not is_connected(self.global_rank, self.world_size):
            self.enter_phase("reaching the store of the job", deadline_seconds)
            served = self.open_store(deadline_seconds)
            self.enter_phase("waiting for the other ranks to start", deadline_seconds)
            store = check_in(served, self._member(), self.attempt, deadline_seconds)
            self._write_roster(served)
            _choose_gloo_interface(self.address, self.port)
            self.enter_phase("connecting to the other ranks", deadline_seconds)
            make_group(store, self.global_rank, self.world_size, device_type, deadline_seconds)
        return device

    def enter_phase(self, what: str, seconds: float | None = None) -> None:
        """Tell the launcher what this process does from now on, and how long it may take; see `Phase`."""
        enter_phase(self.error_dir, self.global_rank, what, seconds)

    def await_ranks(self, what: str, seconds: float, say: Callable[[str], object]) -> None:
        """Wait until every rank has done `what`; a world of one waits for nobody. See `group.await_ranks`."""
        if self.world_size > 1:
            await_ranks(what, self.global_rank, self.world_size, seconds, say)

    def disconnect(self) -> None:
        """Let go of what a call has made, when all ranks are done; not after an error: it would wait."""
        if self.world_size > 1:
            let_go()

    def open_store(self, deadline_seconds: float) -> Store:
        """Serve the job's store (global rank 0, or who holds the listening socket), or reach it."""
        return open_store(
            self._member(),
            serve=self.listen_fd is not None or (self.global_rank == 0 and not self.agent_store),
            listen_fd=self.listen_fd,
            deadline_seconds=deadline_seconds,
        )

    def _member(self) -> Member:
        here = announce(self.node_rank, self.beacon_port, self.address, self.port)
        return Member(self.global_rank, self.world_size, self.token, self.address, self.port, here)

    def _write_roster(self, served: Store) -> None:
        if self.beacon_port and self.error_dir is not None and self.local_rank == 0:
            write_roster(self.error_dir, announcements(served, self._member(), self.attempt))


def _claim_device(device_type: str, local_rank: int) -> torch.device:
    import torch

    if device_type != "cuda":
        return torch.device(device_type)
    if local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"Local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}.",
            next_step="start at most one process per GPU, or choose runtime.device = 'cpu'",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _choose_gloo_interface(address: str, port: int) -> None:
    """Bind Gloo to the interface that leads to the store, unless the user chose one.

    Gloo would resolve the host's name, which may be unknown, slow, or 127.0.1.1. On one node the store is
    on the loopback, so nothing is reachable from outside.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = interface_towards(address, port)
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _text(values: Mapping[str, str], name: str, default: str | None = None) -> str:
    value: Any = values.get(name, default)
    if value is None:
        raise _environment_error(f"WORLD_SIZE or RANK is set, but {name} is not.")
    return str(value)


def _integer(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    try:
        return int(text := _text(values, name, None if default is None else str(default)))
    except ValueError as error:
        raise _environment_error(f"{name}={text!r} is not an integer.") from error


def _environment_error(what: str) -> CommunicationError:
    return CommunicationError(
        what,
        where="the environment variables of this process",
        next_step="start the job with paceline or torchrun, or unset RANK and WORLD_SIZE",
    )
