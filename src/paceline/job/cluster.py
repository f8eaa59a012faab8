"""What the variables of a worker say about its place: those of torchrun, and those of Paceline's launcher.

Pure: the variables are an argument; only `paceline.job.cluster` looks at the environment.

Who this process is among the others, and how it meets them.

Invariant: this module is the only place in the package that touches the environment, and process groups
exist only between `Cluster.connect` and `Cluster.disconnect`. It imports torch only when it connects, so
a launcher may import it. It starts no processes: that is `paceline.launch`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CommunicationError
from paceline.job.addresses import interface_towards
from paceline.job.epochs import (
    InitialRendezvous,
    MemberCandidate,
    form_first_membership,
    form_next_membership,
    join_running_job,
)
from paceline.job.handshake import needs_encryption
from paceline.job.launcher_reports import (
    CONNECTED,
    decode_node_rank,
    encode_launcher_address,
    enter_phase,
    write_node_list,
)
from paceline.job.membership import JobMembership, SetupDeadline
from paceline.job.process_group import claim_device
from paceline.job.rendezvous import StoreAccess, open_store

if TYPE_CHECKING:
    import torch

_LOOPBACK = "127.0.0.1"


def read_rank_variables(values: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `Cluster` for a process that has a rank.

    Raises:
        CommunicationError: a variable is missing, or is no number.
    """
    world_size = _integer(values, "WORLD_SIZE")
    alone = world_size == 1
    local_world_size = _integer(values, "LOCAL_WORLD_SIZE", 1 if alone else None)
    return {
        "global_rank": _integer(values, "RANK"),
        "world_size": world_size,
        "local_rank": _integer(values, "LOCAL_RANK", 0 if alone else None),
        "local_world_size": local_world_size,
        "node_rank": _integer(values, "GROUP_RANK", 0 if local_world_size == world_size else None),
        "num_nodes": _integer(values, "GROUP_WORLD_SIZE", -(-world_size // max(1, local_world_size))),
        "address": _text(values, "MASTER_ADDR", _LOOPBACK if alone else None),
        "port": _integer(values, _port_name(values), 0 if alone else None),
        "listen_fd": _optional_integer(values, "PACELINE_LISTEN_FD"),
        "store_fd": _optional_integer(values, "PACELINE_STORE_FD"),
        "token": values.get("PACELINE_TOKEN", ""),
        "error_dir": Path(values["PACELINE_ERROR_DIR"]) if values.get("PACELINE_ERROR_DIR") else None,
        "agent_store": values.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and not _is_started_by_launcher(values),
        "attempt": _integer(values, "TORCHELASTIC_RESTART_COUNT", 0),
        "launched": True,
        "beacon_port": _integer(values, "PACELINE_BEACON_PORT", 0),
        "tls": values.get("PACELINE_TLS", "auto"),
        "faults_dir": Path(values["PACELINE_FAULTS"]) if values.get("PACELINE_FAULTS") else None,
    }


def environment_error(what: str) -> CommunicationError:
    """An error in the variables of this process."""
    return CommunicationError(
        what,
        where="the environment variables of this process",
        next_step="start the job with paceline or torchrun, or unset RANK and WORLD_SIZE",
    )


def _is_started_by_launcher(values: Mapping[str, str]) -> bool:
    """Whether Paceline's launcher has started this process."""
    return "PACELINE_STORE_FD" in values or "PACELINE_STORE_PORT" in values


def _port_name(values: Mapping[str, str]) -> str:
    """The variable with the port of the store; for a script, MASTER_PORT is where torch's own is."""
    return "PACELINE_STORE_PORT" if "PACELINE_STORE_PORT" in values else "MASTER_PORT"


def _optional_integer(values: Mapping[str, str], name: str) -> int | None:
    return _integer(values, name) if name in values else None


def _text(values: Mapping[str, str], name: str, default: str | None = None) -> str:
    value: Any = values.get(name, default)
    if value is None:
        raise environment_error(f"WORLD_SIZE or RANK is set, but {name} is not.")
    return str(value)


def _integer(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = _text(values, name, None if default is None else str(default))
    try:
        return int(text)
    except ValueError as error:
        raise environment_error(f"{name}={text!r} is not an integer.") from error


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
        address, port: where the job's store can be called.
        store_fd: a connection to it, made by the launcher; None: call it, or serve it as global rank 0.
        listen_fd: a listening socket for a script that uses torch's own store, for global rank 0; else None.
        token: the key of the job; it is never sent, and a process with another one is turned away.
        error_dir: where a worker writes what went wrong, for the launcher; None: no launcher reads it.
        agent_store: torchrun's agent serves torch's own store.
        attempt: how often an agent has restarted the job; keeps the keys of each attempt apart.
        launched: the environment gave this process a rank, so it is a worker.
        beacon_port: where this node's launcher can be asked whether it lives; 0: nowhere.
        faults_dir: where the lab and this worker meet to carry out a fault plan; None: no faults.
        tls: whether calls of the store are encrypted; see `needs_encryption`.
        membership: what `connect` has found; None: not connected, or alone.
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
    store_fd: int | None = None
    tls: str = "auto"
    membership: JobMembership | None = field(default=None, compare=False, repr=False)

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
        return cls(**read_rank_variables(values))._checked()

    def _checked(self) -> Cluster:
        one_node = (self.local_rank, self.local_world_size) == (self.global_rank, self.world_size)
        consistent = (
            0 <= self.global_rank < self.world_size
            and 0 <= self.local_rank < self.local_world_size <= self.world_size
            and 0 <= self.node_rank < self.num_nodes <= self.world_size
            and (self.num_nodes > 1 or one_node)
        )
        if not consistent:
            raise environment_error(
                f"Contradicting environment: RANK={self.global_rank} of WORLD_SIZE={self.world_size}, "
                f"LOCAL_RANK={self.local_rank} of LOCAL_WORLD_SIZE={self.local_world_size}, "
                f"GROUP_RANK={self.node_rank} of GROUP_WORLD_SIZE={self.num_nodes}."
            )
        return self

    def connect(
        self, device_type: str, deadline_seconds: float, patience: SetupDeadline | None = None
    ) -> Cluster:
        """Meet the other ranks and make the default process group: this place with its membership.

        Args:
            device_type: "cpu" (Gloo), or "cuda" (NCCL, and Gloo for CPU tensors; claims this rank's GPU).
            deadline_seconds: for reaching the store, and for making groups.
            patience: with ranks that have not started; None: `deadline_seconds`.
        Raises:
            DeviceError: this node has fewer GPUs than processes.
            DeadlineError: the store or some ranks did not appear in time; names the ranks.
            CommunicationError: wrong token or world size, the rank has come already, or the port is taken.
                Only this process fails; the running job does not notice.
        """
        device = claim_device(device_type, self.local_rank)
        if self.world_size == 1:  # it needs no group
            return self
        candidate = self._candidate(device, deadline_seconds)
        patience = patience or SetupDeadline(deadline_seconds)
        self.enter_phase("waiting for the other ranks to start", patience.seconds)
        membership = form_first_membership(
            candidate, InitialRendezvous(self.world_size, self.attempt, self.way.job, patience)
        )
        self.enter_phase("making process groups", deadline_seconds)
        membership.groups.begin()
        self.enter_phase(CONNECTED)  # a script may go on for as long as it likes
        return self._with(membership)

    def join(self, device_type: str, deadline_seconds: float) -> Cluster:
        """Become a member of a job that runs; its members take this process in at their next change.

        `global_rank` is this process's number, which no other process of the job has had. The place that is
        returned is the one among the members.

        Raises:
            DeadlineError, CommunicationError: as for `connect`.
        """
        device = claim_device(device_type, self.local_rank)
        return self._with(join_running_job(self._candidate(device, deadline_seconds)))

    def renew(self, deadline_seconds: float) -> Cluster:
        """Go on with those that still are here, or have come; every rank that goes on calls it.

        Process groups of the present membership end: build anew what hangs on them.

        Args:
            deadline_seconds: how long to wait for members that are alive and do not call.
        Returns:
            This process's place among them, with the new membership.
        Raises:
            CommunicationError: the others have gone on without this process, or cannot be reached.
        """
        return self._with(form_next_membership(self.connected, deadline_seconds))

    def abort(self) -> None:
        """Let every collective that is under way fail now, here and on the ranks that wait for this one."""
        if self.membership is not None:
            self.membership.abort()

    @property
    def connected(self) -> JobMembership:
        """The membership.

        Raises:
            CommunicationError: this place is not connected.
        """
        if self.membership is None:
            raise CommunicationError(
                f"rank {self.global_rank} of {self.world_size} is not connected to the others",
                next_step="use what Cluster.connect returns",
            )
        return self.membership

    def enter_phase(self, what: str, seconds: float | None = None) -> None:
        """Tell the launcher what this process does, and how long it may take; see `Phase`."""
        enter_phase(self.error_dir, self.global_rank, what, seconds)

    def await_ranks(self, what: str, seconds: float, say: Callable[[str], object]) -> None:
        """Wait until every rank has done `what`; alone it waits for nobody. See `JobMembership.await_all`."""
        if self.membership is not None:
            self.membership.wait_for_all_members(what, seconds, say)

    def disconnect(self) -> None:
        """Let go of all groups and of the store, when all ranks are done; not after an error."""
        if self.membership is not None:
            self.membership.leave()

    def _candidate(self, device: torch.device, seconds: float) -> MemberCandidate:
        self.enter_phase("reaching the store of the job", seconds)
        store = open_store(self.way, seconds)
        self.enter_phase(CONNECTED)
        _choose_gloo_interface(self.address, self.port)
        note = encode_launcher_address(self.node_rank, self.beacon_port, self.address, self.port)
        return MemberCandidate(self.global_rank, note, store, device, seconds, str(os.getpid()))

    @property
    def way(self) -> StoreAccess:
        """How this process gets to the store of the job."""
        serves = self.store_fd is None and self.global_rank == 0 and not self.agent_store
        named = (self.global_rank, self.address, self.port, self.token)
        return StoreAccess(
            *named, self.store_fd, serves, self.agent_store, needs_encryption(self.tls, self.num_nodes)
        )

    def _with(self, membership: JobMembership) -> Cluster:
        """This process's place in a membership, on all nodes and on its own."""
        nodes = [decode_node_rank(note) for note in membership.notes]
        mine = [rank for rank, node in enumerate(nodes) if node == nodes[membership.rank]]
        if self.beacon_port and self.error_dir is not None and mine[0] == membership.rank:
            write_node_list(self.error_dir, membership.notes)
        return replace(
            self,
            global_rank=membership.rank,
            world_size=len(membership.members),
            local_rank=mine.index(membership.rank),
            local_world_size=len(mine),
            node_rank=sorted(set(nodes)).index(nodes[membership.rank]),
            num_nodes=len(set(nodes)),
            membership=membership,
        )


def _choose_gloo_interface(address: str, port: int) -> None:
    """Bind Gloo to the interface that leads to the store, on one node the loopback, unless the user did."""
    # it would resolve the host's name, which may be unknown, slow, or 127.0.1.1
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_towards(address, port)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
