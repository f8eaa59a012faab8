"""The samples of each global batch: a keyed permutation of the epoch, or the order of a sampler.

Invariant: the samples of step t are a pure function of (seed, num_samples, batch size, t). World size, loader
workers and history do not matter, so any rank can seek to any step in constant time and space. A sampler of
`torch.utils.data` is called under generators that are seeded by the seed and the epoch; one with a
generator of its own is refused, since its order would depend on how often it was called. This module reads
no data, and it does not divide a batch among ranks (see `work`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DistributedSampler

from paceline.data.sample_reader import seeded_generators
from paceline.errors import DataError, format_count
from paceline.state.keys import key

SampleIndices = NDArray[np.int64]
_UintArray = NDArray[np.uint64]

# Even. Exact enumeration of the worst small grid, 4 x 2: where four samples land together is then within
# 1.3 % (total variation) of uniform; ten rounds leave 9 %, six leave 33 %.
_NUM_ROUNDS = 16
_HALF = np.uint64(32)
_WINDOW_POSITIONS = 1024
_ODD_CONSTANTS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of SplitMix64


class BatchOrder(Protocol):
    """The samples of the global batch of every step.

    Attributes:
        about: one sentence about the order for users; empty: it is the recipe's.
        steps_per_epoch: steps of one pass over the data; 0: there are no passes.
    """

    @property
    def about(self) -> str: ...
    @property
    def steps_per_epoch(self) -> int: ...

    def fingerprint(self) -> str:
        """Return a hash that is equal on ranks with the same order; empty: the recipe determines it."""

    def batch_size(self, step: int) -> int:
        """Return the number of samples in the global batch of a step."""

    def batch(self, step: int, part: range | None = None) -> SampleIndices:
        """Return the sample indices of the global batch of a step, or of a contiguous part of it, int64."""


def permute(num_samples: int, permutation_keys: Sequence[int], positions: SampleIndices) -> SampleIndices:
    """Evaluate several permutations of range(num_samples) at the same positions.

    Args:
        permutation_keys: of each permutation, as for `KeyedPermutation`.
        positions: int64 [N].
    Returns:
        int64 [permutations, N], the bits of one `KeyedPermutation` after another in about the time of one.
    """
    sides = _grid_of(num_samples)
    keys: _UintArray = np.array(
        [[key(k, "round", i) for k in permutation_keys] for i in range(_NUM_ROUNDS)], dtype=np.uint64
    )
    cells = _encrypt(
        np.tile(positions.astype(np.uint64), (len(permutation_keys), 1)), keys[..., None], *sides
    )
    rows, columns = np.nonzero(cells >= num_samples)
    # Cycle walking: a permutation of the grid leads back into the range, so this loop ends.
    while rows.size:
        cells[rows, columns] = _encrypt(cells[rows, columns], keys[:, rows], *sides)
        outside = cells[rows, columns] >= num_samples
        rows, columns = rows[outside], columns[outside]
    return cells.astype(np.int64)


def _grid_of(num_samples: int) -> tuple[int, int]:
    """Return the columns and rows of the grid of a permutation."""
    side = math.isqrt(num_samples - 1) + 1
    columns = side + side % 2
    return columns, -(-num_samples // columns)


def _encrypt(cells: _UintArray, round_keys: Any, num_columns: int, num_rows: int) -> _UintArray:
    """Permute cells of the grid; the keys of each round have the shape of the cells, or broadcast to it."""
    row, column = np.divmod(cells, np.uint64(num_columns))
    for even, odd in zip(round_keys[::2], round_keys[1::2], strict=True):
        column = _add_modulo(column, _hash_below(row ^ even, num_columns), num_columns)
        row = _add_modulo(row, _hash_below(column ^ odd, num_rows), num_rows)
    return row * np.uint64(num_columns) + column


class KeyedPermutation:
    """A bijection of range(num_samples) that is evaluated on demand.

    An alternating Feistel network on a grid of `columns * rows >= num_samples` cells; a cell outside the
    range is encrypted again until it is inside (cycle walking). Fewer than `columns` cells lie outside, so
    walks are rare. `columns` is even because a grid of odd sides would reach only even permutations.

    Args:
        num_samples: size of the domain, 1 to 2**60.
        permutation_key: from `paceline.state.keys.key`; equal keys give equal permutations.
    Source: Black and Rogaway 2002, Ciphers with Arbitrary Finite Domains, sections 4 and 5.
    """

    def __init__(self, num_samples: int, permutation_key: int) -> None:
        self.num_samples, self._key = num_samples, permutation_key

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, positions: SampleIndices) -> SampleIndices:
        """Map positions, int64 [N] in range(num_samples), to sample indices, int64 [N]."""
        return permute(self.num_samples, (self._key,), positions)[0]


def _hash_below(words: _UintArray, bound: int) -> _UintArray:
    """Hash each word to range(bound), bound < 2**32: multiply, fold, multiply, and scale the upper half."""
    words = words * _ODD_CONSTANTS[0]
    words = (words ^ (words >> _HALF)) * _ODD_CONSTANTS[1]
    return ((words >> _HALF) * np.uint64(bound)) >> _HALF


def _add_modulo(a: _UintArray, b: _UintArray, modulus: int) -> _UintArray:
    total = a + b
    # Below the modulus the difference wraps to a huge number, so the minimum is the total.
    return np.minimum(total, total - np.uint64(modulus))


class _OrderCache:
    """A cache of the order around the last batch: a thousand positions take as long as a few.

    What it returns depends only on its arguments.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._start = 0
        self._samples: SampleIndices = np.empty((0, 0), dtype=np.int64)

    def take(self, order: KeyedOrder, epoch: int, start: int, stop: int) -> SampleIndices:
        """Return the sample indices at positions start..stop-1 of an epoch, int64; a copy."""
        num_epochs, num_positions = self._samples.shape
        inside = self._start <= start and stop <= self._start + num_positions
        if not (self._epoch <= epoch < self._epoch + num_epochs and inside):
            # Of a small data set whole epochs, as many as take the time of one.
            num_epochs = max(1, _WINDOW_POSITIONS // order.num_samples)
            first = 0 if num_epochs > 1 else start
            end = min(order.num_samples, max(stop, first + _WINDOW_POSITIONS))
            keys = [key(order.seed, "order", e) for e in range(epoch, epoch + num_epochs)]
            self._samples = permute(order.num_samples, keys, np.arange(first, end, dtype=np.int64))
            self._epoch, self._start = epoch, first
        return self._samples[epoch - self._epoch, start - self._start : stop - self._start].copy()


@dataclass(frozen=True)
class KeyedOrder:
    """The order of samples under the seed of a run: a new permutation in each epoch.

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
    _window: _OrderCache = field(default_factory=_OrderCache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError("the data is empty: it has no samples", next_step="check the path or the filter")
        if self.size < 1:
            raise DataError(f"a batch of {self.size} samples is impossible", next_step="set batch.size >= 1")
        if self.steps_per_epoch < 1:
            raise DataError(
                f"drop_last leaves nothing: the data has {format_count(self.num_samples, 'sample')}, which"
                f" is less than a batch of {self.size}",
                next_step="lower batch.size or set batch.drop_last = false",
            )

    @cached_property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.size if self.drop_last else -(-self.num_samples // self.size)

    def fingerprint(self) -> str:
        return ""

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batch_size(self, step: int) -> int:
        """Return the number of samples in the global batch of `step`."""
        return min(self.size, self.num_samples - self._first_position(step))

    def batch(self, step: int, part: range | None = None) -> SampleIndices:
        """Return the sample indices of the global batch of `step`, int64 [batch_size(step)].

        Args:
            step: global step, from 0, over all epochs.
            part: a contiguous range of positions in the batch, the only ones computed; None: all.
        """
        wanted = range(self.batch_size(step)) if part is None else part
        positions = np.arange(wanted.start, wanted.stop, dtype=np.int64) + self._first_position(step)
        if not self.shuffle or not positions.size:
            return positions
        return self._window.take(self, self.epoch_of(step), int(positions[0]), int(positions[-1]) + 1)

    def permutation(self, epoch: int) -> KeyedPermutation:
        """Return the order of one epoch; only meaningful with `shuffle`."""
        return KeyedPermutation(self.num_samples, key(self.seed, "order", epoch))

    def _first_position(self, step: int) -> int:
        return step % self.steps_per_epoch * self.size


class SamplerOrder:
    """The order of a `torch.utils.data.Sampler`.

    Args:
        sampler: yields indices; its `set_epoch(n)`, if it has one, is called before each epoch.
        num_samples: of the data.
        size, seed, drop_last: as for `KeyedOrder`.
    Raises:
        DataError: the sampler gives another order when it is called again, or invalid indices.
    """

    def __init__(self, sampler: Any, num_samples: int, size: int, seed: int, *, drop_last: bool) -> None:
        _refuse_sampler(sampler)
        self._sampler, self._num_samples, self._seed = sampler, num_samples, seed
        self._places = KeyedOrder(len(sampler), size, seed, shuffle=False, drop_last=drop_last)
        self._epoch, self._indices = -1, np.empty(0, dtype=np.int64)
        self._require_repeatable()

    @property
    def about(self) -> str:
        name = type(self._sampler).__name__
        return f"order: from {name}; batch.shuffle has no effect"

    @property
    def steps_per_epoch(self) -> int:
        return self._places.steps_per_epoch

    def fingerprint(self) -> str:
        return blake2b(self._draw_indices(0).tobytes(), digest_size=16).hexdigest()

    def batch_size(self, step: int) -> int:
        return self._places.batch_size(step)

    def batch(self, step: int, part: range | None = None) -> SampleIndices:
        epoch = self._places.epoch_of(step)
        if epoch != self._epoch:
            self._indices, self._epoch = self._draw_indices(epoch), epoch
        return self._indices[self._places.batch(step, part)]

    def _draw_indices(self, epoch: int) -> SampleIndices:
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        # The state of the global generators would depend on what the process has drawn before.
        with seeded_generators(key(self._seed, "sampler", epoch), np.random.MT19937()):
            indices = np.fromiter(map(int, self._sampler), dtype=np.int64)
        if len(indices) != len(self._places_of_epoch):
            raise self._wrong(
                f"yields {len(indices)} indices, but its length is {len(self._places_of_epoch)}"
            )
        if len(indices) and not 0 <= indices.min() <= indices.max() < self._num_samples:
            raise self._wrong(
                f"gave the index {indices.max()}, and the data has"
                f" {format_count(self._num_samples, 'sample')}"
            )
        return indices

    @property
    def _places_of_epoch(self) -> range:
        return range(self._places.num_samples)

    def _require_repeatable(self) -> None:
        if not np.array_equal(self._draw_indices(0), self._draw_indices(0)):
            raise self._wrong("gives another order when it is called again with the same seed")

    def _wrong(self, what: str) -> DataError:
        return DataError(
            f"the sampler {what}",
            where=type(self._sampler).__name__,
            next_step="draw random numbers from the global generators of torch, NumPy or Python, which"
            " Paceline seeds by the run's seed and the epoch",
        )


_REFUSED_SAMPLERS = {
    DistributedSampler: "divides samples among ranks, which Paceline does as well",
    BatchSampler: "yields batches, but batch.size and batch.drop_last make the batches",
}


def _refuse_sampler(sampler: Any) -> None:
    """Refuse a sampler that repeats what Paceline does, or whose order is no function of seed and epoch."""
    why = next((text for kind, text in _REFUSED_SAMPLERS.items() if isinstance(sampler, kind)), "")
    if not why and not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
        why = "lacks __len__ or __iter__"
    if not why and getattr(sampler, "generator", None) is not None:
        why = "has a generator of its own, so its order would depend on how often it was called"
    if why:
        raise DataError(
            f"the sampler {type(sampler).__name__} {why}",
            where="Task(sampler=...)",
            next_step="pass one that yields indices and has no generator, or use batch.shuffle",
        )
