"""How ranks find each other: one store that rank 0 serves, and a check-in that keeps strangers out.

Invariant: every wait ends at its deadline, and a process that does not belong fails alone: it writes
nothing under the job's keys before its token and world size were found right. Torch is imported only when
a store is opened. It makes no process groups: that is `paceline.cluster`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from paceline.errors import CommunicationError, DeadlineError
from paceline.introduction import Refusals, introduce, is_introduced, tell_refusal
from paceline.roster import address_towards

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_POLL_SECONDS = 0.02
_SIOCGIFADDR = 0x8915  # ioctl of Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class Member:
    """Who wants to join which job: rank, size and token, where the store is, what it tells the others."""

    global_rank: int
    world_size: int
    token: str
    address: str
    port: int
    announcement: str = ""

    @property
    def job(self) -> str:
        return f"the job at {self.address}:{self.port}"


def open_store(member: Member, *, serve: bool, listen_fd: int | None, deadline_seconds: float) -> Store:
    """Serve the job's store, or reach the one that another process serves.

    Args:
        serve: True in the one process that serves it; on `listen_fd` if there is one, else it binds the port.
    Raises:
        CommunicationError: the port is taken or the address is not this machine's.
        DeadlineError: nobody served the store in time.
    """
    import torch.distributed as dist

    def make() -> Store:
        return dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in its __all__
            member.address,
            member.port,
            member.world_size,
            is_master=serve,
            timeout=timedelta(seconds=deadline_seconds),
            wait_for_workers=False,
            master_listen_fd=listen_fd if serve else None,
        )

    try:
        if serve:
            return make()
        expires = time.monotonic() + deadline_seconds
        _await_port(member, expires)
        return _within(expires, make, member)
    except dist.DistError as error:
        verb = "serve" if serve else "reach"
        raise CommunicationError(
            f"Rank {member.global_rank} cannot {verb} the store of {member.job}: {error}",
            next_step="check that this is the address of node 0 and that the port is free there",
        ) from error


def check_in(store: Store, member: Member, attempt: int, deadline_seconds: float) -> Store:
    """Join the job: same token, same world size, a rank that is free; then wait for all ranks.

    Args:
        attempt: keeps the keys of a restarted job apart from those of the attempt before.
    Returns:
        The part of the store that the process group may use.
    Raises:
        CommunicationError: this process belongs to another job, or its rank has already joined.
        DeadlineError: some ranks did not join in time; names them.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    expires = time.monotonic() + deadline_seconds
    job = PrefixStore(f"paceline/{attempt}", store)
    if member.global_rank == 0:
        job.set("job", introduce(member.token, member.world_size))
    else:
        _poll(lambda: job.check(["job"]), expires, lambda: f"rank 0 did not start {member.job}")
        _compare(member, job)
    if job.add(f"rank/{member.global_rank}", 1) > 1:
        raise CommunicationError(
            f"Rank {member.global_rank} has already joined {member.job}.",
            next_step="give each node its own --node-rank; a node that comes late needs a new job",
        )
    if member.announcement:
        job.set(f"node/{member.global_rank}", member.announcement)
    ranks = {rank: f"rank/{rank}" for rank in range(member.world_size)}
    refused = Refusals(job) if member.global_rank == 0 else None
    _poll(lambda: _all_there(job, ranks, refused), expires, lambda: _missing(job, ranks))
    return PrefixStore("group", job)


def announcements(store: Store, member: Member, attempt: int) -> list[str]:
    """What every rank announced when it checked in, by rank; all must announce something.

    Wire: one question to the store for each rank.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    job = PrefixStore(f"paceline/{attempt}", store)
    return [job.get(f"node/{rank}").decode() for rank in range(member.world_size)]


def _compare(member: Member, job: Store) -> None:
    """Leave if this is another job, and tell rank 0, so that both sides know."""
    said = job.get("job").decode()
    world_size = said.rpartition(" ")[2]
    if not is_introduced(said, member.token):
        what = f"Rank {member.global_rank} has another token than {member.job}: it belongs to another job."
        next_step = "give all nodes of one job the same --token-file, or choose another --rendezvous port"
    elif int(world_size) != member.world_size:
        what = (
            f"Rank {member.global_rank} expects {member.world_size} processes, {member.job} has {world_size}."
        )
        next_step = "give all nodes the same --nodes and the same number of processes"
    else:
        return
    tell_refusal(job, what)
    raise CommunicationError(what, next_step=next_step)


def _all_there(job: Store, ranks: Mapping[int, str], refused: Refusals | None) -> bool:
    if refused is not None:
        refused.tell()
    return bool(job.check(list(ranks.values())))


def _missing(job: Store, ranks: Mapping[int, str]) -> str:
    missing = [str(rank) for rank, key in ranks.items() if not job.check([key])]
    return f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} did not join"


def _poll(done: Callable[[], bool], expires: float, what: Callable[[], str]) -> None:
    """Ask until it is done. The store's own wait would write C++ stacks into the log when it fails."""
    while not done():
        if time.monotonic() > expires:
            raise DeadlineError(
                f"At the deadline {what()}.",
                next_step="look at the logs of those ranks, or raise runtime.deadline_seconds",
            )
        time.sleep(_POLL_SECONDS)


def _await_port(member: Member, expires: float) -> None:
    while True:
        try:
            left = max(0.1, expires - time.monotonic())
            socket.create_connection((member.address, member.port), timeout=left).close()
            return
        except OSError as error:
            if time.monotonic() > expires:
                raise _unreachable(member, str(error)) from error
            time.sleep(5 * _POLL_SECONDS)


def _within(expires: float, make: Callable[[], Store], member: Member) -> Store:
    """Run `make` until the deadline: against a port that accepts but never answers it has no time-out."""
    result: list[Store] = []
    errors: list[RuntimeError] = []

    def run() -> None:
        try:
            result.append(make())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="paceline-open-store")
    thread.start()
    thread.join(max(0.1, expires - time.monotonic()))
    if errors:
        raise errors[0]
    if not result:
        raise _unreachable(member, "the port accepts connections but does not answer")
    return result[0]


def _unreachable(member: Member, why: str) -> DeadlineError:
    return DeadlineError(
        f"Rank {member.global_rank} cannot reach the store of {member.job}: {why}",
        next_step="check that node 0 runs and that this machine can reach its address",
    )


def interface_towards(address: str, port: int) -> str:
    """The name of the interface that has the address from which this host reaches `address` (IPv4).

    Returns:
        For example "lo" or "eth0"; empty if there is no route, or the system cannot tell.
    """
    own = address_towards(address, port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = (name for _, name in socket.if_nameindex() if own and _ipv4(probe, name) == own)
        return next(found, "")


def _ipv4(probe: socket.socket, interface: str) -> str:
    import fcntl

    request = interface.encode()[:15].ljust(256, b"\0")
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return ""  # it has no IPv4 address
