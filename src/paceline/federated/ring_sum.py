"""Sums in a ring: values of clients as fixed-point numbers in Z_2^32 or Z_2^64, whose sum does not round.

A client encodes `n_k * delta` as `round(n_k * delta * 2^fraction_bits)` and everything is added with
wraparound, so the sum is the same bits in any order, on any number of ranks, and with or without masks that
cancel. Counts and sums of losses go through the same sum as 64-bit words with fraction bits of their own.

Invariants: what was checked at the start of a run cannot overflow; a value that does not fit is an error that
names the client and the tensor, and is never clipped.
Exactness: each client rounds once, by at most 2^-(fraction_bits + 1); tests/unit/federated/test_ring_sum.py.
Source: Bonawitz et al. 2017, Practical Secure Aggregation, section 7 (Z_R, fixed point).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import NumericError, RecipeError
from paceline.state.slot import TensorSlot

_NUMBER_FRACTION_BITS = 20
"""Fraction bits of counts and of sums of losses."""


@dataclass(frozen=True)
class Ring:
    """The ring in which the values of clients are added.

    Args:
        bits: 32 or 64.
        fraction_bits: of a value.
        largest: magnitude of any value of an update, before it is weighted.
    """

    bits: int = 64
    fraction_bits: int = 32
    largest: float = 8.0

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of a word: unsigned, so that sums wrap."""
        return np.dtype(f"<u{self.bits // 8}")

    def check(self, total_weight: float, margin: float = 0.0) -> None:
        """Check that the largest sum of a round fits.

        Args:
            total_weight: largest sum of the weights of a cohort.
            margin: what is added to the sum in addition to updates, for example noise; as a value.
        Raises:
            RecipeError: it does not; says what does.
        """
        most = (total_weight * self.largest + margin) * 2.0**self.fraction_bits + total_weight
        if most < 2.0 ** (self.bits - 1):
            return
        room = self.bits - 2 - ceil(log2(total_weight * self.largest + margin))
        raise RecipeError(
            f"a sum of weights {total_weight:g} with values up to {self.largest:g} and {self.fraction_bits}"
            f" fraction bits does not fit in {self.bits} bits",
            where="federated.fraction_bits",
            next_step=f"set it to {room} or less, or use a smaller cohort or federated.largest"
            if room >= 8
            else 'set federated.ring = 64 or federated.weights = "equal", or use a smaller cohort',
        )

    def encode(self, values: Tensor, *, client: str, tensor: str, weight: float = 1.0) -> NDArray[Any]:
        """Return values as words.

        Args:
            values: float32, float64 or complex, weighted; complex ones are pairs of words.
            client, tensor: their names, for the error.
            weight: by which the values were multiplied.
        Raises:
            NumericError: a value is beyond `largest` times the weight, or is not finite.
        """
        reals = _as_reals(values.detach()).to("cpu", torch.float64).numpy()
        limit = self.largest * weight
        # A comparison with NaN is false.
        if reals.size and not max(-reals.min(), reals.max()) <= limit:
            worst = float(np.abs(reals).max())
            raise NumericError(
                f"the update of client {client} has a value of {worst / weight:g} in {tensor}, and the"
                f" largest that the sum can hold is {self.largest:g}",
                where="federated.largest",
                next_step="lower optimizer.lr, set federated.clip_norm, or raise federated.largest",
            )
        scaled = reals * 2.0**self.fraction_bits
        np.rint(scaled, out=scaled)
        return scaled.astype(np.int64).view(np.uint64).astype(self.dtype, copy=False)

    def decode(self, words: NDArray[Any]) -> Tensor:
        """Return the values of a sum, float64 [words]."""
        signed = words.view(np.dtype(f"<i{self.bits // 8}")).astype(np.float64)
        return torch.from_numpy(signed * 2.0**-self.fraction_bits)


