"""Channels: messages between two ranks, whenever one of them is ready. No collectives, no pickle.

One rank is the hub; it hears all others, and they hear it. Frames are a length, a JSON header and raw tensor
bytes over TCP. Invariant: the messages of one sender arrive whole and in order, and after them, if it is
lost, an error with its rank; no peer holds up another; every wait has a deadline.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.channel.frame_header import MOST_HEADER_BYTES, parse_header
from paceline.comm.channel.lost import gone, no_message
from paceline.comm.channel.outbox import Outbox
from paceline.errors import CommunicationError
from paceline.tls import SecureLine

FRAME_LENGTHS = struct.Struct("!QQ")  # bytes of the header, bytes of all tensors
MOST_BYTES = 1 << 44
"""Of the tensors of a message; nobody has so much memory."""

_CHUNK_BYTES = 1 << 20
_SMALL = 8  # a tensor of less than one part in so many of its frame does not keep the frame in memory


@dataclass(frozen=True)
class Message:
    """What one rank says to another.

    Args:
        kind: a word.
        fields: JSON values.
        tensors: of any dtype and shape; on the host when received.
        sender: the rank that sent it; filled in on arrival.
        lasts: nobody changes the tensors once it is sent, so that what waits to be written need be no copy.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    sender: int = -1
    lasts: bool = False

    def encode(self) -> tuple[bytes, list[memoryview]]:
        """Lengths and header, and the bytes of every tensor."""
        bodies = [_bytes_of(t) for t in self.tensors]
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in self.tensors]
        header = json.dumps([self.kind, dict(self.fields), shapes]).encode()
        return FRAME_LENGTHS.pack(len(header), sum(len(b) for b in bodies)) + header, bodies

    @classmethod
    def decode(cls, header: bytes, body: Tensor, sender: int) -> Message:
        """The inverse of `encode`; large tensors lie where they have arrived.

        Args:
            body: uint8 [n].

        Raises:
            ValueError: it is not what `encode` makes.
        """
        kind, fields, described = parse_header(header)
        if sum(prod(shape) * dtype.itemsize for dtype, shape in described) != len(body):
            raise ValueError("the tensors are not those of the header")
        tensors, start = [], 0
        for dtype, shape in described:
            size = prod(shape) * dtype.itemsize
            raw = body[start : start + size]
            if start % dtype.itemsize or _SMALL * size < len(body):
                raw = raw.clone()
            tensors.append(raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype))
            start += size
        return cls(kind, fields, tensors, sender)


class Channel(Protocol):
    """Point-to-point messages. What has been sent goes out during `receive` and `flush`.

    A peer that is gone, or that reads nothing for a deadline while something waits for it, is lost: `receive`
    or `flush` raises that once, as an error with its rank in `peer`, and the channel goes on without it.
    """

    def send(self, to: int, message: Message, deadline_seconds: float) -> None:
        """Hand a message over, without waiting; its tensors may be changed afterwards, unless it `lasts`.

        Args:
            deadline_seconds: how long the peer may read nothing before it is lost.
        Raises:
            CommunicationError: that the peer is lost was told before.
        """

    def receive(self, deadline_seconds: float) -> Message:
        """The next message of any sender."""

    def flush(self, seconds: float = math.inf) -> bool:
        """Wait until every peer has received its messages or is lost; returns False on time-out."""

    def last_sign(self, rank: int) -> float:
        """When a peer last took or sent a byte, on the monotonic clock; minus infinity: it is lost."""

    def drop(self, rank: int) -> None:
        """Close the connection to one peer; nothing more arrives from it."""

    def close(self) -> None:
        """Leave; the other end sees that this rank is gone."""


class Peer:
    """One socket, the frame that is arriving on it, and what the other end has not taken yet."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.outbox, self.heard_at = Outbox(connection), time.monotonic()
        self._head = bytearray()
        self._body: Tensor | None = None
        self._filled = 0

    def read(self) -> list[Message]:
        """Take what is there; the messages that are complete.

        What an encrypted connection has taken off the wire already is read too: no selector knows of it.
        """
        found: list[Message] = []
        try:
            found += self._read()
            while isinstance(self.socket, SecureLine) and self.socket.pending():
                found += self._read()
        except BlockingIOError:
            return found
        except OSError as error:
            raise self._gone(error) from error
        return found

    def _read(self) -> list[Message]:
        if self._body is None:
            wanted = self._wanted_head()
            self._head += self._some(self.socket.recv(wanted - len(self._head)))
            if len(self._head) < FRAME_LENGTHS.size or len(self._head) < self._wanted_head():
                return []
            self._body, self._filled = self._memory(int(FRAME_LENGTHS.unpack_from(self._head)[1])), 0
        if self._filled < len(self._body):
            self._fill(self._body)
        if self._filled < len(self._body):
            return []
        try:
            message = Message.decode(bytes(self._head[FRAME_LENGTHS.size :]), self._body, self.rank)
        except ValueError as error:
            raise self._broken(str(error)) from error
        self._head, self._body = bytearray(), None
        return [message]

    def _memory(self, num_bytes: int) -> Tensor:
        """For a body, uint8 [n]. It is taken as it is filled: a length may lie."""
        if num_bytes <= MOST_BYTES:
            with suppress(RuntimeError):  # there is not so much
                return torch.empty(num_bytes, dtype=torch.uint8)
        raise self._broken(f"tensors of {num_bytes} bytes")

    def _fill(self, body: Tensor) -> None:
        """Receive a part."""
        count = self.socket.recv_into(body.numpy().data[self._filled : self._filled + _CHUNK_BYTES])
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
        return no_message(self.rank, what)

    def _some(self, data: bytes) -> bytes:
        if not data:
            raise self._gone(None)
        return data

    def _gone(self, error: OSError | None) -> CommunicationError:
        return gone(self.rank, "" if error is None else str(error))


def kept_bytes(sizes: Sequence[int]) -> int:
    """Of memory that a message keeps which has come, with tensors of so many bytes; see `Message.decode`."""
    copied = copied_bytes(sizes)
    return copied + (sum(sizes) if copied < sum(sizes) else 0)


def copied_bytes(sizes: Sequence[int]) -> int:
    """Of those of its tensors that do not stay where they have arrived."""
    return sum(size for size in sizes if _SMALL * size < sum(sizes))


def _bytes_of(x: Tensor) -> memoryview:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data.cast("B") if flat.numel() else memoryview(b"")


def as_bytes(body: bytearray) -> Tensor:
    """The same memory, uint8 [n]."""
    return torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
