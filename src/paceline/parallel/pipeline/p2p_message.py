"""A message between stages as bytes: a description, and the tensors behind it where there is room for them.

Every call of a backend costs as much as sending tens of kilobytes, so a small message should be one. Who
receives has to know the length of the first part before it comes: both derive it from the message before
(`next_first_part_bytes`), and what does not fit goes on in parts of its own.
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
"""Of a description, before those of its tensors."""
HEADER_BYTES = 8 * _HEADER_WORDS
"""Of a first part that has the description only; one that is longer goes on in a part of its own."""
_MAX_SINGLE_PART_BYTES = (
    2**16
)  # in one part: tensors are copied into it, and it stays until the end of a step
_ALIGNMENT_BYTES = 64
_DTYPES = tuple(sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str))
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
TensorKind = tuple[torch.dtype, tuple[int, ...]]


class _MessageLayout(NamedTuple):
    """How tensors of some kinds lie in one part; worked out once, as messages of a job have few kinds.

    Args:
        rows: words that describe them: type, dimensions and sizes of each.
        sizes: bytes of each.
        places: where each begins.
        header_bytes: of the description.
        num_bytes: of everything.
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
    """The kinds that these words describe."""
    place, kinds = 0, list[TensorKind]()
    while place < len(rows):
        end = place + 2 + rows[place + 1]
        kinds.append((_DTYPES[rows[place]], rows[place + 2 : end]))
        place = end
    return tuple(kinds)


class MessageHeader(NamedTuple):
    """What a description says.

    Args:
        num_words: of the description.
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
        """The description of some tensors."""
        kinds = tuple([(t.dtype, tuple(t.shape)) for t in tensors])
        return cls(_FIXED_WORDS + len(_message_layout(kinds).rows), note, key, attempt, kinds)

    @classmethod
    def read(cls, words: Sequence[int]) -> MessageHeader:
        """From its words; there may be more behind them."""
        num_words, _, bits, key, attempt = words[:_FIXED_WORDS]
        (note,) = struct.unpack("d", struct.pack("q", bits))
        return cls(num_words, note, key, attempt, _kinds_in(tuple(words[_FIXED_WORDS:num_words])))

    def words(self) -> list[int]:
        """Their number, that of tensors, note, key, attempt; type, dimensions and sizes of each tensor."""
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
        """Of one part with everything."""
        return _message_layout(self.kinds).num_bytes

    def fits(self, size: int) -> bool:
        """Whether a first part of so many bytes has everything."""
        return self.num_words <= _HEADER_WORDS and self.num_bytes <= size

    def tensors_in(self, part: Tensor) -> Iterator[Tensor]:
        """Views of the tensors in one part that has everything; they begin at multiples of 64 bytes."""
        laid = _message_layout(self.kinds)
        for place, size, kind in zip(laid.places, laid.sizes, self.kinds, strict=True):
            yield tensor_from_bytes(part[place : place + size], kind)

    def copy_tensors_from(self, part: Tensor) -> list[Tensor]:
        """The tensors in one part that has everything, each with memory of its own.

        A module may change one in place, and a generator reads its state from where the memory begins.
        """
        laid, start, found = _message_layout(self.kinds), part.data_ptr(), list[Tensor]()
        for place, size, (dtype, shape) in zip(laid.places, laid.sizes, self.kinds, strict=True):
            found.append(torch.empty(shape, dtype=dtype, device=part.device))
            if size:  # elsewhere than on a processor what has a size has a part of its own
                memmove(found[-1].data_ptr(), start + place, size)
        return found


def write_message(letter: MessageHeader, tensors: Sequence[Tensor], part: Tensor) -> None:
    """Lay the description and the tensors into one part that has room for everything, on a processor."""
    struct.pack_into(f"{letter.num_words}q", part.numpy().data, 0, *letter.words())
    laid, start = _message_layout(letter.kinds), part.data_ptr()
    for place, size, t in zip(laid.places, laid.sizes, tensors, strict=True):
        plain = _as_contiguous_cpu(t)  # lives until it is copied
        memmove(start + place, plain.data_ptr(), size)


def read_message(part: Tensor) -> tuple[MessageHeader, list[Tensor]]:
    """What lies in one part that has everything; the tensors have memory of their own."""
    memory = part.numpy().data
    (num_words,) = struct.unpack_from("q", memory)
    letter = MessageHeader.read(struct.unpack_from(f"{num_words}q", memory))
    return letter, letter.copy_tensors_from(part)


def _as_contiguous_cpu(t: Tensor) -> Tensor:
    """The same values on a processor, one after another: the tensor, or a copy."""
    if type(t) is Tensor and t.is_cpu and t.is_contiguous() and not (t.is_conj() or t.is_neg()):
        return t
    return torch.empty(t.shape, dtype=t.dtype).copy_(t.detach())


def message_parts(letter: MessageHeader, tensors: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """What is sent, one after another, as bytes.

    Args:
        size: of the first part.
    """
    first = torch.zeros(size, dtype=torch.uint8)
    if letter.fits(size):
        write_message(letter, tensors, first)
        yield first
    else:
        words = letter.words()
        shown = torch.tensor(words[:_HEADER_WORDS]).view(torch.uint8)
        first[: len(shown)] = shown
        yield first
        yield torch.tensor(words[_HEADER_WORDS:], dtype=torch.int64).view(torch.uint8)
        yield from map(_as_bytes, tensors)


def parse_first_part(first: Tensor) -> tuple[list[int], int]:
    """What a first part says, and how many bytes of the description are missing."""
    words: list[int] = first[:HEADER_BYTES].view(torch.int64).tolist()
    return words, max(0, 8 * words[0] - HEADER_BYTES)


def next_first_part_bytes(letter: MessageHeader) -> int:
    """Of the first part of the next message the same way."""
    return letter.num_bytes if letter.fits(_MAX_SINGLE_PART_BYTES) else HEADER_BYTES


def tensor_from_bytes(data: Tensor, kind: TensorKind) -> Tensor:
    """A tensor, from its bytes."""
    return data.view(kind[0]).view(kind[1])


def _as_bytes(x: Tensor) -> Tensor:
    """Gloo carries few types, and bytes carry all."""
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # one value, or none, may have any stride


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
