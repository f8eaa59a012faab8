"""Channels: messages between two ranks, whenever one of them is ready. No collectives, no pickle.

One rank is the hub; it hears all others, and they hear it. Frames are a length, a JSON header and raw tensor
bytes over TCP. Invariant: the messages of one sender arrive whole and in order; a peer that is gone is
an error with its rank; every wait has a deadline.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.channel.frame_header import MOST_HEADER_BYTES, parse_header
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError, DeadlineError

FRAME_LENGTHS = struct.Struct("!QQ")  # bytes of the header, bytes of all tensors
_CHUNK_BYTES = 1 << 20
_BELIEVED_BYTES = 1 << 24  # of a length that somebody says


@dataclass(frozen=True)
class Message:
    """What one rank says to another.

    Args:
        kind: a word.
        fields: JSON values.
        tensors: of any dtype and shape; on the host when received.
        sender: the rank that sent it; filled in on arrival.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    sender: int = -1

    def encode(self) -> tuple[bytes, list[memoryview]]:
        """Lengths and header, and the bytes of every tensor."""
        bodies = [_bytes_of(t) for t in self.tensors]
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in self.tensors]
        header = json.dumps([self.kind, dict(self.fields), shapes]).encode()
        return FRAME_LENGTHS.pack(len(header), sum(len(b) for b in bodies)) + header, bodies

    @classmethod
    def decode(cls, header: bytes, body: bytearray, sender: int) -> Message:
        """The inverse of `encode`.

        Raises:
            ValueError: it is not what `encode` makes.
        """
        kind, fields, described = parse_header(header)
        if sum(prod(shape) * dtype.itemsize for dtype, shape in described) != len(body):
            raise ValueError("the tensors are not those of the header")
        tensors, start = [], 0
        for dtype, shape in described:
            size = prod(shape) * dtype.itemsize
            raw = (
                torch.frombuffer(body, dtype=torch.uint8, count=size, offset=start).clone() if size else None
            )
            tensors.append(torch.empty(shape, dtype=dtype) if raw is None else raw.view(dtype).view(shape))
            start += size
        return cls(kind, fields, tensors, sender)


class Channel(Protocol):
    """Point-to-point messages."""

    def send(self, to: int, message: Message, deadline_seconds: float) -> None:
        """Hand a message over to the wire; it may be read much later."""

    def receive(self, deadline_seconds: float) -> Message:
        """The next message of any sender."""

    def close(self) -> None:
        """Leave; the other end sees that this rank is gone."""


class SocketChannel:
    """A channel over connected TCP sockets, one for each peer.

    Args:
        peers: connected sockets by rank.
        ledger: counts what is sent, as `send` over group `channel`.
    Wire: 16 bytes, the header and the tensors, in one direction.
    """

    def __init__(self, peers: Mapping[int, socket.socket], ledger: ByteLedger) -> None:
        self._peers = {rank: _Peer(rank, s) for rank, s in peers.items()}
        self._ledger = ledger
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.socket.setblocking(False)
            peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self._arrived: list[Message] = []

    def send(self, to: int, message: Message, deadline_seconds: float) -> None:
        """See `Channel`.

        Raises:
            CommunicationError: the peer is gone.
            DeadlineError: it does not read.
        """
        head, bodies = message.encode()
        expires = time.monotonic() + deadline_seconds
        for part in (memoryview(head), *bodies):
            self._peers[to].write(part, expires)
        self._ledger.launched("send", "channel", len(head) + sum(len(b) for b in bodies), 2)

    def receive(self, deadline_seconds: float) -> Message:
        """See `Channel`.

        Raises:
            CommunicationError: a peer is gone; names its rank.
            DeadlineError: nobody said anything in time.
        """
        expires = time.monotonic() + deadline_seconds
        while not self._arrived:
            left = expires - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"no message arrived within {deadline_seconds:g} s from ranks {sorted(self._peers)}",
                    next_step="look for the rank that is stuck, or raise runtime.deadline_seconds",
                )
            for key, _ in self._selector.select(left):
                self._arrived += key.data.read()
        return self._arrived.pop(0)

    def close(self) -> None:
        """See `Channel`."""
        self._selector.close()
        for peer in self._peers.values():
            peer.socket.close()


class _Peer:
    """One socket, and the frame that is arriving on it."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self._head = bytearray()
        self._body: bytearray | None = None
        self._filled = 0

    def write(self, data: memoryview, expires: float) -> None:
        while data:
            try:
                data = data[self.socket.send(data) :]
            except BlockingIOError:
                with selectors.DefaultSelector() as ready:
                    ready.register(self.socket, selectors.EVENT_WRITE)
                    if not ready.select(max(0.0, expires - time.monotonic())):
                        raise DeadlineError(
                            f"rank {self.rank} does not read what it is sent",
                            next_step="look at what that rank does, or raise runtime.deadline_seconds",
                        ) from None
            except OSError as error:
                raise self._gone(error) from error

    def read(self) -> list[Message]:
        """Take what is there; the message, if it is complete."""
        try:
            return self._read()
        except BlockingIOError:
            return []
        except OSError as error:
            raise self._gone(error) from error

    def _read(self) -> list[Message]:
        if self._body is None:
            wanted = self._wanted_head()
            self._head += self._some(self.socket.recv(wanted - len(self._head)))
            if len(self._head) < FRAME_LENGTHS.size or len(self._head) < self._wanted_head():
                return []
            self._body, self._filled = bytearray(), 0
        wanted = int(FRAME_LENGTHS.unpack_from(self._head)[1])
        if self._filled < wanted:
            self._fill(self._body, wanted)
        if self._filled < wanted:
            return []
        try:
            message = Message.decode(bytes(self._head[FRAME_LENGTHS.size :]), self._body, self.rank)
        except ValueError as error:
            raise self._broken(str(error)) from error
        self._head, self._body = bytearray(), None
        return [message]

    def _fill(self, body: bytearray, wanted: int) -> None:
        """Receive a part. A length is believed as far as as much has arrived, and for the first megabytes."""
        if self._filled == len(body):
            body.extend(bytes(min(wanted - len(body), max(_BELIEVED_BYTES, len(body)))))
        with memoryview(body) as whole:
            count = self.socket.recv_into(whole[self._filled : self._filled + _CHUNK_BYTES])
        self._filled += count
        if not count:
            raise self._gone(None)

    def _wanted_head(self) -> int:
        if len(self._head) < FRAME_LENGTHS.size:
            return FRAME_LENGTHS.size
        length = int(FRAME_LENGTHS.unpack_from(self._head)[0])
        if length > MOST_HEADER_BYTES:
            raise self._broken(f"a header of {length} bytes")
        return FRAME_LENGTHS.size + length

    def _broken(self, what: str) -> CommunicationError:
        return CommunicationError(
            f"rank {self.rank} sent what is no message: {what}",
            next_step="run the same version of Paceline on every node; else look at the network",
        )

    def _some(self, data: bytes) -> bytes:
        if not data:
            raise self._gone(None)
        return data

    def _gone(self, error: OSError | None) -> CommunicationError:
        why = f": {error}" if error is not None else ""
        return CommunicationError(
            f"rank {self.rank} is gone{why}",
            next_step="look at the first rank that ended: it is the cause",
        )


def _bytes_of(x: Tensor) -> memoryview:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data.cast("B") if flat.numel() else memoryview(b"")
