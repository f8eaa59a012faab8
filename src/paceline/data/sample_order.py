"""The order of samples: a keyed permutation of the epoch, computed on demand.

Invariant: which samples step t trains on is a pure function of (seed, num_samples, batch size, t). World
size, loader workers and history have no part in it: any rank can seek to any step in constant time and space.
This module does not read data, and it does not divide a batch among ranks (see `work.py`).

The order of samples that a sampler of `torch.utils.data` gives, epoch by epoch.

Invariant: the order of an epoch is a function of the seed and the epoch: the sampler is asked under
generators that are seeded by both, as `KeyedOrder` is keyed. A sampler that keeps a generator of its own is
refused, since its order would depend on how often it was asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DistributedSampler

from paceline.data.sample_reader import seeded_generators
from paceline.errors import DataError
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

    def batch(self, step: int, part: range | None = None) -> SampleIndices:
        """Sample indices of the global batch of a step, int64; of a contiguous part of it if one is given."""


class KeyedPermutation:
    """A bijection of range(num_samples), evaluated only where it is asked for.

    An alternating Feistel network on a grid of `columns * rows >= num_samples` cells; a cell outside the
    range is sent on until it falls inside (cycle walking). Fewer than `columns` cells lie outside, so walks
    are rare. `columns` is even because a grid of odd sides would reach only even permutations.

    Args:
        num_samples: size of the domain, 1 to 2**60.
        permutation_key: from `paceline.state.keys.key`; equal keys give equal permutations.
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

    def __getitem__(self, positions: SampleIndices) -> SampleIndices:
        """Map positions, int64 [N] in range(num_samples), to sample indices, int64 [N]."""
        cells = self._encrypt(positions.astype(np.uint64))
        outside = np.flatnonzero(cells >= self.num_samples)
        while outside.size:
            cells[outside] = self._encrypt(cells[outside])
            outside = outside[cells[outside] >= self.num_samples]
        return cells.astype(np.int64)

    def _encrypt(self, cells: _UintArray) -> _UintArray:
        row, column = np.divmod(cells, np.uint64(self._columns))
        for even, odd in zip(self._round_keys[::2], self._round_keys[1::2], strict=True):
            column = _add_modulo(column, _hash_below(row ^ even, self._columns), self._columns)
            row = _add_modulo(row, _hash_below(column ^ odd, self._rows), self._rows)
        return row * np.uint64(self._columns) + column


def _hash_below(words: _UintArray, bound: int) -> _UintArray:
    """Hash each word to range(bound), bound < 2**32: multiply, fold, multiply, and scale the upper half."""
    words = words * _ODD_CONSTANTS[0]
    words = (words ^ (words >> _HALF)) * _ODD_CONSTANTS[1]
    return ((words >> _HALF) * np.uint64(bound)) >> _HALF


def _add_modulo(a: _UintArray, b: _UintArray, modulus: int) -> _UintArray:
    total = a + b
    return np.minimum(
        total, total - np.uint64(modulus)
    )  # below modulus, the difference wraps to a huge number


