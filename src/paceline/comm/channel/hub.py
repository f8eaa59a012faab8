"""How a hub and its peers meet: one connection each, after both sides have shown that they know the key."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from paceline.addresses import listen_at, spell
from paceline.errors import CommunicationError, DeadlineError
from paceline.guests import Guests, greet
from paceline.observe.append import say_on_stderr

_BACKLOG = 1024
_RETRY_SECONDS = 0.1


def listen(address: str) -> socket.socket:
    """A listening socket on a free port of the address by which others reach this host."""
    return listen_at(address, 0, _BACKLOG)


def accept_all(
    listener: socket.socket,
    token: str,
    ranks: Sequence[int],
    deadline_seconds: float,
    say: Callable[[str], object] = say_on_stderr,
    *,
    tls: bool = False,
) -> dict[int, socket.socket]:
    """Take one connection of each rank; whoever does not know the key is turned away, and counted.

    Args:
        token: the key of the job; it is never sent.
        say: is told how many were turned away, if there were any.
        tls: whether the connections are encrypted.
    Raises:
        DeadlineError: some did not come in time; names them.
        CommunicationError: somebody is between this rank and another; see `paceline.tls`.
    """
    expires, guests = time.monotonic() + deadline_seconds, Guests(listener, token, ranks, tls=tls)
    with ExitStack() as failing:
        failing.callback(guests.give_up)
        try:
            while missing := [rank for rank in ranks if rank not in guests.found]:
                if time.monotonic() >= expires:
                    raise _late(missing, guests, deadline_seconds)
                guests.hear(expires - time.monotonic())
        finally:
            guests.close()
            if guests.strangers:
                say(f"the server has turned away {guests.strangers} callers that are not of this job")
        if tls:
            _secure(guests.found, token, deadline_seconds)
        failing.pop_all()
    return guests.found


def _secure(found: dict[int, socket.socket], token: str, seconds: float) -> None:
    """Encrypt the connection of every rank."""
    from paceline.tls import Certificate, secure_called

    certificate = Certificate.make()
    for rank, connection in [*found.items()]:
        try:
            found[rank] = secure_called(connection, certificate, token, rank, seconds)
        except OSError as error:
            raise CommunicationError(
                f"the connection to rank {rank} cannot be encrypted: {error}",
                next_step="look at what that rank printed",
            ) from error


def connect(
    address: str, port: int, rank: int, token: str, deadline_seconds: float, *, tls: bool = False
) -> socket.socket:
    """Connect to the hub, and show each other that both know the key.

    A hub that hangs up is called again: a stranger may have crowded it.

    Raises:
        CommunicationError: it cannot be reached, or has another key.
    """
    expires = time.monotonic() + deadline_seconds
    while True:
        try:
            left = max(0.01, expires - time.monotonic())
            return greet(address, port, rank, token, left, f"the server at {spell(address, port)}", tls=tls)
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS < expires and not isinstance(error, ConnectionRefusedError):
                time.sleep(_RETRY_SECONDS)
                continue
            raise CommunicationError(
                f"rank {rank} cannot reach the server at {spell(address, port)}: {error}",
                next_step="check that the nodes reach each other on all ports",
            ) from error


def _late(missing: Sequence[int], guests: Guests, deadline_seconds: float) -> DeadlineError:
    wrong = "".join(f"; rank {rank} has {what}" for rank, what in sorted(guests.unfit.items()))
    return DeadlineError(
        f"ranks {missing} did not connect within {deadline_seconds:g} s{wrong}",
        next_step="look at what these ranks printed",
    )