@dataclass
class RingWords:
    """What one client sends, or a sum of it.

    Args:
        values: of the tensors, [num_values] in the dtype of the ring.
        numbers: counts and sums, uint64 [num_numbers].
    """

    values: NDArray[Any]
    numbers: NDArray[np.uint64]

    def add(self, other: RingWords) -> None:
        """Add in place, with wraparound."""
        self.values += other.values
        self.numbers += other.numbers

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all words."""
        return self.values.nbytes + self.numbers.nbytes

    def to_bytes(self) -> bytes:
        """Return the words as little-endian bytes, numbers first."""
        return self.numbers.tobytes() + self.values.tobytes()


@dataclass(frozen=True)
class RingLayout:
    """The order of tensors and numbers in the words of a client.

    Args:
        ring: of the values.
        tensors: by slot, in the dtype of the sums.
        num_numbers: counts and sums of losses.
    """

    ring: Ring
    tensors: Mapping[TensorSlot, Tensor]
    num_numbers: int
    _sizes: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = [t.numel() * (1 + t.is_complex()) for t in self.tensors.values()]
        object.__setattr__(self, "_sizes", sizes)

    @property
    def num_values(self) -> int:
        """Return the number of words of all tensors."""
        return sum(self._sizes)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the words of a client: the closed form of what it uploads."""
        return 8 * self.num_numbers + self.ring.bits // 8 * self.num_values

    def zeros(self) -> RingWords:
        """Return words that change no sum."""
        return RingWords(
            np.zeros(self.num_values, self.ring.dtype), np.zeros(self.num_numbers, dtype=np.uint64)
        )

    def from_bytes(self, data: bytes | bytearray) -> RingWords:
        """Return the words of some bytes; of a bytearray they share its memory."""
        end = 8 * self.num_numbers
        return RingWords(
            np.frombuffer(data, self.ring.dtype, offset=end), np.frombuffer(data, "<u8", self.num_numbers)
        )

    def encode(
        self, values: Mapping[TensorSlot, Tensor], numbers: Sequence[float], *, client: str, weight: float
    ) -> RingWords:
        """Return the words of a client.

        Args:
            values: weighted, by slot; a slot without values counts as zeros.
            numbers: [num_numbers].
        Raises:
            NumericError: a value or a number does not fit.
        """
        words, start = self.zeros(), 0
        for slot, size in zip(self.tensors, self._sizes, strict=True):
            if slot in values:
                name = slot.name.removeprefix("#")
                encoded = self.ring.encode(values[slot], client=client, tensor=name, weight=weight)
                words.values[start : start + size] = encoded
            start += size
        for index, number in enumerate(numbers):
            words.numbers[index] = _encode_number(number, client)
        return words

    def decode(self, words: RingWords) -> tuple[dict[TensorSlot, Tensor], list[float]]:
        """Return the sums of the tensors by slot, in their dtype and on their device, and the numbers."""
        pieces = self.ring.decode(words.values).split(self._sizes)
        sums = {}
        for (slot, like), piece in zip(self.tensors.items(), pieces, strict=True):
            whole = torch.view_as_complex(piece.view(-1, 2)) if like.is_complex() else piece
            sums[slot] = whole.view(like.shape).to(like.device, like.dtype)
        numbers = words.numbers.view(np.int64).astype(np.float64) * 2.0**-_NUMBER_FRACTION_BITS
        return sums, numbers.tolist()


MAX_CLIENTS_OF_A_SUM = 4096
"""Clients of a cohort for which the sums of counts fit."""
_LARGEST_NUMBER = 2.0 ** (63 - _NUMBER_FRACTION_BITS) / MAX_CLIENTS_OF_A_SUM


def _encode_number(number: float, client: str) -> int:
    """Return a count or a sum of losses as a word; the sum over `MAX_CLIENTS_OF_A_SUM` fits."""
    if not abs(number) <= _LARGEST_NUMBER:
        raise NumericError(
            f"client {client} has a count, a sum of losses or of a metric of {number:g}, and the largest that"
            f" the sum can hold is {_LARGEST_NUMBER:g}",
            where="federated.secure",
            next_step="report means in place of sums, or give the client fewer samples",
        )
    return round(number * 2.0**_NUMBER_FRACTION_BITS) % (1 << 64)


def _as_reals(values: Tensor) -> Tensor:
    """View values as real ones, [values]."""
    flat = values.reshape(-1)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
