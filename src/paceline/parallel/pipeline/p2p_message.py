"""Format of messages between stages: a header, followed by the tensors if there is room for them.

Every call of a backend costs as much as sending tens of kilobytes, so a small message should be one call.
The receiver must know the length of the first part before it arrives: both sides derive it from the message
before (`next_first_part_bytes`), and what does not fit follows in parts of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from ctypes import memmove
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

_HEADER_WORDS = 64
_FIXED_WORDS = 5
"""Words of a header before those of its tensors."""
HEADER_BYTES = 8 * _HEADER_WORDS
"""Bytes of a first part with only the header; a longer header continues in a part of its own."""
# Tensors are copied into a single part, which stays in memory until the end of a step.
_MAX_SINGLE_PART_BYTES = 2**16
_ALIGNMENT_BYTES = 64
# Sorted, so that a number means the same dtype on every rank.
_DTYPES = tuple(sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str))
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
TensorKind = tuple[torch.dtype, tuple[int, ...]]


class _MessageLayout(NamedTuple):
    """Layout of tensors of some kinds in one part; cached, because messages of a job have few kinds.

    Args:
        rows: words that describe the tensors: dtype, number of dimensions and sizes of each.
        sizes: bytes of each tensor.
        places: offset of each tensor.
        header_bytes: bytes of the header.
        num_bytes: bytes of the whole part.
    """

    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    places: tuple[int, ...]
    header_bytes: int
    num_bytes: int


@lru_cache(maxsize=256)
def _message_layout(kinds: tuple[TensorKind, ...]) -> _MessageLayout:
    rows = tuple(x for dtype, shape in kinds for x in (_NUMBERS[dtype], len(shape), *shape))
    sizes = tuple(prod(shape) * dtype.itemsize for dtype, shape in kinds)
    header_bytes = max(HEADER_BYTES, _aligned(8 * (_FIXED_WORDS + len(rows))))
    *places, num_bytes = accumulate(map(_aligned, sizes), initial=header_bytes)
    return _MessageLayout(rows, sizes, tuple(places), header_bytes, num_bytes)


@lru_cache(maxsize=256)
def _kinds_in(rows: tuple[int, ...]) -> tuple[TensorKind, ...]:
    """Return the kinds of tensors that these words describe."""
    start, kinds = 0, list[TensorKind]()
    while start < len(rows):
        end = start + 2 + rows[start + 1]
        kinds.append((_DTYPES[rows[start]], rows[start + 2 : end]))
        start = end
    return tuple(kinds)


class MessageHeader(NamedTuple):
    """Header of a message.

    Args:
        num_words: number of words of the header.
        note, key: see `StageTransport`.
        attempt: of the sender.
        kinds: dtype and shape of each tensor.
    """

    num_words: int
    note: float
    key: int
    attempt: int
    kinds: tuple[TensorKind, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], note: float, key: int, attempt: int) -> MessageHeader:
        """Return the header for some tensors."""
        kinds = tuple([(t.dtype, tuple(t.shape)) for t in tensors])
        return cls(_FIXED_WORDS + len(_message_layout(kinds).rows), note, key, attempt, kinds)

    @classmethod
    def read(cls, words: Sequence[int]) -> MessageHeader:
        """Parse a header from its words; further words may follow."""
        num_words, _, bits, key, attempt = words[:_FIXED_WORDS]
        (note,) = struct.unpack("d", struct.pack("q", bits))
        return cls(num_words, note, key, attempt, _kinds_in(tuple(words[_FIXED_WORDS:num_words])))

    def words(self) -> list[int]:
        """Return numbers of words and tensors, note, key and attempt, then dtype and sizes of each tensor."""
        # The bits of the float, as all words are integers.
        (bits,) = struct.unpack("q", struct.pack("d", self.note))
        return [
            self.num_words,
            len(self.kinds),
            bits,
            self.key,
            self.attempt,
            *_message_layout(self.kinds).rows,
        ]

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each tensor."""
        return _message_layout(self.kinds).sizes

    @property
    def num_bytes(self) -> int:
        """Bytes of a single part with everything."""
        return _message_layout(self.kinds).num_bytes

    def fits(self, size: int) -> bool:
        """Return whether a first part of `size` bytes can contain everything."""
        return self.num_words <= _HEADER_WORDS and self.num_bytes <= size

    def tensors_in(self, part: Tensor) -> Iterator[Tensor]:
        """Yield views of the tensors in a part with everything; they begin at multiples of 64 bytes."""
        layout = _message_layout(self.kinds)
        for offset, size, kind in zip(layout.places, layout.sizes, self.kinds, strict=True):
            yield tensor_from_bytes(part[offset : offset + size], kind)

    def copy_tensors_from(self, part: Tensor) -> list[Tensor]:
        """Return the tensors of a part with everything, each in memory of its own.

        A module may change one in place, and a generator reads its state from the beginning of the memory.
        """
        layout, start, tensors = _message_layout(self.kinds), part.data_ptr(), list[Tensor]()
        for offset, size, (dtype, shape) in zip(layout.places, layout.sizes, self.kinds, strict=True):
            tensors.append(torch.empty(shape, dtype=dtype, device=part.device))
            if size:
                # Raw memory on the CPU; on a GPU a tensor with values always has a part of its own.
                memmove(tensors[-1].data_ptr(), start + offset, size)
        return tensors


