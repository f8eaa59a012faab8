"""Where a job meets: the store that the launcher of node 0 serves, bound before the first worker starts.

On one node workers are born with a connection to it, and nobody else can call. On several it listens at the
rendezvous, and takes in those that show that they know the key. Invariant: the port is never free.
"""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.errors import CommunicationError
from paceline.job.addresses import format_address, listen_at, loopback_address
from paceline.job.cluster import LOOPBACK
from paceline.job.handshake import needs_encryption
from paceline.job.store_server import StoreServer
from paceline.launch.job_spec import TORCH_PORT, LaunchJob

_BACKLOG = 1024


@dataclass
class StoreEndpoint:
    """What workers of this node need to meet the others.

    Args:
        address, port: where the store can be called; port 0: nowhere.
        torch_port: where a script finds torch's own store; 0: the store knows it, or there is none.
        server: the store; None: it is on another node, or there is one worker.
        listener: of `torch_port`, for global rank 0; None: there is none here.
        lines: for each worker of this node, its connection to the store.
    """

    address: str = LOOPBACK
    port: int = 0
    torch_port: int = 0
    server: StoreServer | None = None
    listener: socket.socket | None = None
    lines: list[socket.socket] = field(default_factory=list)

    def hand_over(self) -> None:
        """The workers have what is theirs: when one is gone, its connections must end."""
        for one in (*self.lines, *([] if self.listener is None else [self.listener])):
            one.close()
        self.lines, self.listener = [], None

    def lose(self, global_rank: int) -> None:
        """A worker has ended."""
        if self.server is not None:
            self.server.lose(global_rank)

    def close(self) -> None:
        """Serve no more."""
        self.hand_over()
        if self.server is not None:
            self.server.close()
            self.server = None


@contextmanager
def serve_store(job: LaunchJob, say: Callable[[str], object]) -> Iterator[tuple[StoreEndpoint, str]]:
    """Where the job meets, and its key."""
    token = job.token or (secrets.token_hex(32) if job.nodes == 1 else job.rendezvous)
    endpoint = bind_endpoint(job, token, say)
    try:
        yield endpoint, token
    finally:
        endpoint.close()


def bind_endpoint(job: LaunchJob, token: str, say: Callable[[str], object]) -> StoreEndpoint:
    """Serve the store on node 0 of a job of several workers, and know where it is on the others.

    Args:
        token: the key of the job.
        say: is told of callers that were turned away.
    Raises:
        CommunicationError: the port is in use, or the address is not this machine's.
    """
    if job.world_size == 1:
        return StoreEndpoint()
    host, port = job.endpoint if job.rendezvous else (loopback_address(), 0)
    if job.node_rank > 0:
        return StoreEndpoint(host, port)
    door = _listen(host, port) if job.nodes > 1 else None
    listener = _listen(host, 0) if job.runs_script else None
    found = StoreEndpoint(host, port, 0 if listener is None else int(listener.getsockname()[1]))
    found.listener, found.server = listener, StoreServer(say)
    found.server.put(TORCH_PORT, str(found.torch_port))
    found.lines = [found.server.connection_for(rank) for rank in range(job.num_processes)]
    if door is not None:
        found.server.admit(door, token, tls=needs_encryption(job.tls, job.nodes))
    return found


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen_at(host, port, _BACKLOG)
    except OSError as error:
        hints = {
            errno.EADDRINUSE: "choose another port, or end the process that has it",
            errno.EADDRNOTAVAIL: "node 0 must run on the machine that has this address",
        }
        raise CommunicationError(
            f"Node 0 cannot listen on {format_address(host, port)}: {error.strerror or error}.",
            where="--rendezvous",
            next_step=hints.get(error.errno or 0, "check the host name and the port"),
        ) from error
