"""The store that replaces the one of a job when the launcher that served it is gone.

On a job of several nodes every launcher serves a store, and the members use that of node 0. When its launcher
is gone, the members of the other nodes meet in the store of the lowest of these nodes, and form their next
membership there. A new store is empty: nothing that the old one held is needed for that.

Invariants: members only change to another store if the old address refuses connections, so its host responds
and the launcher is gone. Behind a partition nobody changes, since the other side may still use the old store;
a firewall must drop what it blocks for that, and not refuse it in the name of the host.
Of members that were in different epochs when the store was lost, only those of one epoch continue. Nobody
continues if the launcher has ended because of an error or a stop, which it announces to the other launchers.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from paceline.errors import CommunicationError, PacelineError
from paceline.job.handshake import VISITOR_OFFSET
from paceline.job.launcher_reports import LauncherAddress, decode_launcher_address
from paceline.job.membership import JobMembership
from paceline.job.rendezvous import StoreAccess, connect_store, open_store
from paceline.job.store_protocol import COMPARE

_PROBE_SECONDS = 2.0
_RETRY_SECONDS = 0.02
_ANNOUNCE_SECONDS = 1.0
_EPOCH_KEY = "continued-from"
_HAS_ENDED = "the job has ended"


def move_to_standby_store(
    membership: JobMembership, lost: CommunicationError
) -> tuple[JobMembership, frozenset[int]]:
    """Return the membership with the store of another node, and its members that are lost with the old one.

    Args:
        lost: the error of the old store, which is raised again if there is no other store, or if the process
            that serves the old one may still be there.
    Raises:
        CommunicationError: members of another epoch have continued already.
    """
    access = membership.store.access
    if access is None or not is_gone(access):
        raise lost
    addresses = [decode_launcher_address(note) for note in membership.notes]
    node = choose_standby_node(addresses, access.node_rank)
    if node is None:
        raise lost
    moved = replace(
        access,
        address=node.address,
        port=node.store_port,
        node_rank=node.rank,
        connection_fd=None,
        serves=False,
    )
    store = open_store(moved, membership.groups.seconds)
    continued_from = store.compare_set(_EPOCH_KEY, "", membership.prefix).decode()
    if continued_from != membership.prefix:
        store.close()
    if continued_from == _HAS_ENDED:
        raise lost
    if continued_from != membership.prefix:
        raise CommunicationError(
            "the store of the job was lost while its members changed, and other ranks have continued",
            next_step="--resume RUN continues from the newest checkpoint",
        ) from lost
    gone = [
        number
        for number, address in zip(membership.members, addresses, strict=True)
        if address is not None and address.rank == access.node_rank
    ]
    membership.store.close()
    return replace(membership, store=store), frozenset(gone)


def choose_standby_node(
    addresses: Sequence[LauncherAddress | None], lost_node: int
) -> LauncherAddress | None:
    """Return the lowest node but the lost one whose launcher serves a store; None: there is none; pure.

    Args:
        addresses: of the launchers of all members, by rank; None: it is not known.
    """
    others = [one for one in addresses if one is not None and one.rank != lost_node and one.store_port]
    return min(others, key=lambda one: one.rank, default=None)


def is_gone(access: StoreAccess) -> bool:
    """Return whether nothing serves a store any more, although its host responds; can take two seconds."""
    expires = time.monotonic() + _PROBE_SECONDS
    while True:
        try:
            socket.create_connection((access.address, access.port), timeout=_PROBE_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False  # a host that is down, or a partition: the other side may still use the store
        if time.monotonic() > expires:
            return False
        # A launcher that ends closes the connections of the members first.
        time.sleep(_RETRY_SECONDS)


def announce_end(nodes: Sequence[LauncherAddress], token: str, *, tls: bool) -> None:
    """Tell the launchers of other nodes that the job has ended with its store, so that no rank continues.

    Args:
        nodes: whose launchers serve a store; one that does not respond within a second is left out.
    """

    def tell(node: LauncherAddress) -> None:
        access = StoreAccess(VISITOR_OFFSET, node.address, node.store_port, token, tls=tls)
        with suppress(PacelineError, OSError):
            client = connect_store(access, _ANNOUNCE_SECONDS)
            client.request(COMPARE, _EPOCH_KEY.encode(), b"", _HAS_ENDED.encode())
            client.close()

    others = [node for node in nodes if node.store_port]
    if others:
        with ThreadPoolExecutor(min(64, len(others))) as pool:
            list(pool.map(tell, others))
