"""Who this process is among the others, and how it meets them.

Invariant: this module is the only place in the package that reads the environment, and a process group
exists only between `Cluster.connect` and `Cluster.disconnect`. It imports torch only when it connects, so
a launcher may import it. It starts no processes: that is `paceline.launch`.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CommunicationError, DeadlineError, DeviceError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store, TCPStore

LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.02


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, for those who start other processes."""
    return dict(os.environ)


@dataclass(frozen=True)
class Cluster:
    """One process's place in the job.

    Args:
        global_rank, world_size: this process and the number of processes, over all nodes.
        local_rank, local_world_size: the same, counted on this node.
        node_rank, num_nodes: this node and the number of nodes.
        address, port: where the job's store is.
        listen_fd: a listening socket of that port, made by the launcher, for global rank 0; None: bind here.
        token: names the job, so that a process of another job is turned away; it is no secret.
        error_dir: where a worker writes what went wrong, for the launcher; None: no launcher reads it.
        agent_store: the store is already served by someone else (torchrun's agent).
        attempt: how often an agent has restarted the job; keeps the keys of each attempt apart.
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
        cluster = cls(
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
        )
        cluster._check()
        return cluster

    def _check(self) -> None:
        rules = (
            (0 <= self.global_rank < self.world_size, f"RANK={self.global_rank}, WORLD_SIZE={self.world_size}"),
            (
                0 <= self.local_rank < self.local_world_size <= self.world_size,
                f"LOCAL_RANK={self.local_rank}, LOCAL_WORLD_SIZE={self.local_world_size}, "
                f"WORLD_SIZE={self.world_size}",
            ),
            (
                0 <= self.node_rank < self.num_nodes <= self.world_size,
                f"GROUP_RANK={self.node_rank}, GROUP_WORLD_SIZE={self.num_nodes}, WORLD_SIZE={self.world_size}",
            ),
            (
                self.num_nodes > 1
                or (self.local_rank, self.local_world_size) == (self.global_rank, self.world_size),
                f"one node, but RANK={self.global_rank} of {self.world_size} and "
                f"LOCAL_RANK={self.local_rank} of {self.local_world_size}",
            ),
        )
        for holds, values in rules:
            if not holds:
                raise _environment_error(f"The environment contradicts itself: {values}.")

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
        if self.world_size > 1:
            expires = time.monotonic() + deadline_seconds
            store = self._join(self.open_store(deadline_seconds), expires)
            _choose_gloo_interface(self.address, self.port)
            _make_group(store, self, device_type, deadline_seconds)
        return device

    def disconnect(self) -> None:
        """Destroy the process group. Call it when all ranks are done, not after an error: it would wait.

        Garbage is collected first: a group that outlives its last user aborts about one exit in ten.
        """
        if self.world_size == 1:
            return
        import gc

        import torch.distributed as dist

        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()

    def open_store(self, deadline_seconds: float) -> TCPStore:
        """Serve the job's store (global rank 0, or who holds the listening socket), or reach it."""
        from datetime import timedelta

        from torch.distributed import DistNetworkError, TCPStore

        serves = self.listen_fd is not None or (self.global_rank == 0 and not self.agent_store)
        if not serves:
            self._await_store(time.monotonic() + deadline_seconds)
        try:
            return TCPStore(
                self.address,
                self.port,
                self.world_size,
                is_master=serves,
                timeout=timedelta(seconds=deadline_seconds),
                wait_for_workers=False,
                master_listen_fd=self.listen_fd,
            )
        except DistNetworkError as error:
            verb = "serve" if serves else "reach"
            raise CommunicationError(
                f"Rank {self.global_rank} cannot {verb} the job's store at {self.address}:{self.port}: {error}",
                next_step="check that this is the address of node 0 and that the port is free there",
            ) from error

    def _await_store(self, expires: float) -> None:
        """Wait until the store's port answers; a plain socket waits without a word, the store's does not."""
        while True:
            try:
                left = max(0.1, expires - time.monotonic())
                socket.create_connection((self.address, self.port), timeout=left).close()
                return
            except OSError as error:
                if time.monotonic() > expires:
                    raise DeadlineError(
                        f"Rank {self.global_rank} cannot reach {self.address}:{self.port}: {error}",
                        next_step="check that node 0 runs and that this machine can reach its address",
                    ) from error
                time.sleep(0.1)

    def _join(self, store: TCPStore, expires: float) -> Store:
        """Check in: same token, same world size, a rank that is free; then wait for all ranks."""
        from torch.distributed import PrefixStore

        checkin = PrefixStore(f"paceline/{self.attempt}", store)
        token = hashlib.sha256(self.token.encode()).hexdigest()
        if self.global_rank == 0:
            checkin.set("job", f"{token} {self.world_size}")
        else:
            _poll(lambda: checkin.check(["job"]), expires, lambda: "rank 0 did not start the job")
            self._compare(checkin.get("job").decode().split(), token)
        if checkin.add(f"rank/{self.global_rank}", 1) > 1:
            raise CommunicationError(
                f"Rank {self.global_rank} has already joined the job at {self.address}:{self.port}.",
                next_step="give each node its own --node-rank, and start a new job for a node that comes late",
            )
        keys = {rank: f"rank/{rank}" for rank in range(self.world_size)}
        _poll(lambda: checkin.check(list(keys.values())), expires, lambda: _missing(checkin, keys))
        return PrefixStore("group", checkin)

    def _compare(self, job: list[str], token: str) -> None:
        where = f"the job at {self.address}:{self.port}"
        if job[0] != token:
            raise CommunicationError(
                f"Rank {self.global_rank} has another token than {where}: it belongs to another job.",
                next_step="give all nodes of one job the same --token, or choose another --rendezvous port",
            )
        if int(job[1]) != self.world_size:
            raise CommunicationError(
                f"Rank {self.global_rank} expects {self.world_size} processes, {where} has {job[1]}.",
                next_step="give all nodes the same --nodes and the same number of processes",
            )


