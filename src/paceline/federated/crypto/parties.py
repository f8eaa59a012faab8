"""Parties of a protocol: processes that exchange messages over sockets, each with secrets of its own.

Every pair of parties has a connection, made after both have proved that they know the key of the protocol.
Invariant: what a party receives from another arrives in the order in which it was sent, and is of the kind
that the protocol has at this point; every wait has a deadline. The parties are honest but curious: they
follow the protocol, and look at whatever they receive. Connections are not encrypted, so they stay on this
machine.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from paceline.comm.channel.message_channel import ChannelMessage, MessageChannel
from paceline.comm.channel.socket_channel import (
    SocketChannel,
    accept_ranks,
    connect_to_hub,
    listen_on_free_port,
)
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError, DeadlineError, PacelineError
from paceline.job.addresses import loopback_address

_SETTLE_SECONDS = 2.0
_EXIT_SECONDS = 10.0


class Party:
    """One party of a protocol.

    Args:
        rank: its number.
        num_parties: all of them.
        channel: connected with every other party.
        ledger: counts what this party sends.
        deadline_seconds: of every wait for a message.
    """

    def __init__(
        self,
        rank: int,
        num_parties: int,
        channel: MessageChannel,
        ledger: ByteLedger,
        deadline_seconds: float,
    ) -> None:
        self.rank, self.num_parties = rank, num_parties
        self._channel, self._ledger, self._seconds = channel, ledger, deadline_seconds
        self._arrived: dict[int, deque[ChannelMessage]] = {r: deque() for r in range(num_parties)}
        self._lost: dict[int, CommunicationError] = {}

    @property
    def sent_bytes(self) -> int:
        """Bytes that this party has sent, with their headers."""
        return int(self._ledger.sent_bytes)

    @property
    def others(self) -> list[int]:
        """Ranks of all other parties."""
        return [rank for rank in range(self.num_parties) if rank != self.rank]

    def send(self, to: int, kind: str, tensors: Sequence[Tensor] = (), **fields: Any) -> None:
        """Queue a message; its fields are JSON values."""
        self._channel.send(to, ChannelMessage(kind, fields, list(tensors)), self._seconds)

    def receive(self, sender: int, kind: str = "") -> ChannelMessage:
        """Wait for the next message of a party.

        Args:
            kind: what it must be; empty: anything.
        Raises:
            CommunicationError: the party is gone, or sent a message of another kind.
            DeadlineError: nothing arrived in time.
        """
        expires = time.monotonic() + self._seconds
        while not self._arrived[sender]:
            if sender in self._lost:
                raise self._lost[sender]
            try:
                message = self._channel.receive(max(0.0, expires - time.monotonic()))
            except CommunicationError as error:
                # Another party that is done may leave: that matters only to whoever waits for it.
                if error.peer is None:
                    raise
                self._lost[error.peer] = error
            else:
                self._arrived[message.sender].append(message)
        message = self._arrived[sender].popleft()
        if kind and message.kind != kind:
            raise CommunicationError(
                f"party {sender} sent '{message.kind}' where the protocol has '{kind}'",
                next_step="let all parties run the same steps of the same protocol",
            )
        return message

    def send_integers(self, to: int, kind: str, values: Sequence[int], num_bytes: int) -> None:
        """Send non-negative integers below 256 ** num_bytes, each in so many bytes."""
        body = bytearray(b"".join(value.to_bytes(num_bytes, "little") for value in values))
        flat = torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
        self.send(to, kind, [flat.view(len(values), num_bytes)])

    def receive_integers(self, sender: int, kind: str) -> list[int]:
        """Receive what `send_integers` has sent.

        Raises:
            CommunicationError: it is no table of bytes.
        """
        tensors = self.receive(sender, kind).tensors
        if len(tensors) != 1 or tensors[0].dtype is not torch.uint8 or tensors[0].ndim != 2:
            raise CommunicationError(
                f"party {sender} sent no table of integers in '{kind}'",
                next_step="let all parties run the same version",
            )
        return [int.from_bytes(row.tobytes(), "little") for row in tensors[0].numpy()]

    def close(self) -> None:
        """Send what is queued to the parties that are left, and close all connections."""
        expires, is_sent = time.monotonic() + self._seconds, False
        while not is_sent and time.monotonic() < expires:
            # It raises once for each party that has left.
            with suppress(CommunicationError):
                self._channel.flush(expires - time.monotonic())
                is_sent = True
        self._channel.close()


def connect_parties(
    rank: int,
    num_parties: int,
    token: str,
    exchange_ports: Callable[[int], Sequence[int]],
    deadline_seconds: float,
) -> Party:
    """Connect every pair of parties over the loopback; all of them call this.

    Args:
        token: the key of the protocol, equal on all; it is not sent.
        exchange_ports: is given this party's port, and returns those of all parties by rank.
        deadline_seconds: for connecting, and of every later wait.
    Raises:
        CommunicationError: a party cannot be reached, or has another key.
        DeadlineError: some parties did not connect in time.
    """
    address, ledger = loopback_address(), ByteLedger()
    peers: dict[int, socket.socket] = {}
    with listen_on_free_port(address) as listener:
        ports = exchange_ports(listener.getsockname()[1])
        for earlier in range(rank):
            peers[earlier] = connect_to_hub(address, ports[earlier], rank, token, deadline_seconds)
        if later := range(rank + 1, num_parties):
            peers |= accept_ranks(listener, token, later, deadline_seconds)
    return Party(rank, num_parties, SocketChannel(peers, ledger), ledger, deadline_seconds)


def run_parties(
    function: Callable[..., Any], arguments: Sequence[Sequence[Any]], deadline_seconds: float = 600.0
) -> list[Any]:
    """Run `function(party, *arguments[rank])` in one process for each party, and return the results by rank.

    A party gets its own arguments and no others. A script that calls this needs `if __name__ == "__main__"`.

    Args:
        function: any callable; it is sent by value, like its arguments and its result.
        deadline_seconds: for everything; parties that are not done are killed.
    Raises:
        PacelineError: the error of the party that failed first.
        DeadlineError: they were not done in time.
    """
    with _party_processes(function, arguments, deadline_seconds) as pipes:
        expires = time.monotonic() + deadline_seconds
        ports = _collect(pipes, expires)
        for pipe in pipes:
            pipe.send(ports)
        return _collect(pipes, expires)


@contextmanager
def _party_processes(
    function: Callable[..., Any], arguments: Sequence[Sequence[Any]], seconds: float
) -> Iterator[list[Connection]]:
    """Start the processes and yield a pipe to each; none is left at the end of the block."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    token, pipes = secrets.token_hex(16), []
    processes: list[ForkServerProcess] = []
    try:
        for rank, own in enumerate(arguments):
            pipe, far_end = context.Pipe()
            pipes.append(pipe)
            place = (rank, len(arguments), token, seconds)
            call = cloudpickle.dumps((function, tuple(own)))
            process = context.Process(target=_run_party, args=(call, place, far_end), daemon=True)
            process.start()
            processes.append(process)
            far_end.close()
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()  # a party whose pipe is closed ends
        for process in processes:
            process.join(_EXIT_SECONDS)
            process.kill()
            process.join(_EXIT_SECONDS)
            process.close()


