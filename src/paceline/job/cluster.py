"""This process among the ranks of its job, and how it connects to them.

Invariants: this module is the only place in the package that touches the environment. Process groups exist
only between `Cluster.connect` and `Cluster.disconnect`. torch is imported only when a cluster connects, so a
launcher may import this module. It starts no processes: that is `paceline.launch`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CommunicationError
from paceline.job.addresses import interface_towards
from paceline.job.engines import EnginePlace, named_by_proxy, place_from, store_endpoint_of
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
    stack_file,
    write_node_list,
)
from paceline.job.membership import JobMembership, SetupDeadline
from paceline.job.process_group import claim_device
from paceline.job.rendezvous import StoreAccess, open_store

if TYPE_CHECKING:
    import torch

LOOPBACK = "127.0.0.1"


def process_environment() -> dict[str, str]:
    """Return a copy of the environment of this process, for a process that it starts."""
    return dict(os.environ)


def change_environment(changes: Mapping[str, str | None]) -> None:
    """Set variables of this process; a value of None removes the variable."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def token_from_environment() -> str:
    """Return the key of the job in PACELINE_TOKEN; empty if it is not set."""
    return os.environ.get("PACELINE_TOKEN", "")


def current_place() -> EnginePlace | None:
    """Return the place that an engine has given to this process; see `place_from`."""
    return named_by_proxy(place_from(process_environment(), has_terminal=_has_terminal()))


def _has_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:  # standard input is closed
        return False


def refuse_engine_tasks(place: EnginePlace | None, what: str) -> None:
    """Raise an error if this process would do alone what other tasks of the same command do as well; pure.

    Args:
        what: the command, as in "paceline sweep".
    Raises:
        CommunicationError: an engine has started several tasks.
    """
    if place is None:
        return
    raise CommunicationError(
        f"this is task {place.global_rank} of {place.world_size} of {place.command}, and {what} starts its"
        " jobs by itself: each task would do all of it",
        where=f"the variables of {place.engine}: {place.settings}",
        next_step=f"start it as one task ({place.command} -n 1)",
    )