class _OrderCache:
    """The order around the last batch: a thousand places are found in the time that a few take.

    A cache and nothing else: what it returns depends on its arguments alone.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._start = 0
        self._samples: SampleIndices = np.empty(0, dtype=np.int64)

    def take(self, order: KeyedOrder, epoch: int, start: int, stop: int) -> SampleIndices:
        """Sample indices at positions start..stop-1 of an epoch, int64; a copy."""
        inside = self._start <= start and stop <= self._start + len(self._samples)
        if epoch != self._epoch or not inside:
            end = min(order.num_samples, max(stop, start + _WINDOW_POSITIONS))
            self._samples = order.permutation(epoch)[np.arange(start, end, dtype=np.int64)]
            self._epoch, self._start = epoch, start
        return self._samples[start - self._start : stop - self._start].copy()


@dataclass(frozen=True)
class KeyedOrder:
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
    _window: _OrderCache = field(default_factory=_OrderCache, init=False, repr=False, compare=False)

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
        """See `BatchOrder`."""
        return ""

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batch_size(self, step: int) -> int:
        """Number of samples in the global batch of `step`."""
        return min(self.size, self.num_samples - self._first_position(step))

    def batch(self, step: int, part: range | None = None) -> SampleIndices:
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

    def permutation(self, epoch: int) -> KeyedPermutation:
        """The order of one epoch; only meaningful with `shuffle`."""
        return KeyedPermutation(self.num_samples, key(self.seed, "order", epoch))

    def _first_position(self, step: int) -> int:
        return step % self.steps_per_epoch * self.size


class SamplerOrder:
    """Batches in the order of a sampler; see `BatchOrder`.

    Args:
        sampler: gives indices; `set_epoch(n)` is called before each epoch if there is one.
        num_samples: of the data.
        size, drop_last, seed: see `KeyedOrder`.
    Raises:
        DataError: the sampler cannot be asked twice, or gives no indices of this data.
    """

    def __init__(self, sampler: Any, num_samples: int, size: int, seed: int, *, drop_last: bool) -> None:
        _refuse_sampler(sampler)
        self._sampler, self._num_samples, self._seed = sampler, num_samples, seed
        self._places = KeyedOrder(len(sampler), size, seed, shuffle=False, drop_last=drop_last)
        self._epoch, self._indices = -1, np.empty(0, dtype=np.int64)
        self._refuse_forgetful()

    @property
    def about(self) -> str:
        """See `BatchOrder`."""
        name = type(self._sampler).__name__
        return f"every epoch has the samples that {name} gives, in its order; batch.shuffle has no say"

    @property
    def steps_per_epoch(self) -> int:
        """See `BatchOrder`."""
        return self._places.steps_per_epoch

    def fingerprint(self) -> str:
        """See `BatchOrder`; of the first epoch."""
        return blake2b(self._ask(0).tobytes(), digest_size=16).hexdigest()

    def batch_size(self, step: int) -> int:
        """See `BatchOrder`."""
        return self._places.batch_size(step)

    def batch(self, step: int, part: range | None = None) -> SampleIndices:
        """See `BatchOrder`."""
        epoch = self._places.epoch_of(step)
        if epoch != self._epoch:
            self._indices, self._epoch = self._ask(epoch), epoch
        return self._indices[self._places.batch(step, part)]

    def _ask(self, epoch: int) -> SampleIndices:
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        with seeded_generators(key(self._seed, "sampler", epoch), np.random.MT19937()):
            found = np.fromiter(map(int, self._sampler), dtype=np.int64)
        if len(found) != len(self._places_of_epoch):
            raise self._wrong(f"gave {len(found)} indices and says that it has {len(self._places_of_epoch)}")
        if len(found) and not 0 <= found.min() <= found.max() < self._num_samples:
            raise self._wrong(f"gave the index {found.max()}, and there are {self._num_samples} samples")
        return found

    @property
    def _places_of_epoch(self) -> range:
        return range(self._places.num_samples)

    def _refuse_forgetful(self) -> None:
        if not np.array_equal(self._ask(0), self._ask(0)):
            raise self._wrong("gives another order when it is asked again under the same seed")

    def _wrong(self, what: str) -> DataError:
        return DataError(
            f"the sampler {what}",
            where=type(self._sampler).__name__,
            next_step="let it draw from torch's, NumPy's or Python's global generator, which are seeded here"
            " by the run's seed and the epoch",
        )


_REFUSED_SAMPLERS = {
    DistributedSampler: "deals samples to ranks, which Paceline does: every sample would be dealt twice",
    BatchSampler: "gives batches, and batches are cut by batch.size and batch.drop_last",
}


def _refuse_sampler(sampler: Any) -> None:
    """Raises: DataError: it does what Paceline does, or its order is no function of seed and epoch."""
    why = next((text for kind, text in _REFUSED_SAMPLERS.items() if isinstance(sampler, kind)), "")
    if not why and not (hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")):
        why = "lacks __len__ or __iter__"
    if not why and getattr(sampler, "generator", None) is not None:
        why = "has a generator of its own, so its order would depend on how often it was asked"
    if why:
        raise DataError(
            f"the sampler {type(sampler).__name__} {why}",
            where="Task(sampler=...)",
            next_step="give one that yields indices, made without generator; batch.shuffle needs none",
        )
