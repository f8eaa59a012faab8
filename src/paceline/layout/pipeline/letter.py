"""A message between stages as bytes: a description, and the tensors behind it where there is room for them.

Every call of a backend costs as much as sending tens of kilobytes, so a small message should be one. Who
receives has to know the length of the first part before it comes: both derive it from the message before
(`next_size`), and what does not fit goes on in parts of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

_HEAD_WORDS = 64
HEAD_BYTES = 8 * _HEAD_WORDS
"""Of a first part that has the description only; one that is longer goes on in a part of its own."""
_LARGEST_BYTES = 2**16  # in one part: tensors are copied into it, and it stays until the end of a step
_ALIGNED_BYTES = 64
_DTYPES = tuple(sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str))
Kind = tuple[torch.dtype, tuple[int, ...]]


class Letter(NamedTuple):
    """What a description says.

    Args:
        num_words: of the description.
        note, key: see `Neighbours`.
        attempt: of the sender.
        kinds: dtype and shape of each tensor.
    """

    num_words: int
    note: float
    key: int
    attempt: int
    kinds: Sequence[Kind]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], note: float, key: int, attempt: int) -> Letter:
        """The description of some tensors."""
        kinds = [(t.dtype, tuple(t.shape)) for t in tensors]
        return cls(5 + sum(2 + len(shape) for _, shape in kinds), note, key, attempt, kinds)

    @classmethod
    def read(cls, words: Sequence[int]) -> Letter:
        """From its words; there may be more behind them."""
        num_words, num_tensors, note, key, attempt = words[:5]
        place, kinds = 5, list[Kind]()
        for _ in range(num_tensors):
            end = place + 2 + words[place + 1]
            kinds.append((_DTYPES[words[place]], tuple(words[place + 2 : end])))
            place = end
        return cls(num_words, float(torch.tensor(note).view(torch.float64)), key, attempt, kinds)

    def words(self) -> list[int]:
        """Their number, that of tensors, note, key, attempt; type, dimensions and sizes of each tensor."""
        rows = [x for dtype, shape in self.kinds for x in (_DTYPES.index(dtype), len(shape), *shape)]
        note = int(torch.tensor(self.note, dtype=torch.float64).view(torch.int64))
        return [self.num_words, len(self.kinds), note, self.key, self.attempt, *rows]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [prod(shape) * dtype.itemsize for dtype, shape in self.kinds]

    @property
    def head_bytes(self) -> int:
        """Of the description, in one part with everything."""
        return max(HEAD_BYTES, _aligned(8 * self.num_words))

    @property
    def num_bytes(self) -> int:
        """Of one part with everything."""
        return self.head_bytes + sum(map(_aligned, self.sizes))

    def fits(self, size: int) -> bool:
        """Whether a first part of so many bytes has everything."""
        return self.num_words <= _HEAD_WORDS and self.num_bytes <= size

    def tensors_in(self, part: Tensor) -> Iterator[Tensor]:
        """Views of the tensors in one part that has everything; they begin at multiples of 64 bytes."""
        places = accumulate(map(_aligned, self.sizes), initial=self.head_bytes)
        for place, size, kind in zip(places, self.sizes, self.kinds, strict=False):
            yield shaped(part[place : place + size], kind)

    def taken_from(self, part: Tensor) -> list[Tensor]:
        """The tensors in one part that has everything, each with memory of its own.

        A module may change one in place, and a generator reads its state from where the memory begins.
        """
        return [x.clone() for x in self.tensors_in(part)]


def write_whole(letter: Letter, tensors: Sequence[Tensor], part: Tensor) -> None:
    """Lay the description and the tensors into one part that has room for everything."""
    words = torch.tensor(letter.words()).view(torch.uint8)
    part[: len(words)] = words
    for place, t in zip(letter.tensors_in(part), tensors, strict=True):
        place.copy_(t.detach())


def read_whole(part: Tensor) -> tuple[Letter, list[Tensor]]:
    """What lies in one part that has everything; the tensors have memory of their own."""
    num_words = int(part[:8].view(torch.int64))
    letter = Letter.read(part[: 8 * num_words].view(torch.int64).tolist())
    return letter, letter.taken_from(part)


def parts_of(letter: Letter, tensors: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """What is sent, one after another, as bytes.

    Args:
        size: of the first part.
    """
    first = torch.zeros(size, dtype=torch.uint8)
    if letter.fits(size):
        write_whole(letter, tensors, first)
        yield first
    else:
        words = letter.words()
        shown = torch.tensor(words[:_HEAD_WORDS]).view(torch.uint8)
        first[: len(shown)] = shown
        yield first
        yield torch.tensor(words[_HEAD_WORDS:], dtype=torch.int64).view(torch.uint8)
        yield from map(_as_bytes, tensors)


def words_in(first: Tensor) -> tuple[list[int], int]:
    """What a first part says, and how many bytes of the description are missing."""
    words: list[int] = first[:HEAD_BYTES].view(torch.int64).tolist()
    return words, max(0, 8 * words[0] - HEAD_BYTES)


def next_size(letter: Letter) -> int:
    """Of the first part of the next message the same way."""
    return letter.num_bytes if letter.fits(_LARGEST_BYTES) else HEAD_BYTES


def shaped(data: Tensor, kind: Kind) -> Tensor:
    """A tensor, from its bytes."""
    return data.view(kind[0]).view(kind[1])


def _as_bytes(x: Tensor) -> Tensor:
    """Gloo carries few types, and bytes carry all."""
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # one value, or none, may have any stride


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
