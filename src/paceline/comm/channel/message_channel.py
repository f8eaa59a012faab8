"""The errors that name a peer of a channel which is lost.

The header of a frame: what a message is, and which tensors follow it. Another process has written it.

What one peer has not taken yet: written when its socket takes it, so that nobody waits for a slow reader.

Invariant: what was put is written once, whole and in order. What waits is a copy, so the owner of a tensor
may change it as soon as `put` has returned, unless it says that nobody will. It does not bound how much
waits: whoever sends large messages waits for an answer to one before the next.

Channels: messages between two ranks, whenever one of them is ready. No collectives, no pickle.

One rank is the hub; it hears all others, and they hear it. Frames are a length, a JSON header and raw tensor
bytes over TCP. Invariant: the messages of one sender arrive whole and in order, and after them, if it is
lost, an error with its rank; no peer holds up another; every wait has a deadline.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import CommunicationError, DeadlineError

LOOK_ELSEWHERE = "look at the first rank that ended: it is the cause"


def peer_error(rank: int, what: str) -> CommunicationError:
    """With its rank in `peer`."""
    error = CommunicationError(what, next_step=LOOK_ELSEWHERE)
    error.peer = rank
    return error


def peer_gone_error(rank: int, why: str = "") -> CommunicationError:
    """It has left, or cannot be reached."""
    return peer_error(rank, f"rank {rank} is gone: {why}" if why else f"rank {rank} is gone")


def peer_not_reading_error(rank: int) -> DeadlineError:
    """It takes nothing, although something waits for it."""
    error = DeadlineError(
        f"rank {rank} does not read what it is sent",
        next_step="look at what that rank does, or raise runtime.deadline_seconds",
    )
    error.peer = rank
    return error


def bad_message_error(rank: int, why: str) -> CommunicationError:
    """It says what it must not."""
    error = CommunicationError(
        f"rank {rank} sent what is no message: {why}",
        next_step="run the same version of Paceline on every node; else look at the network",
    )
    error.peer = rank
    return error


MAX_HEADER_BYTES = 1 << 24
_MAX_AXES = 64
_MAX_AXIS_SIZE = 2**48  # along one axis


def parse_header(header: bytes) -> tuple[str, dict[str, Any], list[tuple[torch.dtype, list[int]]]]:
    """Kind, fields, and type and shape of every tensor.

    Raises:
        ValueError: it is no header.
    """
    try:
        kind, fields, shapes = json.loads(header)
        described = [(getattr(torch, name), shape) for name, shape in shapes]
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the header is none: {error}") from error
    if (
        type(kind) is not str
        or type(fields) is not dict
        or not all(_is_tensor_description(*one) for one in described)
    ):
        raise ValueError("the header is none")
    return kind, fields, described


def _is_tensor_description(dtype: Any, shape: Any) -> bool:
    right = type(dtype) is torch.dtype and type(shape) is list and len(shape) <= _MAX_AXES
    return right and all(type(size) is int and 0 <= size < _MAX_AXIS_SIZE for size in shape)


FRAME_LENGTHS = struct.Struct("!QQ")  # bytes of the header, bytes of all tensors
MAX_TENSOR_BYTES = 1 << 44
"""Of the tensors of a message; nobody has so much memory."""

_SMALL_FRACTION = (
    8  # a tensor of less than one part in so many of its frame does not keep the frame in memory
)


@dataclass(frozen=True)
class ChannelMessage:
    """What one rank says to another.

    Args:
        kind: a word.
        fields: JSON values.
        tensors: of any dtype and shape; on the host when received.
        sender: the rank that sent it; filled in on arrival.
        is_immutable: nobody changes the tensors once it is sent, so that what waits to be written need be no copy.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    sender: int = -1
    is_immutable: bool = False

    def encode(self) -> tuple[bytes, list[memoryview]]:
        """Lengths and header, and the bytes of every tensor."""
        bodies = [_tensor_bytes(t) for t in self.tensors]
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in self.tensors]
        header = json.dumps([self.kind, dict(self.fields), shapes]).encode()
        return FRAME_LENGTHS.pack(len(header), sum(len(b) for b in bodies)) + header, bodies

    @classmethod
    def decode(cls, header: bytes, body: Tensor, sender: int) -> ChannelMessage:
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
            if start % dtype.itemsize or _SMALL_FRACTION * size < len(body):
                raw = raw.clone()
            tensors.append(raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype))
            start += size
        return cls(kind, fields, tensors, sender)


class MessageChannel(Protocol):
    """Point-to-point messages. What has been sent goes out during `receive` and `flush`.

    A peer that is gone, or that reads nothing for a deadline while something waits for it, is lost: `receive`
    or `flush` raises that once, as an error with its rank in `peer`, and the channel goes on without it.
    """

    def send(self, to: int, message: ChannelMessage, deadline_seconds: float) -> None:
        """Hand a message over, without waiting; its tensors may be changed afterwards, unless it `is_immutable`.

        Args:
            deadline_seconds: how long the peer may read nothing before it is lost.
        Raises:
            CommunicationError: that the peer is lost was told before.
        """

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        """The next message of any sender."""

    def flush(self, seconds: float = math.inf) -> bool:
        """Wait until every peer has received its messages or is lost; returns False on time-out."""

    def last_activity(self, rank: int) -> float:
        """When a peer last took or sent a byte, on the monotonic clock; minus infinity: it is lost."""

    def drop(self, rank: int) -> None:
        """Close the connection to one peer; nothing more arrives from it."""

    def close(self) -> None:
        """Leave; the other end sees that this rank is gone."""


def _tensor_bytes(x: Tensor) -> memoryview:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data.cast("B") if flat.numel() else memoryview(b"")


def as_bytes(body: bytearray) -> Tensor:
    """The same memory, uint8 [n]."""
    return torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
