"""How a hub and its peers meet: one connection each, and a token against strangers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence

from paceline.comm.channel.channel import FRAME_LENGTHS
from paceline.errors import CommunicationError, DeadlineError


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of the address by which others reach this host."""
    return socket.create_server((address, 0))


def accept_all(
    listener: socket.socket, token: str, ranks: Sequence[int], deadline_seconds: float
) -> dict[int, socket.socket]:
    """Take one connection of each rank; a stranger without the token is turned away.

    Raises:
        DeadlineError: some did not come in time; names them.
    """
    expires, found = time.monotonic() + deadline_seconds, dict[int, socket.socket]()
    while set(ranks) - found.keys():
        listener.settimeout(max(0.01, expires - time.monotonic()))
        try:
            connection, _ = listener.accept()
            connection.settimeout(max(0.01, expires - time.monotonic()))
            rank, said = _read_hello(connection)
        except (OSError, ValueError) as error:
            if time.monotonic() < expires:
                continue
            missing = sorted(set(ranks) - found.keys())
            raise DeadlineError(
                f"ranks {missing} did not connect within {deadline_seconds:g} s",
                next_step="look at what these ranks printed",
            ) from error
        if said == token and rank in ranks and rank not in found:
            found[rank] = connection
        else:
            connection.close()
    return found


def connect(address: str, port: int, rank: int, token: str, deadline_seconds: float) -> socket.socket:
    """Connect to the hub and say who this is.

    Raises:
        CommunicationError: it cannot be reached.
    """
    try:
        connection = socket.create_connection((address, port), timeout=deadline_seconds)
        hello = json.dumps([rank, token]).encode()
        connection.sendall(FRAME_LENGTHS.pack(len(hello), 0) + hello)
    except OSError as error:
        raise CommunicationError(
            f"rank {rank} cannot reach the server at {address}:{port}: {error}",
            next_step="check that the nodes reach each other on all ports",
        ) from error
    return connection


def _read_hello(connection: socket.socket) -> tuple[int, str]:
    size, _ = FRAME_LENGTHS.unpack(_exactly(connection, FRAME_LENGTHS.size))
    rank, token = json.loads(_exactly(connection, min(size, 4096)))
    return int(rank), str(token)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ValueError("closed")
        data += part
    return data
