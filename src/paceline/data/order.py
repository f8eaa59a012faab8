"""The order of samples: a keyed permutation of the epoch, computed on demand.

Invariant: which samples step t trains on is a pure function of (seed, num_samples, batch size, t). World
size, loader workers and history have no part in it: any rank can seek to any step in constant time and space.
This module does not read data, and it does not divide a batch among ranks (see `work.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.keys import key

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

# Even. Exact enumeration of the worst small grid, 4 x 2: where four samples land together is then within
# 1.3 % (total variation) of uniform; ten rounds leave 9 %, six leave 33 %.
_NUM_ROUNDS = 16
_HALF = np.uint64(32)
_WINDOW_POSITIONS = 1024
_ODD_CONSTANTS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of SplitMix64


class Batches(Protocol):
    """Which samples make up the global batch of every step.

    Attributes:
        about: what a user should know of the order, in one sentence; empty: it is the recipe's.
        steps_per_epoch: of one pass over the data; 0: there is no such pass.
    """

    @property
    def about(self) -> str: ...
    @property
    def steps_per_epoch(self) -> int: ...

    def fingerprint(self) -> str:
        """Equal on ranks that have the same order; empty: it follows from the recipe alone."""

    def batch_size(self, step: int) -> int:
        """Number of samples in the global batch of a step."""

    def batch(self, step: int, part: range | None = None) -> Indices:
        """Sample indices of the global batch of a step, int64; of a contiguous part of it if one is given."""


class Permutation:
    """A bijection of range(num_samples), evaluated only where it is asked for.

    An alternating Feistel network on a grid of `columns * rows >= num_samples` cells; a cell outside the
    range is sent on until it falls inside (cycle walking). Fewer than `columns` cells lie outside, so walks
    are rare. `columns` is even because a grid of odd sides would reach only even permutations.

    Args:
        num_samples: size of the domain, 1 to 2**60.
        permutation_key: from `paceline.keys.key`; equal keys give equal permutations.
    Source: Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains, sections 4 and 5.
    """

    def __init__(self, num_samples: int, permutation_key: int) -> None:
        self.num_samples = num_samples
        side = math.isqrt(num_samples - 1) + 1
        self._columns = side + side % 2
        self._rows = -(-num_samples // self._columns)
        self._round_keys = [np.uint64(key(permutation_key, "round", i)) for i in range(_NUM_ROUNDS)]

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, positions: Indices) -> Indices:
        """Map positions, int64 [N] in range(num_samples), to sample indices, int64 [N]."""
        cells = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(cells >= self.num_samples)
        while outside.size:
            cells[outside] = self._encrypt(cells[outside])
            outside = outside[cells[outside] >= self.num_samples]
        return cells.astype(np.int64)

    def _encrypt(self, cells: _Words) -> _Words:
        row, column = np.divmod(cells, np.uint64(self._columns))
        for even, odd in zip(self._round_keys[::2], self._round_keys[1::2], strict=True):
            column = _add_modulo(column, _hash_below(row ^ even, self._columns), self._columns)
            row = _add_modulo(row, _hash_below(column ^ odd, self._rows), self._rows)
        return row * np.uint64(self._columns) + column


def _hash_below(words: _Words, bound: int) -> _Words:
    """Hash each word to range(bound), bound < 2**32: multiply, fold, multiply, and scale the upper half."""
    words = words * _ODD_CONSTANTS[0]
    words = (words ^ (words >> _HALF)) * _ODD_CONSTANTS[1]
    return ((words >> _HALF) * np.uint64(bound)) >> _HALF


def _add_modulo(a: _Words, b: _Words, modulus: int) -> _Words:
    total = a + b
    return np.minimum(
        total, total - np.uint64(modulus)
    )  # below modulus, the difference wraps to a huge number


class _Window:
    """The order around the last batch: a thousand places are found in the time that a few take.

    A cache and nothing else: what it returns depends on its arguments alone.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._start = 0
        self._samples: Indices = np.empty(0, dtype=np.int64)

    def take(self, order: Order, epoch: int, start: int, stop: int) -> Indices:
        """Sample indices at positions start..stop-1 of an epoch, int64; a copy."""
        inside = self._start <= start and stop <= self._start + len(self._samples)
        if epoch != self._epoch or not inside:
            end = min(order.num_samples, max(stop, start + _WINDOW_POSITIONS))
            self._samples = order.permutation(epoch)[np.arange(start, end, dtype=np.int64)]
            self._epoch, self._start = epoch, start
        return self._samples[start - self._start : stop - self._start].copy()


@dataclass(frozen=True)
class Order:
    """Which samples make up the global batch of every step, over all epochs.

    Step t is in epoch t // steps_per_epoch. Each epoch has its own order, keyed by (seed, "order", epoch),
    and gives every sample exactly once; with `drop_last` all but the last num_samples % size positions.

    Args:
        num_samples: length of the source.
        size: samples per global batch; the last batch of an epoch is smaller unless `drop_last`.
        seed: the seed of the run.
        shuffle: False keeps the order of the source.
        drop_last: leave out the incomplete batch at the end of an epoch.
    Raises:
        DataError: there are no samples, or `drop_last` leaves no batch.
    """

    num_samples: int
    size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    about: ClassVar[str] = ""
    _window: _Window = field(default_factory=_Window, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("the data is empty: it has no samples", next_step="check the path or the filter")
        if self.size < 1:
            raise DataError(f"a batch of {self.size} samples is impossible", next_step="set batch.size >= 1")
        if self.steps_per_epoch < 1:
            raise DataError(
                f"drop_last leaves nothing: {self.num_samples} samples are less than a batch of {self.size}",
                next_step="lower batch.size or set batch.drop_last = false",
            )

    @cached_property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.size if self.drop_last else -(-self.num_samples // self.size)

    def fingerprint(self) -> str:
        """See `Batches`."""
        return ""

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batch_size(self, step: int) -> int:
        """Number of samples in the global batch of `step`."""
        return min(self.size, self.num_samples - self._first_position(step))

    def batch(self, step: int, part: range | None = None) -> Indices:
        """Sample indices of the global batch of `step`, int64 [batch_size(step)].

        Args:
            step: global step, from 0, over all epochs.
            part: the places in the batch that are wanted, contiguous; only these are computed. None: all.
        """
        wanted = range(self.batch_size(step)) if part is None else part
        positions = np.arange(wanted.start, wanted.stop, dtype=np.int64) + self._first_position(step)
        if not self.shuffle or not positions.size:
            return positions
        return self._window.take(self, self.epoch_of(step), int(positions[0]), int(positions[-1]) + 1)

    def permutation(self, epoch: int) -> Permutation:
        """The order of one epoch; only meaningful with `shuffle`."""
        return Permutation(self.num_samples, key(self.seed, "order", epoch))

    def _first_position(self, step: int) -> int:
        return step % self.steps_per_epoch * self.size
