"""How a process reaches the store of its job.

Invariant: every wait ends at its deadline, and a process that does not belong fails alone. Torch is imported
only when a store is opened. It makes no process groups: that is `paceline.job.membership`.
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
    """How one process gets to the store.

    Args:
        number: of this process in the job.
        address, port: where the store can be called.
        token: the key of the job.
        connection_fd: a connection that this process was born with; None: it has to call.
        serves: nobody serves the store but this process.
        agent: torchrun's agent serves torch's own store there.
        tls: whether a call is encrypted.
    """

    number: int
    address: str
    port: int
    token: str
    connection_fd: int | None = None
    serves: bool = False
    agent: bool = False
    tls: bool = False

    @property
    def job(self) -> str:
        return f"the job at {format_address(self.address, self.port)}" if self.port else "the job"


def open_store(way: StoreAccess, deadline_seconds: float) -> Store:
    """Reach the store, or serve it for a job that nobody has launched.

    Raises:
        CommunicationError: the port is taken, the key is another job's, or this rank has come already.
        DeadlineError: nobody served the store in time.
    """
    from paceline.job.torch_store import AgentStore, JobStore

    if way.agent:
        return AgentStore(_open_agent_store(way, deadline_seconds))
    if way.connection_fd is not None:
        line = socket.socket(fileno=os.dup(way.connection_fd))
    else:
        line = _serve_store(way) if way.serves else _connect_with_retry(way, deadline_seconds)
    return JobStore(StoreClient(line), deadline_seconds)


def read_store_value(way: StoreAccess, key: str, deadline_seconds: float) -> str:
    """A value, without becoming a member; raises as `open_store` does."""
    visitor = replace(way, number=way.number + VISITOR_OFFSET)
    client = StoreClient(_connect_with_retry(visitor, deadline_seconds))
    try:
        return client.wait([key], deadline_seconds)[0].decode()
    finally:
        client.close()


def _serve_store(way: StoreAccess) -> socket.socket:
    """Serve the store in this process until it ends; where an earlier call does that already, call it."""
    try:
        listener = listen_at(way.address, way.port, _BACKLOG)
    except OSError as error:
        with suppress(OSError):
            return _connect_once(way, HELLO_SECONDS)
        raise CommunicationError(
            f"Rank {way.number} cannot serve the store of {way.job}: {error.strerror or error}",
            next_step="check that this is the address of node 0 and that the port is free there",
        ) from error
    server = StoreServer()
    server.admit(listener, way.token, tls=way.tls)
    return server.connection_for(way.number)


def _connect_with_retry(way: StoreAccess, seconds: float) -> socket.socket:
    """Call until the store answers; one that hangs up is called again: a stranger may have crowded it."""
    expires = time.monotonic() + seconds
    while True:
        left = max(0.1, expires - time.monotonic())
        try:
            return _connect_once(way, left)
        except OSError as error:
            if time.monotonic() > expires:
                silent = "the port accepts connections but does not answer"
                raise _unreachable_error(
                    way, silent if isinstance(error, TimeoutError) else str(error)
                ) from error
            time.sleep(_RETRY_SECONDS)


def _connect_once(way: StoreAccess, seconds: float) -> socket.socket:
    return connect_authenticated(way.address, way.port, way.number, way.token, seconds, way.job, tls=way.tls)


def open_torch_store(address: str, port: int, seconds: float, listen_fd: int | None = None) -> Any:
    """The store that PyTorch brings: served on a listening socket, or reached."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in its __all__
        address,
        port,
        is_master=listen_fd is not None,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def _open_agent_store(way: StoreAccess, seconds: float) -> Any:
    from torch.distributed import DistError

    try:
        return open_torch_store(way.address, way.port, seconds)
    except DistError as error:
        raise _unreachable_error(way, str(error)) from error


def _unreachable_error(way: StoreAccess, why: str) -> DeadlineError:
    return DeadlineError(
        f"Rank {way.number % VISITOR_OFFSET} cannot reach the store of {way.job}: {why}",
        next_step="check that node 0 runs and that this machine can reach its address",
    )