def _collect(pipes: Sequence[Connection], expires: float) -> list[Any]:
    """Receive one value from each party; after a failure the others have two seconds to name the cause."""
    values: dict[int, Any] = {}
    failures: list[PacelineError] = []
    while waiting := [pipe for rank, pipe in enumerate(pipes) if rank not in values]:
        ready = wait(waiting, max(0.0, expires - time.monotonic()))
        if not ready and not failures:
            late = [rank for rank in range(len(pipes)) if rank not in values]
            raise DeadlineError(f"parties {late} were not done in time", next_step="raise deadline_seconds")
        for rank, pipe in enumerate(pipes):
            if pipe not in ready:
                continue
            try:
                values[rank], error = cloudpickle.loads(pipe.recv_bytes())
            except EOFError:
                values[rank], error = None, CommunicationError(f"party {rank} ended without a result")
            if error is not None:
                failures.append(error)
                expires = min(expires, time.monotonic() + _SETTLE_SECONDS)
        if not ready:
            break
    if failures:
        # A party whose peer has failed loses its connection: that is not the cause.
        raise next((e for e in failures if not isinstance(e, CommunicationError)), failures[0])
    return [values[rank] for rank in range(len(pipes))]


def _run_party(call: bytes, place: tuple[int, int, str, float], pipe: Connection) -> None:
    """Connect one party, run its function, and send the result or the error to the process that waits."""
    rank, num_parties, token, seconds = place
    torch.set_num_threads(1)

    def send(value: object, error: PacelineError | None = None) -> None:
        # Plain bytes: tensors in a pipe of PyTorch would be files that end with this process.
        pipe.send_bytes(cloudpickle.dumps((value, error)))

    def report(kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, PacelineError):
            send(None, error)
        elif error is not None:
            text = "".join(traceback.format_exception(error))
            send(None, PacelineError(f"party {rank} failed: {error!r}\n{text}"))
        return True

    def exchange_ports(port: int) -> Sequence[int]:
        send(port)
        ports: Sequence[int] = pipe.recv()
        threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
        return ports

    with ExitStack() as stack:
        stack.push(report)
        party = connect_parties(rank, num_parties, token, exchange_ports, seconds)
        function, own = cloudpickle.loads(call)
        result = function(party, *own)
        party.close()
        send(result)


def _end_with_parent(pipe: Connection) -> None:
    """End this process when the one that started it is gone or has closed the pipe."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)