def write_message(header: MessageHeader, tensors: Sequence[Tensor], part: Tensor) -> None:
    """Write the header and the tensors into one part with room for everything, on the CPU."""
    struct.pack_into(f"{header.num_words}q", part.numpy().data, 0, *header.words())
    layout, start = _message_layout(header.kinds), part.data_ptr()
    for offset, size, t in zip(layout.places, layout.sizes, tensors, strict=True):
        # A name of its own: the copy must live until memmove has read it.
        contiguous = _as_contiguous_cpu(t)
        memmove(start + offset, contiguous.data_ptr(), size)


def read_message(part: Tensor) -> tuple[MessageHeader, list[Tensor]]:
    """Read a part with everything; the tensors have memory of their own."""
    memory = part.numpy().data
    (num_words,) = struct.unpack_from("q", memory)
    header = MessageHeader.read(struct.unpack_from(f"{num_words}q", memory))
    return header, header.copy_tensors_from(part)


def _as_contiguous_cpu(t: Tensor) -> Tensor:
    """Return the same values contiguous on the CPU: the tensor itself, or a copy."""
    # The memory of a subclass, or of a lazily conjugated or negated tensor, is not its values.
    if type(t) is Tensor and t.is_cpu and t.is_contiguous() and not (t.is_conj() or t.is_neg()):
        return t
    return torch.empty(t.shape, dtype=t.dtype).copy_(t.detach())


def message_parts(header: MessageHeader, tensors: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """Yield the parts of a message as bytes, in the order of sending.

    Args:
        size: bytes of the first part.
    """
    # New memory for every message: the backend may read it until the send has completed.
    first = torch.zeros(size, dtype=torch.uint8)
    if header.fits(size):
        write_message(header, tensors, first)
        yield first
    else:
        words = header.words()
        beginning = torch.tensor(words[:_HEADER_WORDS]).view(torch.uint8)
        first[: len(beginning)] = beginning
        yield first
        yield torch.tensor(words[_HEADER_WORDS:], dtype=torch.int64).view(torch.uint8)
        yield from map(_as_bytes, tensors)


def parse_first_part(first: Tensor) -> tuple[list[int], int]:
    """Return the words of a first part, and how many bytes of the header are missing."""
    words: list[int] = first[:HEADER_BYTES].view(torch.int64).tolist()
    return words, max(0, 8 * words[0] - HEADER_BYTES)


def next_first_part_bytes(header: MessageHeader) -> int:
    """Return the bytes of the first part of the next message in the same direction."""
    # Most messages of one direction have equal shapes, so the next one is expected to be as long.
    return header.num_bytes if header.fits(_MAX_SINGLE_PART_BYTES) else HEADER_BYTES


def tensor_from_bytes(data: Tensor, kind: TensorKind) -> Tensor:
    """Return a tensor from its bytes."""
    return data.view(kind[0]).view(kind[1])


def _as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor: Gloo supports few dtypes, and bytes carry all of them."""
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor with at most one value may have any stride, which `view` rejects.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
