"""The way of a process to the store of its job: inherited, called, or served by itself.

Invariant: every wait ends at its deadline, and a process that does not belong to the job fails alone. torch
is imported only when a store is opened. Process groups are created by `paceline.job.membership`.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.errors import CommunicationError, DeadlineError
from paceline.job.addresses import format_address, listen_at
from paceline.job.handshake import HELLO_SECONDS, VISITOR_OFFSET, connect_authenticated
from paceline.job.store_client import StoreClient
from paceline.job.store_server import StoreServer

if TYPE_CHECKING:
    from paceline.job.torch_store import Store

_RETRY_SECONDS = 0.1
_BACKLOG = 1024


@dataclass(frozen=True)
class StoreAccess:
    """Access of one process to the store.

    Args:
        number: number of this process in the job.
        address, port: address of the store.
        token: the key of the job.
        connection_fd: a connection that this process has inherited; None: it has to connect.
        serves: this process has to serve the store itself.
        agent: torchrun's agent serves torch's own store there.
        tls: whether the connection is encrypted.
        node_rank: of the node that serves the store.
    """

    number: int
    address: str
    port: int
    token: str
    connection_fd: int | None = None
    serves: bool = False
    agent: bool = False
    tls: bool = False
    node_rank: int = 0

    @property
    def job(self) -> str:
        """The job, as errors name it."""
        return f"the job at {format_address(self.address, self.port)}" if self.port else "the job"


def open_store(access: StoreAccess, deadline_seconds: float) -> Store:
    """Connect to the store, or serve it if there is no launcher that does.

    Raises:
        CommunicationError: the port is in use, the key is that of another job, or this rank has joined
        already. DeadlineError: the store could not be reached in time.
    """
    from paceline.job.torch_store import AgentStore, JobStore

    if access.agent:
        return AgentStore(_open_agent_store(access, deadline_seconds))
    if access.connection_fd is not None:
        connection = socket.socket(fileno=os.dup(access.connection_fd))
    elif access.serves:
        connection = _serve_store(access)
    else:
        connection = _connect_with_retry(access, deadline_seconds)
    return JobStore(StoreClient(connection), deadline_seconds, access)


def read_store_value(access: StoreAccess, key: str, deadline_seconds: float) -> str:
    """Read a value from the store without becoming a member; raises the errors of `open_store`."""
    client = connect_store(replace(access, number=access.number + VISITOR_OFFSET), deadline_seconds)
    try:
        return client.wait([key], deadline_seconds)[0].decode()
    finally:
        client.close()


def connect_store(access: StoreAccess, deadline_seconds: float) -> StoreClient:
    """Connect to a store that another process serves, without torch; raises the errors of `open_store`."""
    return StoreClient(_connect_with_retry(access, deadline_seconds))


def _serve_store(access: StoreAccess) -> socket.socket:
    """Serve the store in this process until it ends; if an earlier call does that already, connect to it."""
    try:
        listener = listen_at(access.address, access.port, _BACKLOG)
    except OSError as error:
        with suppress(OSError):
            return _connect_once(access, HELLO_SECONDS)
        raise CommunicationError(
            f"rank {access.number} cannot serve the store of {access.job}: {error.strerror or error}",
            next_step="check that this is an address of node 0 and that the port is free there; another port:"
            " --rendezvous HOST:PORT, or PACELINE_RENDEZVOUS=HOST:PORT on all ranks",
        ) from error
    server = StoreServer()
    server.admit(listener, access.token, tls=access.tls)
    return server.connection_for(access.number)


def _connect_with_retry(access: StoreAccess, seconds: float) -> socket.socket:
    """Connect, and try again until the deadline."""
    expires = time.monotonic() + seconds
    while True:
        remaining = max(0.1, expires - time.monotonic())
        try:
            return _connect_once(access, remaining)
        except OSError as error:
            # also if it hangs up: other callers may have filled its queue
            if time.monotonic() > expires:
                silent = "the port accepts connections but does not respond"
                raise _unreachable_error(
                    access, silent if isinstance(error, TimeoutError) else str(error)
                ) from error
            time.sleep(_RETRY_SECONDS)


def _connect_once(access: StoreAccess, seconds: float) -> socket.socket:
    return connect_authenticated(
        access.address, access.port, access.number, access.token, seconds, access.job, tls=access.tls
    )


def open_torch_store(address: str, port: int, seconds: float, listen_fd: int | None = None) -> Any:
    """Serve PyTorch's own store on a listening socket, or connect to it if there is none."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in its __all__
        address,
        port,
        is_master=listen_fd is not None,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def _open_agent_store(access: StoreAccess, seconds: float) -> Any:
    from torch.distributed import DistError

    try:
        return open_torch_store(access.address, access.port, seconds)
    except DistError as error:
        raise _unreachable_error(access, str(error)) from error


def _unreachable_error(access: StoreAccess, why: str) -> DeadlineError:
    return DeadlineError(
        f"rank {access.number % VISITOR_OFFSET} cannot reach the store of {access.job}: {why}",
        next_step="check that node 0 is running and that this machine can reach its address",
    )
