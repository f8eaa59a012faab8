"""What a member and the store say to each other: a number, a word of one byte, and some fields of bytes.

Invariant: a message that can be read is whole, and no longer than `MAX_MESSAGE_BYTES`; anything else is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAX_MESSAGE_BYTES = 1 << 24
_HEAD = struct.Struct("!IIc")  # bytes that follow this number, the number of the question, the word
_LENGTH = struct.Struct("!I")

SET, ADD, APPEND, COMPARE, DELETE, CHECK, COUNT, AWAIT, LOST, LOG_TEXT = (bytes([c]) for c in b"SAPXDCNWLT")
DONE, LATE, GONE, REFUSED = (bytes([c]) for c in b"+~-!")


@dataclass(frozen=True)
class StoreMessage:
    """A question, or the answer to the question of that number."""

    number: int
    word: bytes
    fields: tuple[bytes, ...] = ()


def encode_message(message: StoreMessage) -> bytes:
    """As it travels.

    Raises:
        ValueError: it is too long.
    """
    body = b"".join(_LENGTH.pack(len(field)) + field for field in message.fields)
    size = _HEAD.size - _LENGTH.size + len(body)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return _HEAD.pack(size, message.number, message.word) + body


def pop_message(buffer: bytearray) -> StoreMessage | None:
    """The first message of a buffer, which loses it; None if it is not whole yet.

    Raises:
        ValueError: what is there is no message.
    """
    if len(buffer) < _HEAD.size:
        return None
    size, number, word = _HEAD.unpack_from(buffer)
    if not _HEAD.size - _LENGTH.size <= size <= MAX_MESSAGE_BYTES:
        raise ValueError("no message")
    end = _LENGTH.size + size
    if len(buffer) < end:
        return None
    fields = _decode_fields(bytes(buffer[_HEAD.size : end]))
    del buffer[:end]
    return StoreMessage(number, word, fields)


def _decode_fields(body: bytes) -> tuple[bytes, ...]:
    found, place = [], 0
    while place < len(body):
        if place + _LENGTH.size > len(body):
            raise ValueError("no field")
        (length,) = _LENGTH.unpack_from(body, place)
        place += _LENGTH.size
        if place + length > len(body):
            raise ValueError("no field")
        found.append(body[place : place + length])
        place += length
    return tuple(found)


def encode_members(members: Sequence[int]) -> bytes:
    """Members as one field."""
    return ",".join(map(str, members)).encode()


def decode_members(field: bytes) -> frozenset[int]:
    """The inverse of `encode_members`; ValueError if it is none."""
    return frozenset(int(one) for one in field.split(b",") if one)
