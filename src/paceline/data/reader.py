"""Reads the samples of one micro-batch and collates them: the part of the loader that runs in a worker
process.

Invariant: what a micro-batch reads depends on its indices and its key alone. Random numbers that the source
draws (augmentation with `random`, `numpy.random` or torch's global generator) are seeded by the key of the
micro-batch and leave the streams of the process as they were, so no number of workers or replicas changes
them.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import Dataset

from paceline.data.at_once import batch_at_once, collates_by_default
from paceline.data.cache import MISSING, SampleCache
from paceline.errors import DataError
from paceline.keys import key
from paceline.task import Source

Collate = Callable[[list[Any]], Any]


class Request(NamedTuple):
    """What is sent to a worker: plain integers, because some sources refuse numpy's."""

    indices: list[int]
    key: int


class Reply(NamedTuple):
    """What comes back; a named tuple, because PyTorch's pinning looks into those."""

    batch: Any
    hits: int
    lookups: int
    failure: DataError | None = None
    trace: str = ""  # of the failure, as text: a traceback does not survive the way out of a worker


class MicroBatchReader(Dataset[Reply]):
    """Source, cache and collate in one; a map-style data set of micro-batches to PyTorch's DataLoader.

    Args:
        source: map-style data; read a batch at once where that is known to be the same (`at_once.py`), else
            by `__getitems__(list of int)` where it has one, else item by item.
        collate: list of samples to batch.
        cache: samples read before.
    """

    def __init__(self, source: Source, collate: Collate, cache: SampleCache) -> None:
        self._source = source
        self._collate = collate
        self._cache = cache
        self._numpy_bits = np.random.MT19937()
        self._at_once = collates_by_default(collate) and not cache.capacity_bytes

    def __getitem__(self, request: Request) -> Reply:
        """Called by DataLoader. A failure is returned, not raised, so that it arrives as it was made."""
        hits, lookups = self._cache.hits, self._cache.lookups
        try:
            batch = self.read(*request)
        except DataError as error:
            return Reply(None, 0, 0, error, "".join(traceback.format_exception(error)))
        return Reply(batch, self._cache.hits - hits, self._cache.lookups - lookups)

    def read(self, indices: list[int], micro_batch_key: int) -> Any:
        """The batch of some samples.

        Raises:
            DataError: they cannot be read or collated.
        """
        batch = batch_at_once(self._source, indices) if self._at_once else None
        if batch is not None:
            return batch
        with seeded(key(micro_batch_key, "loader"), self._numpy_bits):
            samples = self._samples(indices)
            try:
                return self._collate(samples)
            except Exception as error:
                raise self._failure(f"samples {_spell(indices)} cannot be collated", error) from error

    def _samples(self, indices: list[int]) -> list[Any]:
        if not self._cache.capacity_bytes:
            return list(self._fetch(indices))
        found = {index: self._cache.get(index) for index in indices}
        missing = [index for index in indices if found[index] is MISSING]
        before = self._streams() if missing else ()
        samples = self._fetch(missing)
        if missing and self._streams() != before:
            raise DataError(
                f"samples {_spell(missing)} draw random numbers, and loader.cache_bytes would keep the first",
                where=type(self._source).__name__,
                next_step="draw in the collate function or in the loss, or set loader.cache_bytes = 0",
            )
        for index, sample in zip(missing, samples, strict=True):
            self._cache.put(index, sample)
            found[index] = sample
        return [found[index] for index in indices]

    def _streams(self) -> tuple[Any, ...]:
        """Where the global generators stand: they differ once somebody has drawn."""
        words: Any = self._numpy_bits.state["state"]
        torch_bytes = torch.default_generator.get_state().numpy().tobytes()
        return random.getstate(), words["pos"], words["key"].tobytes(), torch_bytes

    def _fetch(self, indices: list[int]) -> Sequence[Any]:
        fetch_many = getattr(self._source, "__getitems__", None)
        if not callable(fetch_many) or not indices:
            return [self._fetch_one(index) for index in indices]
        try:
            samples = fetch_many(indices)
        except Exception as error:
            for index in indices:  # one of these raises, with the index of the sample that is to blame
                self._fetch_one(index)
            raise self._failure(f"samples {_spell(indices)} cannot be read together", error) from error
        if len(samples) != len(indices):
            raise DataError(
                f"__getitems__ returned {len(samples)} samples for {len(indices)} indices",
                where=type(self._source).__name__,
                next_step="return one sample for each index, in order",
            )
        return samples

    def _fetch_one(self, index: int) -> Any:
        try:
            return self._source[index]
        except Exception as error:
            raise self._failure(f"sample {index} cannot be read", error) from error

    def _failure(self, what: str, error: Exception) -> DataError:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return DataError(
            f"{what}: {type(error).__name__}: {error}",
            where=f"{type(self._source).__name__}, {frame.filename}:{frame.lineno}",
            next_step="read that sample alone to reproduce this, then repair it or leave it out",
        )


@contextmanager
def seeded(seed: int, numpy_bits: np.random.MT19937) -> Iterator[None]:
    """Seed the global generators (random, numpy, torch on CPU) in the block, and restore them after it.

    `numpy_bits` stands in for NumPy's generator meanwhile: to save its state and set it back would cost 50
    microseconds for each micro-batch, the exchange costs one. A normal number that NumPy's legacy generator
    drew in advance is dropped by it.
    """
    state = random.getstate()
    numpy_state = mtrand.get_bit_generator()
    torch_state = torch.default_generator.get_state()
    random.seed(seed)
    mtrand.set_bit_generator(numpy_bits)
    mtrand.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        mtrand.set_bit_generator(numpy_state)
        torch.default_generator.set_state(torch_state)


def _spell(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return f"[{shown}, ...]" if len(indices) > 8 else f"[{shown}]"
