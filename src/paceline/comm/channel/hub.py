"""How a hub and its peers meet: one connection each, after both sides have shown that they know the key."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from paceline.comm.channel.guests import CALLED, CALLER, Guests
from paceline.errors import CommunicationError, DeadlineError
from paceline.handshake import (
    CHALLENGE_BYTES,
    NONCE_BYTES,
    WELCOME,
    encode_hello,
    is_proof,
    nonce,
    prove,
)
from paceline.observe.append import say_on_stderr

_BACKLOG = 1024
_RETRY_SECONDS = 0.1


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of the address by which others reach this host."""
    return socket.create_server((address, 0), backlog=_BACKLOG)


def accept_all(
    listener: socket.socket,
    token: str,
    ranks: Sequence[int],
    deadline_seconds: float,
    say: Callable[[str], object] = say_on_stderr,
) -> dict[int, socket.socket]:
    """Take one connection of each rank; whoever does not know the key is turned away, and counted.

    Args:
        token: the key of the job; it is never sent.
        say: is told how many were turned away, if there were any.
    Raises:
        DeadlineError: some did not come in time; names them.
    """
    expires = time.monotonic() + deadline_seconds
    guests = Guests(listener, token, ranks)
    with ExitStack() as failing:
        failing.callback(guests.give_up)
        try:
            while guests.missing:
                left = expires - time.monotonic()
                if left <= 0:
                    raise _late(guests, deadline_seconds)
                guests.hear(left)
        finally:
            guests.close()
            if guests.strangers:
                say(f"the server has turned away {guests.strangers} callers that are not of this job")
        failing.pop_all()
    return guests.found


def connect(address: str, port: int, rank: int, token: str, deadline_seconds: float) -> socket.socket:
    """Connect to the hub, and show each other that both know the key.

    A hub that hangs up is called again: a stranger may have crowded it.

    Raises:
        CommunicationError: it cannot be reached, or has another key.
    """
    expires = time.monotonic() + deadline_seconds
    while True:
        try:
            return _greet(address, port, rank, token, max(0.01, expires - time.monotonic()))
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS < expires and not isinstance(error, ConnectionRefusedError):
                time.sleep(_RETRY_SECONDS)
                continue
            raise CommunicationError(
                f"rank {rank} cannot reach the server at {address}:{port}: {error}",
                next_step="check that the nodes reach each other on all ports",
            ) from error


def _greet(address: str, port: int, rank: int, token: str, seconds: float) -> socket.socket:
    with ExitStack() as failing:
        connection = failing.enter_context(socket.create_connection((address, port), timeout=seconds))
        ours = nonce()
        connection.sendall(encode_hello(rank, ours))
        challenge = _exactly(connection, CHALLENGE_BYTES)
        theirs, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        if not is_proof(proof, token, CALLED, rank, ours, theirs):
            raise _other_key(rank, f"the server at {address}:{port}")
        connection.sendall(prove(token, CALLER, rank, ours, theirs))
        if _exactly(connection, 1) != WELCOME:
            raise CommunicationError(
                f"the server at {address}:{port} does not take rank {rank}: it has come already",
                next_step="give each node its own --node-rank",
            )
        failing.pop_all()
    return connection


def _late(guests: Guests, deadline_seconds: float) -> DeadlineError:
    wrong = f"; ranks {sorted(guests.wrong_keys)} have another key" if guests.wrong_keys else ""
    return DeadlineError(
        f"ranks {guests.missing} did not connect within {deadline_seconds:g} s{wrong}",
        next_step="look at what these ranks printed",
    )


def _other_key(rank: int, whom: str) -> CommunicationError:
    return CommunicationError(
        f"rank {rank} has another key than {whom}: they are of different jobs",
        next_step="give all nodes of one job the same key: --token-file, or PACELINE_TOKEN",
    )


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        data += part
    return data