def read_engine_place(place: EnginePlace, values: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `Cluster` for a process that an engine has started as one rank.

    Raises:
        CommunicationError: rank 0 cannot be found, or the job has several nodes and no key.
    """
    token = values.get("PACELINE_TOKEN", "")
    if not token and place.num_nodes > 1:
        raise CommunicationError(
            f"a job on {place.num_nodes} nodes needs a key: without it, anyone who reaches the rendezvous"
            " could join",
            where=f"the variables of {place.engine}: {place.settings}",
            next_step="export PACELINE_TOKEN=$(openssl rand -hex 32) before the command (srun passes it on;"
            " mpirun -x PACELINE_TOKEN), or pass --insecure on a network that you trust",
        )
    address, port = store_endpoint_of(place, values)
    return {
        "global_rank": place.global_rank,
        "world_size": place.world_size,
        "local_rank": place.local_rank,
        "local_world_size": place.local_world_size,
        "node_rank": place.node_rank,
        "num_nodes": place.num_nodes,
        "address": address,
        "port": port,
        "listen_fd": None,
        "token": token or place.job,
        "error_dir": None,
        "launched": True,
        "tls": values.get("PACELINE_TLS", "auto"),
    }


def _has_rank(values: Mapping[str, str]) -> bool:
    return "RANK" in values or "WORLD_SIZE" in values


def read_rank_variables(values: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `Cluster` for a process that has a rank; pure.

    Args:
        values: the variables that torchrun or Paceline's launcher has set.
    Raises:
        CommunicationError: a variable is missing or is not an integer.
    """
    world_size = _integer(values, "WORLD_SIZE")
    is_single = world_size == 1
    local_world_size = _integer(values, "LOCAL_WORLD_SIZE", 1 if is_single else None)
    started_by_launcher = "PACELINE_STORE_FD" in values or "PACELINE_STORE_PORT" in values
    # for a user's script, MASTER_PORT is the port of torch's own store
    port_name = "PACELINE_STORE_PORT" if "PACELINE_STORE_PORT" in values else "MASTER_PORT"
    return {
        "global_rank": _integer(values, "RANK"),
        "world_size": world_size,
        "local_rank": _integer(values, "LOCAL_RANK", 0 if is_single else None),
        "local_world_size": local_world_size,
        "node_rank": _integer(values, "GROUP_RANK", 0 if local_world_size == world_size else None),
        "num_nodes": _integer(values, "GROUP_WORLD_SIZE", -(-world_size // max(1, local_world_size))),
        "address": _text(values, "MASTER_ADDR", LOOPBACK if is_single else None),
        "port": _integer(values, port_name, 0 if is_single else None),
        "listen_fd": _optional_integer(values, "PACELINE_LISTEN_FD"),
        "store_fd": _optional_integer(values, "PACELINE_STORE_FD"),
        "token": values.get("PACELINE_TOKEN", ""),
        "error_dir": _optional_path(values, "PACELINE_ERROR_DIR"),
        "agent_store": values.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not started_by_launcher,
        "attempt": _integer(values, "TORCHELASTIC_RESTART_COUNT", 0),
        "launched": True,
        "beacon_port": _integer(values, "PACELINE_BEACON_PORT", 0),
        "standby_port": _integer(values, "PACELINE_STANDBY_PORT", 0),
        "tls": values.get("PACELINE_TLS", "auto"),
        "faults_dir": _optional_path(values, "PACELINE_FAULTS"),
        "joins": values.get("PACELINE_JOINS") == "1",
    }


def environment_error(what: str) -> CommunicationError:
    """Return an error about the variables of this process."""
    return CommunicationError(
        what,
        where="the environment variables of this process",
        next_step="start the job with paceline or torchrun, or unset RANK and WORLD_SIZE",
    )


def _optional_path(values: Mapping[str, str], name: str) -> Path | None:
    return Path(values[name]) if values.get(name) else None


def _optional_integer(values: Mapping[str, str], name: str) -> int | None:
    return _integer(values, name) if name in values else None


def _text(values: Mapping[str, str], name: str, default: str | None = None) -> str:
    value: Any = values.get(name, default)
    if value is None:
        raise environment_error(f"WORLD_SIZE or RANK is set, but {name} is not")
    return str(value)


def _integer(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = _text(values, name, None if default is None else str(default))
    try:
        return int(text)
    except ValueError as error:
        raise environment_error(f"{name}={text!r} is not an integer") from error


@dataclass(frozen=True)
class Cluster:
    """One process of a job: its rank, and the address of the others.

    Args:
        global_rank, world_size: rank of this process and number of processes, over all nodes.
        local_rank, local_world_size: the same on this node.
        node_rank, num_nodes: rank of this node and number of nodes.
        address, port: address of the job's store.
        store_fd: a connection to the store, inherited from the launcher; None: connect to it, or serve it as
            global rank 0.
        listen_fd: a listening socket for a script that uses torch's own store, for global rank 0; else None.
        token: the key of the job. It is never sent, and a process with another key is rejected.
        error_dir: folder in which a worker writes its errors for the launcher; None: there is no launcher.
        agent_store: torchrun's agent serves torch's own store.
        attempt: number of restarts by an agent; keeps the keys of each attempt apart.
        launched: the environment gave this process a rank, so it is a worker.
        beacon_port: port on which this node's launcher can be probed; 0: none.
        standby_port: port on which it serves a store, in case that of the job is lost; 0: none.
        faults_dir: folder through which the lab injects faults into this worker; None: no faults.
        tls: whether connections to the store are encrypted: "on", "off", or "auto" (with several nodes).
        joins: this process joins a running job, in which `global_rank` is its number (`join`).
        membership: the membership that `connect` returned; None: not connected, or a single process.
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
    standby_port: int = 0
    faults_dir: Path | None = None
    store_fd: int | None = None
    tls: str = "auto"
    joins: bool = False
    membership: JobMembership | None = field(default=None, compare=False, repr=False)

    @classmethod
    def single(cls) -> Cluster:
        """Return a job of one process, which needs no store and no process group."""
        return cls(0, 1, 0, 1, 0, 1, LOOPBACK, 0, None, "", None)

    @classmethod
    def of_worker(cls) -> Cluster | None:
        """Return the cluster if a launcher or an engine started this process as a rank; else None."""
        values = process_environment()
        place = current_place()
        is_rank = _has_rank(values) or (place is not None and not place.starts_launchers)
        return cls.from_env() if is_rank else None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Cluster:
        """Read the variables of Paceline's launcher, torchrun or another engine; else return `single()`.

        Raises:
            CommunicationError: some variables are missing or contradict each other; the job has several nodes
                and no key; or this process has to be a launcher (a pod of Kubernetes).
        """
        values = process_environment() if environ is None else environ
        place = current_place() if environ is None else named_by_proxy(place_from(values))
        if _has_rank(values) and (place is None or place.engine == "torchrun"):
            return cls(**read_rank_variables(values))._checked()
        if place is None:
            return cls.single()
        if place.starts_launchers:
            raise CommunicationError(
                f"this is pod {place.global_rank} of {place.world_size}, which starts the ranks of its node",
                where=f"the variables of {place.engine}: {place.settings}",
                next_step="start a recipe by `paceline train`, or a script by `paceline run SCRIPT`",
            )
        return cls(**read_engine_place(place, values))

    def _checked(self) -> Cluster:
        one_node = (self.local_rank, self.local_world_size) == (self.global_rank, self.world_size)
        consistent = (
            0 <= self.global_rank < self.world_size
            and 0 <= self.local_rank < self.local_world_size <= self.world_size
            and 0 <= self.node_rank < self.num_nodes <= self.world_size
            and (self.num_nodes > 1 or one_node)
        )
        if not consistent and not self.joins:
            raise environment_error(
                f"the variables contradict each other: RANK={self.global_rank} of"
                f" WORLD_SIZE={self.world_size}, LOCAL_RANK={self.local_rank} of"
                f" LOCAL_WORLD_SIZE={self.local_world_size}, GROUP_RANK={self.node_rank} of"
                f" GROUP_WORLD_SIZE={self.num_nodes}"
            )
        return self

    def connect(
        self, device_type: str, deadline_seconds: float, setup: SetupDeadline | None = None
    ) -> Cluster:
        """Connect to the other ranks and create the default process group; returns the connected cluster.

        Args:
            device_type: "cpu" (Gloo), or "cuda" (NCCL, and Gloo for CPU tensors; claims this rank's GPU).
            deadline_seconds: for reaching the store, and for creating groups.
            setup: how long to wait for ranks that have not started; None: `deadline_seconds`.
        Raises:
            DeviceError: this node has fewer GPUs than processes.
            DeadlineError: the store or some ranks did not appear in time; names the ranks.
            CommunicationError: wrong token or world size, the rank has joined already, or the port is in use.
                Only this process fails; the running job does not notice.
        """
        device = claim_device(device_type, self.local_rank)
        if self.world_size == 1:  # it needs no group
            return self
        candidate = self._candidate(device, deadline_seconds)
        setup = setup or SetupDeadline(deadline_seconds)
        self.enter_phase("waiting for the other ranks to start", setup.seconds)
        membership = form_first_membership(
            candidate, InitialRendezvous(self.world_size, self.attempt, self.store_access.job, setup)
        )
        self.enter_phase("creating process groups", deadline_seconds)
        membership.groups.begin()
        self.enter_phase(CONNECTED)  # without a limit: a script can run for as long as it likes
        return self._with(membership)

    def join(self, device_type: str, deadline_seconds: float) -> Cluster:
        """Become a member of a running job; its members admit this process at their next change.

        `global_rank` is the number of this process, which no other process of the job has had. The cluster
        that is returned has its rank among the members.

        Raises:
            DeadlineError, CommunicationError: as for `connect`.
        """
        device = claim_device(device_type, self.local_rank)
        return self._with(join_running_job(self._candidate(device, deadline_seconds)))

    def renew(self, deadline_seconds: float, *, admits: bool = True) -> Cluster:
        """Form the next membership, of remaining and joining ranks; every remaining rank calls this.

        Process groups of the present membership end; whatever uses them must be built again.

        Args:
            deadline_seconds: how long to wait for members that are alive and do not call.
            admits: whether ranks that have asked to join are admitted; equal on every remaining rank.
        Returns:
            The cluster with the new membership.
        Raises:
            CommunicationError: the others have continued without this process, or cannot be reached.
        """
        return self._with(form_next_membership(self.connected, deadline_seconds, admits=admits))

    def abort(self) -> None:
        """Make every running collective fail now, here and on the ranks that wait for this one."""
        if self.membership is not None:
            self.membership.abort()

    @property
    def connected(self) -> JobMembership:
        """The membership.

        Raises:
            CommunicationError: this cluster is not connected.
        """
        if self.membership is None:
            raise CommunicationError(
                f"rank {self.global_rank} of {self.world_size} is not connected to the others",
                next_step="use what Cluster.connect returns",
            )
        return self.membership

    def enter_phase(self, what: str, seconds: float | None = None) -> None:
        """Report to the launcher what this process does, and how long that may take (None: any time)."""
        # The launcher knows a process by its number, which stays when its rank changes.
        number = self.global_rank if self.membership is None else self.membership.number
        enter_phase(self.error_dir, number, what, seconds)

    @property
    def stack_file(self) -> Path | None:
        """File to which this process writes its stack when its launcher requests it; None: it writes none."""
        number = self.global_rank if self.membership is None else self.membership.number
        return None if self.error_dir is None else stack_file(self.error_dir, number)

    def await_ranks(self, what: str, seconds: float, log: Callable[[str], object]) -> None:
        """Wait until every rank has done `what`; a single process does not wait.

        Args:
            what: as in "built the task"; all ranks call this equally often with it.
            log: prints now and then which ranks are missing.
        Raises:
            DeadlineError, CommunicationError: some ranks did not do it in `seconds`, or are gone; names them.
        """
        if self.membership is not None:
            self.membership.wait_for_all_members(what, seconds, log)

    def disconnect(self) -> None:
        """Release all groups and the store, when all ranks are done; not to be called after an error."""
        if self.membership is not None:
            self.membership.leave()

    def abandon(self) -> None:
        """Stop using the groups after an error, without closing what other ranks may still read from."""
        if self.membership is not None:
            self.membership.groups.abandon()

    def _candidate(self, device: torch.device, seconds: float) -> MemberCandidate:
        self.enter_phase("reaching the store of the job", seconds)
        store = open_store(self.store_access, seconds)
        self.enter_phase(CONNECTED)
        _choose_gloo_interface(self.address, self.port)
        note = encode_launcher_address(
            self.node_rank, self.beacon_port, self.address, self.port, self.standby_port
        )
        return MemberCandidate(self.global_rank, note, store, device, seconds, str(os.getpid()))

    @property
    def store_access(self) -> StoreAccess:
        """Access of this process to the store of the job."""
        return StoreAccess(
            number=self.global_rank,
            address=self.address,
            port=self.port,
            token=self.token,
            connection_fd=self.store_fd,
            serves=self.store_fd is None and self.global_rank == 0 and not self.agent_store,
            agent=self.agent_store,
            tls=needs_encryption(self.tls, self.num_nodes),
        )

    def _with(self, membership: JobMembership) -> Cluster:
        """Return this cluster with its ranks in a membership, over all nodes and on its own."""
        nodes = [decode_node_rank(note) for note in membership.notes]
        local_ranks = [rank for rank, node in enumerate(nodes) if node == nodes[membership.rank]]
        if self.beacon_port and self.error_dir is not None and local_ranks[0] == membership.rank:
            write_node_list(self.error_dir, membership.notes)
        return replace(
            self,
            global_rank=membership.rank,
            world_size=len(membership.members),
            local_rank=local_ranks.index(membership.rank),
            local_world_size=len(local_ranks),
            node_rank=sorted(set(nodes)).index(nodes[membership.rank]),
            num_nodes=len(set(nodes)),
            membership=membership,
        )


def _choose_gloo_interface(address: str, port: int) -> None:
    """Bind Gloo to the interface that leads to the store, unless the user has chosen one."""
    # by default Gloo resolves the host name, which can be unknown, slow, or 127.0.1.1
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_towards(address, port)):
        os.environ["GLOO_SOCKET_IFNAME"] = name
