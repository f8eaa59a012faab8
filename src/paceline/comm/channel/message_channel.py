"""The message channel protocol: messages between two ranks, whenever one of them is ready. No collectives, no
pickle.

One rank is the hub: it exchanges messages with all others. A frame is a length, a JSON header and raw tensor
bytes; the header has the kind, the fields, and dtype and shape of every tensor, and is checked, as another
process wrote it.
Invariant: the messages of one sender arrive whole and in order, and after them, if it is lost, an error with
its rank; no peer holds up another; every wait has a deadline. Sockets (`socket_channel`) and gRPC
(`grpc_channel`) implement it.
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
    """Return an error about a peer, with its rank in `peer`."""
    error = CommunicationError(what, next_step=LOOK_ELSEWHERE)
    error.peer = rank
    return error


def peer_gone_error(rank: int, why: str = "") -> CommunicationError:
    """Return the error that a peer has left, or cannot be reached."""
    return peer_error(rank, f"rank {rank} is gone: {why}" if why else f"rank {rank} is gone")


def peer_not_reading_error(rank: int) -> DeadlineError:
    """Return the error that a peer reads nothing, although messages wait for it."""
    error = DeadlineError(
        f"rank {rank} does not read its messages",
        next_step="look at what that rank does, or raise runtime.deadline_seconds",
    )
    error.peer = rank
    return error


def bad_message_error(rank: int, why: str) -> CommunicationError:
    """Return the error that a peer sent bytes that are no valid message."""
    error = CommunicationError(
        f"rank {rank} sent an invalid message: {why}",
        next_step="run the same version of Paceline on every node; else look at the network",
    )
    error.peer = rank
    return error


MAX_HEADER_BYTES = 1 << 24
_MAX_AXES = 64
# Sizes along one axis; their product must not overflow in Python-side arithmetic of PyTorch.
_MAX_AXIS_SIZE = 2**48


def parse_header(header: bytes) -> tuple[str, dict[str, Any], list[tuple[torch.dtype, list[int]]]]:
    """Parse kind, fields, and dtype and shape of every tensor.

    Raises:
        ValueError: it is no valid header.
    """
    try:
        kind, fields, shapes = json.loads(header)
        described = [(getattr(torch, name), shape) for name, shape in shapes]
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"invalid header: {error}") from error
    if (
        type(kind) is not str
        or type(fields) is not dict
        or not all(_is_tensor_description(*description) for description in described)
    ):
        raise ValueError("invalid header")
    return kind, fields, described


def _is_tensor_description(dtype: Any, shape: Any) -> bool:
    is_valid_type = type(dtype) is torch.dtype and type(shape) is list and len(shape) <= _MAX_AXES
    return is_valid_type and all(type(size) is int and 0 <= size < _MAX_AXIS_SIZE for size in shape)


# Bytes of the header, bytes of all tensors.
FRAME_LENGTHS = struct.Struct("!QQ")
MAX_TENSOR_BYTES = 1 << 44
"""Bytes of the tensors of a message, at most; more than any machine has."""

# A tensor that is smaller than this fraction of its frame is copied, so that it does not keep the frame in
# memory.
_SMALL_FRACTION = 8


@dataclass(frozen=True)
class ChannelMessage:
    """A message of one rank to another.

    Args:
        kind: a word.
        fields: JSON values.
        tensors: of any dtype and shape; on the CPU when received.
        sender: the rank that sent it; filled in on arrival.
        is_immutable: the tensors do not change after the send, so that queued bytes need not be copied.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    sender: int = -1
    is_immutable: bool = False

    def encode(self) -> tuple[bytes, list[memoryview]]:
        """Return lengths and header, and the bytes of every tensor."""
        bodies = [_tensor_bytes(t) for t in self.tensors]
        shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in self.tensors]
        header = json.dumps([self.kind, dict(self.fields), shapes]).encode()
        return FRAME_LENGTHS.pack(len(header), sum(len(b) for b in bodies)) + header, bodies

    @classmethod
    def decode(cls, header: bytes, body: Tensor, sender: int) -> ChannelMessage:
        """Return the inverse of `encode`; large tensors stay where they have arrived.

        Args:
            body: uint8 [n].

        Raises:
            ValueError: it is not what `encode` makes.
        """
        kind, fields, described = parse_header(header)
        if sum(prod(shape) * dtype.itemsize for dtype, shape in described) != len(body):
            raise ValueError("the tensors do not match the header")
        tensors, start = [], 0
        for dtype, shape in described:
            size = prod(shape) * dtype.itemsize
            raw = body[start : start + size]
            # Views need aligned memory; a copy of a small tensor frees the frame.
            if start % dtype.itemsize or _SMALL_FRACTION * size < len(body):
                raw = raw.clone()
            tensors.append(raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype))
            start += size
        return cls(kind, fields, tensors, sender)


class MessageChannel(Protocol):
    """A channel of point-to-point messages, which are written during `receive` and `flush`.

    A peer is lost if it is gone, or if it reads nothing for a deadline while messages wait for it. `receive`
    or `flush` raises that once, as an error with its rank in `peer`, and the channel goes on without it.
    """

    def send(self, to: int, message: ChannelMessage, deadline_seconds: float) -> None:
        """Queue a message, without waiting; its tensors may be changed afterwards, unless it is
        `is_immutable`.

        Args:
            deadline_seconds: how long the peer may read nothing before it is lost.
        Raises:
            CommunicationError: the peer is lost, and that was raised before.
        """

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        """Return the next message of any sender."""

    def flush(self, seconds: float = math.inf) -> bool:
        """Wait until every peer has received its messages or is lost; return False on time-out."""

    def last_activity(self, rank: int) -> float:
        """Return when a peer last read or sent a byte, on the monotonic clock; minus infinity: it is lost."""

    def drop(self, rank: int) -> None:
        """Close the connection to one peer; nothing more arrives from it."""

    def close(self) -> None:
        """Close the channel; the other ends see that this rank is gone."""


def _tensor_bytes(x: Tensor) -> memoryview:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data.cast("B") if flat.numel() else memoryview(b"")


def as_bytes(body: bytearray) -> Tensor:
    """View the same memory as uint8 [n]."""
    return torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
