"""The messages between a member and the store: a number, a word of one byte, and fields of bytes.

Invariant: a decoded message is complete and at most `MAX_MESSAGE_BYTES` long; anything else is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAX_MESSAGE_BYTES = 1 << 24
_HEAD = struct.Struct("!IIc")  # number of bytes that follow this field, number of the request, word
_LENGTH = struct.Struct("!I")

SET, ADD, APPEND, COMPARE, DELETE, CHECK, COUNT, AWAIT, LOST, LOG_TEXT = (bytes([c]) for c in b"SAPXDCNWLT")
DONE, LATE, GONE, REFUSED = (bytes([c]) for c in b"+~-!")


@dataclass(frozen=True)
class StoreMessage:
    """A request, or the answer to the request with the same number."""

    number: int
    word: bytes
    fields: tuple[bytes, ...] = ()


def encode_message(message: StoreMessage) -> bytes:
    """Return the bytes of a message.

    Raises:
        ValueError: it is too long.
    """
    body = b"".join(_LENGTH.pack(len(field)) + field for field in message.fields)
    size = _HEAD.size - _LENGTH.size + len(body)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return _HEAD.pack(size, message.number, message.word) + body


def pop_message(buffer: bytearray) -> StoreMessage | None:
    """Remove the first message from a buffer and return it; None if it is not complete yet.

    Raises:
        ValueError: the buffer does not begin with a message.
    """
    if len(buffer) < _HEAD.size:
        return None
    size, number, word = _HEAD.unpack_from(buffer)
    if not _HEAD.size - _LENGTH.size <= size <= MAX_MESSAGE_BYTES:
        raise ValueError("not a message")
    end = _LENGTH.size + size
    if len(buffer) < end:
        return None
    fields = _decode_fields(bytes(buffer[_HEAD.size : end]))
    del buffer[:end]
    return StoreMessage(number, word, fields)


def _decode_fields(body: bytes) -> tuple[bytes, ...]:
    fields, offset = [], 0
    while offset < len(body):
        if offset + _LENGTH.size > len(body):
            raise ValueError("not a field")
        (length,) = _LENGTH.unpack_from(body, offset)
        offset += _LENGTH.size
        if offset + length > len(body):
            raise ValueError("not a field")
        fields.append(body[offset : offset + length])
        offset += length
    return tuple(fields)


def encode_members(members: Sequence[int]) -> bytes:
    """Encode members as one field."""
    return ",".join(map(str, members)).encode()


def decode_members(field: bytes) -> frozenset[int]:
    """Decode what `encode_members` returns; ValueError for anything else."""
    return frozenset(int(number) for number in field.split(b",") if number)
