"""The rendezvous of a job: the store that the launcher of node 0 serves, bound before any worker starts.

On one node the workers inherit connections to it, and nothing else can connect. On several nodes it listens
at the rendezvous address and admits processes that prove that they know the key of the job; the launchers of
the other nodes serve a store as well, in case the first one is lost (`paceline.job.standby_store`).
Invariant: the port is bound during the whole job, so no other process can take it.
"""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from paceline.errors import CommunicationError
from paceline.job.addresses import address_towards, format_address, listen_at, loopback_address
from paceline.job.cluster import LOOPBACK
from paceline.job.engines import refuse_loopback_name
from paceline.job.handshake import needs_encryption
from paceline.job.store_server import StoreServer
from paceline.launch.job_spec import TORCH_PORT, LaunchJob

_BACKLOG = 1024


@dataclass
class StoreEndpoint:
    """The address of the store, and the sockets that the workers of this node inherit.

    Args:
        address, port: address of the store; port 0: it cannot be connected to.
        torch_port: port of torch's own store for a script; 0: it is in the job's store, or there is none.
        server: the store; None: it is on another node, or there is one worker.
        standby, standby_port: the store of this node in case that of node 0 is lost; None, 0: there is none.
        listener: listening socket of `torch_port`, for global rank 0; None: it is on another node.
        connections: connection to the store of each worker of this node.
    """

    address: str = LOOPBACK
    port: int = 0
    torch_port: int = 0
    server: StoreServer | None = None
    standby: StoreServer | None = None
    standby_port: int = 0
    listener: socket.socket | None = None
    connections: list[socket.socket] = field(default_factory=list)

    def hand_over(self) -> None:
        """Close the sockets that the workers have inherited, so that a connection ends with its worker."""
        for connection in (*self.connections, *([] if self.listener is None else [self.listener])):
            connection.close()
        self.connections, self.listener = [], None

    def new_connection(self, global_rank: int) -> socket.socket | None:
        """Return a connection to the store for one more process; None if the store is on another node."""
        return None if self.server is None else self.server.connection_for(global_rank)

    def mark_lost(self, global_rank: int) -> None:
        """Count a worker that has ended as gone."""
        for server in (self.server, self.standby):
            if server is not None:
                server.mark_lost(global_rank)

    def close(self) -> None:
        """Stop serving."""
        self.hand_over()
        for server in (self.server, self.standby):
            if server is not None:
                server.close()
        self.server = self.standby = None


@contextmanager
def serve_store(
    job: LaunchJob, log: Callable[[str], object], *, stands_by: bool = True
) -> Iterator[tuple[StoreEndpoint, str]]:
    """Serve the store during the block; yields the endpoint and the key of the job.

    Args:
        stands_by: whether other nodes than the first one serve a store in case that one is lost.
    """
    token = job.token or (secrets.token_hex(32) if job.nodes == 1 else job.rendezvous)
    endpoint = bind_endpoint(job, token, log, stands_by=stands_by)
    try:
        yield endpoint, token
    finally:
        endpoint.close()


def bind_endpoint(
    job: LaunchJob, token: str, log: Callable[[str], object], *, stands_by: bool = True
) -> StoreEndpoint:
    """Serve the store on node 0 of a job of several workers; on other nodes only return its address.

    Args:
        token: the key of the job.
        log: prints a line for each process that was rejected.
        stands_by: see `serve_store`.
    Raises:
        CommunicationError: the port is in use, or the address is not this machine's.
    """
    if job.world_size == 1:
        return StoreEndpoint()
    host, port = job.endpoint if job.rendezvous else (loopback_address(), 0)
    if job.node_rank > 0 and not stands_by:
        return StoreEndpoint(host, port)
    if job.node_rank > 0:
        standby = StoreServer(log)
        # Only on the address through which the other nodes know this one, as the probe of liveness.
        listener = _listen(address_towards(host, port) or loopback_address(), 0)
        standby_port = int(listener.getsockname()[1])
        standby.admit(listener, token, tls=needs_encryption(job.tls, job.nodes))
        return StoreEndpoint(host, port, standby=standby, standby_port=standby_port)
    if job.nodes > 1:
        _refuse_loopback_name(host)
    store_listener = _listen(host, port) if job.nodes > 1 else None
    torch_listener = _listen(host, 0) if job.runs_script else None
    torch_port = 0 if torch_listener is None else int(torch_listener.getsockname()[1])
    server = StoreServer(log)
    server.put(TORCH_PORT, str(torch_port))
    connections = [server.connection_for(rank) for rank in range(job.num_processes)]
    endpoint = StoreEndpoint(host, port, torch_port, server, listener=torch_listener, connections=connections)
    if store_listener is not None:
        server.admit(store_listener, token, tls=needs_encryption(job.tls, job.nodes))
    return endpoint


def _refuse_loopback_name(host: str) -> None:
    with suppress(OSError, UnicodeError):  # a name that is unknown has an error of its own
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        refuse_loopback_name(host, str(found))


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen_at(host, port, _BACKLOG)
    except OSError as error:
        hints = {
            errno.EADDRINUSE: "choose another port, or end the process that uses it",
            errno.EADDRNOTAVAIL: "node 0 must run on the machine that has this address",
        }
        raise CommunicationError(
            f"node 0 cannot listen on {format_address(host, port)}: {error.strerror or error}",
            where="--rendezvous",
            next_step=hints.get(error.errno or 0, "check the host name and the port"),
        ) from error