def _missing(checkin: Store, keys: Mapping[int, str]) -> str:
    ranks = [str(rank) for rank, key in keys.items() if not checkin.check([key])]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} did not join"


def _poll(done: Callable[[], bool], expires: float, what: Callable[[], str]) -> None:
    started = time.monotonic()
    while not done():
        if time.monotonic() > expires:
            raise DeadlineError(
                f"After {time.monotonic() - started:.0f} s {what()}.",
                next_step="look at the logs of those ranks, or raise runtime.deadline_seconds",
            )
        time.sleep(_POLL_SECONDS)


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


def _make_group(store: Store, cluster: Cluster, device_type: str, deadline_seconds: float) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            store=store,
            rank=cluster.global_rank,
            world_size=cluster.world_size,
            timeout=timedelta(seconds=deadline_seconds),
        )
    except RuntimeError as error:
        raise CommunicationError(
            f"Rank {cluster.global_rank} of {cluster.world_size} cannot connect to the other ranks: {error}",
            next_step="check that the nodes reach each other on all ports, or set GLOO_SOCKET_IFNAME",
        ) from error


def _choose_gloo_interface(address: str, port: int) -> None:
    """Bind Gloo to the interface that leads to the store, unless the user chose one.

    Gloo would resolve the host's name, which may be unknown, slow, or 127.0.1.1. On one node the store is
    on the loopback, so nothing is reachable from outside.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = interface_towards(address, port)
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_towards(address: str, port: int) -> str:
    """The name of the interface from which this host reaches an IPv4 address; empty if there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port or 1))
            own = probe.getsockname()[0]
            return next((name for _, name in socket.if_nameindex() if _ipv4(probe, name) == own), "")
    except OSError:
        return ""


def _ipv4(probe: socket.socket, interface: str) -> str:
    import fcntl

    siocgifaddr = 0x8915
    request = interface.encode()[:15].ljust(256, b"\0")
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), siocgifaddr, request)[20:24])
    except OSError:
        return ""  # the interface has no IPv4 address


def _text(values: Mapping[str, str], name: str, default: str | None = None) -> str:
    value: Any = values.get(name, default)
    if value is None:
        raise _environment_error(f"WORLD_SIZE or RANK is set, but {name} is not.")
    return str(value)


def _integer(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = _text(values, name, None if default is None else str(default))
    try:
        return int(text)
    except ValueError as error:
        raise _environment_error(f"{name}={text!r} is not an integer.") from error


def _environment_error(what: str) -> CommunicationError:
    return CommunicationError(
        what,
        where="the environment variables of this process",
        next_step="start the job with paceline or torchrun, or unset RANK and WORLD_SIZE",
    )
