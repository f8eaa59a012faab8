"""How the ranks of one host find each other, and whether they are on one host at all.

A host is what shares a running kernel and its network: two containers with networks of their own are two
hosts, and so are two hosts of the lab. Addresses are of the abstract kind: they end with their sockets.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.comm.net import Net
from paceline.comm.routes.host_links import HostLinks
from paceline.comm.text import gather_texts
from paceline.errors import CommunicationError, DeadlineError
from paceline.mesh import Group

_HELLO = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")  # process, user and group of the other end


def meet_on_host(group: Group, net: Net) -> HostLinks | None:
    """Connect this rank with every other of its group; None if they are not all on one host.

    Collective, and None on one rank is None on every rank.

    Raises:
        DeadlineError: a rank did not come within the deadline of the net.
        CommunicationError: a rank cannot be reached.
    Wire: one ragged all_gather of about a hundred bytes a rank.
    """
    host = this_host()
    listener = _listen(group.size) if host else None
    try:
        address = listener.getsockname().hex() if listener else ""
        said = [json.loads(text) for text in gather_texts(json.dumps([host, address]), group, net)]
        if listener is None or any(there != host for there, _ in said):
            return None
        expires = time.monotonic() + net.deadline_seconds
        return HostLinks(_meet(listener, [address for _, address in said], group, expires), group, net)
    finally:
        if listener is not None:
            listener.close()


def this_host() -> str:
    """Equal in processes that can share memory by sockets; empty where the system has not what that takes."""
    kernel, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    if sys.platform != "linux" or not (kernel.exists() and network.exists()):
        return ""
    return f"{kernel.read_text().strip()} {network.stat().st_ino}"


def _listen(backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")  # the kernel makes up an abstract address
    listener.listen(backlog)
    return listener


def _meet(
    listener: socket.socket, addresses: Sequence[str], group: Group, expires: float
) -> dict[int, socket.socket]:
    """Call those before this rank, wait for the call of those after it."""
    found: dict[int, socket.socket] = {}
    try:
        for place in range(group.rank):
            found[group.ranks[place]] = _call(bytes.fromhex(addresses[place]), group.rank, expires)
        while len(found) < group.size - 1:
            listener.settimeout(max(0.01, expires - time.monotonic()))
            caller, _ = listener.accept()
            place = _hello(caller, expires)
            if group.rank < place < group.size and group.ranks[place] not in found:
                found[group.ranks[place]] = caller
            else:
                caller.close()
    except OSError as error:
        late = isinstance(error, TimeoutError)
        missing = sorted(set(group.ranks) - found.keys() - {group.ranks[group.rank]})
        raise (DeadlineError if late else CommunicationError)(
            f"ranks {missing} cannot be reached on this host: {error}",
            where=f"rank {group.ranks[group.rank]}, shared memory of group '{group.name}' {group.ranks}",
            next_step="look at what these ranks printed, or choose route=native",
        ) from error
    return found


def _call(address: bytes, place: int, expires: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(max(0.01, expires - time.monotonic()))
    connection.connect(address)
    connection.send(_HELLO.pack(place))
    return connection


def _hello(caller: socket.socket, expires: float) -> int:
    """The place in the group of who calls; -1 for a process of another user, or that says something else."""
    raw = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(raw)[1] != os.getuid():
        return -1
    caller.settimeout(max(0.01, expires - time.monotonic()))
    said = caller.recv(_HELLO.size + 1)
    return int(_HELLO.unpack(said)[0]) if len(said) == _HELLO.size else -1
