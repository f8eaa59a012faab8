"""What a language model has to beat: a unigram, a trigram and `lzma`, in bits per byte of one text.

Invariant: every baseline codes all bytes of the same held-out text, with what it counted in the training
text alone; `lzma` is given the held-out text only, as a compressor is. Work is a few sorts and look-ups.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]

_NUM_BYTES = 256


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of the held-out text."""

    unigram: float
    trigram: float
    lzma: float


def measure_baselines(train: Bytes, held_out: Bytes) -> Baselines:
    """Fit on one text, uint8 [N] with N >= 3, and code another, uint8 [M]; neither is modified."""
    unigram = _unigram(train)
    return Baselines(
        unigram=_mean_bits(unigram[held_out]),
        trigram=_mean_bits(trigram_chances(train, held_out)),
        lzma=8.0 * len(lzma.compress(held_out.tobytes())) / len(held_out),
    )


def trigram_chances(train: Bytes, held_out: Bytes) -> Floats:
    """Give the probability of each held-out byte after the two before it, float64 [M].

    Orders are interpolated: p(c | ab) = (n(abc) + t(ab) p(c | b)) / (n(ab) + t(ab)), where n counts and t is
    how many different bytes followed; p(c | b) is built from p(c) in the same way.

    Source: Witten & Bell 1991, The zero-frequency problem, IEEE Trans. Inf. Theory 37(4), method C.
    """
    one = _unigram(train)[held_out]
    two = _interpolate(_grams(train, 2), _grams(held_out, 2), one[1:])
    three = _interpolate(_grams(train, 3), _grams(held_out, 3), two[1:])
    return np.concatenate((one[:1], two[:1], three))


def _unigram(train: Bytes) -> Floats:
    """Give p(c), float64 [256], with one added to every count so that none is zero."""
    counts = np.bincount(train, minlength=_NUM_BYTES) + 1.0
    return counts / counts.sum()


def _interpolate(train_grams: NDArray[np.int32], grams: NDArray[np.int32], lower: Floats) -> Floats:
    """Mix the counts of an order with the probabilities `lower` of the order below it, both [M]."""
    seen, counts = np.unique(train_grams, return_counts=True)
    num_contexts = int(max(train_grams.max(), grams.max(initial=0))) // _NUM_BYTES + 1
    context_counts = np.bincount(seen // _NUM_BYTES, weights=counts, minlength=num_contexts)
    context_types = np.bincount(seen // _NUM_BYTES, minlength=num_contexts)
    place = np.searchsorted(seen, grams).clip(max=len(seen) - 1)
    own_counts = np.where(seen[place] == grams, counts[place], 0)
    context = grams // _NUM_BYTES
    types = np.maximum(context_types[context], 1)  # a context never seen: all weight on the lower order
    return (own_counts + types * lower) / (context_counts[context] + types)


def _grams(text: Bytes, order: int) -> NDArray[np.int32]:
    """Write each run of `order` bytes as one integer, the latest byte in the lowest place."""
    wide = text.astype(np.int32)
    grams = wide[: len(wide) - order + 1]
    for offset in range(1, order):
        grams = grams * _NUM_BYTES + wide[offset : len(wide) - order + 1 + offset]
    return grams


def _mean_bits(chances: Floats) -> float:
    return float(-np.log2(chances).mean())
