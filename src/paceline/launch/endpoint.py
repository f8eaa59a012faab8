"""The port where a job meets, held from before the first worker starts so that nobody can take it.

Invariant: the socket that is bound here is the socket that global rank 0 serves; the port is never free.
"""

from __future__ import annotations

import errno
import socket

from paceline.cluster import LOOPBACK
from paceline.errors import CommunicationError
from paceline.launch.job import Job

_BACKLOG = 1024


def bind_endpoint(job: Job) -> tuple[str, int, socket.socket | None]:
    """Address and port of the job's store, and the listening socket if it is to be served on this node.

    On one node: a free port of the loopback. On several: the rendezvous, bound on node 0.

    Raises:
        CommunicationError: the port is in use, or the address is not this machine's.
    """
    if job.world_size == 1:
        return LOOPBACK, 0, None
    if job.nodes == 1:
        listener = socket.create_server((LOOPBACK, 0), backlog=_BACKLOG)
        return LOOPBACK, int(listener.getsockname()[1]), listener
    host, port = job.endpoint
    return host, port, _listen(host, port) if job.node_rank == 0 else None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        hints = {
            errno.EADDRINUSE: "choose another port, or end the process that has it",
            errno.EADDRNOTAVAIL: "node 0 must run on the machine that has this address",
        }
        raise CommunicationError(
            f"Node 0 cannot listen on {host}:{port}: {error.strerror or error}.",
            where="--rendezvous",
            next_step=hints.get(error.errno or 0, "check the host name and the port"),
        ) from error
