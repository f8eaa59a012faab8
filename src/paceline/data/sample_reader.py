"""Reading and collating the samples of one micro-batch: the part of the loader that runs in a worker process.

Invariant: what a micro-batch reads depends only on its indices and its keys. Random numbers that the source
draws (augmentation with `random`, `numpy.random` or torch's global generator) are seeded for every sample, by
the step and the index, so they depend neither on the number of workers nor on how a batch is divided among
ranks. What the collate function draws is seeded by the key of the micro-batch. The generators of the process
are restored afterwards.

Samples that are expensive to read can be cached, least recently used, within `capacity_bytes`. A cached
sample is returned as the same object, so collate functions must not modify samples in place, and a source
that draws random numbers is not cached: its first draw would be repeated. Known sources (`TensorDataset`,
`Subset`, `TextWindows`) are read as a batch, without a Python call for each sample, and give the bits, types
and containers of PyTorch's default collate function. Only exact types are known, since a subclass may draw
random numbers.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from paceline.data.text_corpus import TextWindows
from paceline.errors import DataError, format_count
from paceline.state.keys import key
from paceline.task import SampleSource

CACHE_MISS = object()
_UNDRAWN_SEED = 0  # of the generators while it is open whether the source draws


class SampleCache:
    """A least-recently-used cache of samples by index; `hits` and `lookups` count its accesses."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self.hits = 0
        self.lookups = 0
        self._samples: OrderedDict[int, tuple[Any, int]] = OrderedDict()

    def get(self, index: int) -> Any:
        """Return the sample, or `CACHE_MISS`; a cache without capacity counts nothing."""
        if not self.capacity_bytes:
            return CACHE_MISS
        self.lookups += 1
        if index not in self._samples:
            return CACHE_MISS
        self.hits += 1
        self._samples.move_to_end(index)
        return self._samples[index][0]

    def put(self, index: int, sample: Any) -> None:
        """Keep a sample that `get` missed, unless it is larger than the whole cache."""
        num_bytes = size_bytes(sample) if self.capacity_bytes else 0
        if not 0 < num_bytes <= self.capacity_bytes:
            return
        self._samples[index] = (sample, num_bytes)
        self.held_bytes += num_bytes
        while self.held_bytes > self.capacity_bytes:
            _, (_, released_bytes) = self._samples.popitem(last=False)
            self.held_bytes -= released_bytes


def size_bytes(sample: Any) -> int:
    """Return the bytes of a sample, with the payload of tensors and arrays and the items of containers."""
    own_bytes = sys.getsizeof(sample, 64)
    if isinstance(sample, Mapping):
        return own_bytes + sum(size_bytes(value) for value in sample.values())
    if isinstance(sample, list | tuple):
        return own_bytes + sum(map(size_bytes, sample))
    num_bytes = getattr(sample, "nbytes", 0)  # torch.Tensor, numpy.ndarray, memoryview
    return own_bytes + (num_bytes if isinstance(num_bytes, int) else 0)


_TYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


def uses_default_collate(collate: Callable[[list[Any]], Any]) -> bool:
    """Return whether batches are made by PyTorch's default, without custom functions for tensors."""
    known = default_collate_fn_map
    return collate is default_collate and known.get(Tensor) is collate_tensor_fn and tuple not in known


def read_batch(source: Any, indices: Sequence[int]) -> Any | None:
    """Read a batch as the default collate function makes it; None if samples must be read one by one.

    Args:
        source: map-style data.
        indices: of the samples; None is returned for an invalid one, and reading it raises the error.
    """
    read = _BATCH_READERS.get(type(source))
    return read(source, indices) if read and indices else None


def _read_rows(source: TensorDataset, indices: Sequence[int]) -> list[Tensor] | None:
    if not (_are_inside(indices, len(source)) and all(map(_is_plain, source.tensors))):
        return None
    rows = torch.from_numpy(np.array(indices, dtype=np.int64))  # takes a third of the time of torch.tensor
    return [t.index_select(0, rows) for t in source.tensors]


def _read_subset(source: Subset[Any], indices: Sequence[int]) -> Any | None:
    chosen: Any = source.indices
    known = type(chosen) in (list, tuple, range) or (type(chosen) is np.ndarray and chosen.ndim == 1)
    if not known or not _are_inside(indices, len(chosen)):
        return None
    inner = [chosen[index] for index in indices]
    if not all(type(index) is int or isinstance(index, np.integer) for index in inner):
        return None
    return read_batch(source.dataset, [int(index) for index in inner])


def _read_windows(source: TextWindows, indices: Sequence[int]) -> Tensor | None:
    return source.batch(indices) if _are_inside(indices, len(source)) else None


def _are_inside(indices: Sequence[int], length: int) -> bool:
    return min(indices) >= 0 and max(indices) < length


def _is_plain(t: Tensor) -> bool:
    if type(t) is not Tensor or t.layout != torch.strided or t.is_nested or t.requires_grad:
        return False
    return t.device.type == "cpu" and t.dtype in _TYPES


_BATCH_READERS: Mapping[type, Callable[[Any, Sequence[int]], Any | None]] = {
    TensorDataset: _read_rows,
    Subset: _read_subset,
    TextWindows: _read_windows,
}

CollateFunction = Callable[[list[Any]], Any]


class ReadRequest(NamedTuple):
    """A request to a worker; indices are plain integers, because some sources refuse those of NumPy."""

    indices: list[int]
    key: int
    seed_and_step: tuple[int, int]


class ReadReply(NamedTuple):
    """The reply of a worker; a named tuple, because PyTorch pins the memory of its items."""

    batch: Any
    hits: int
    lookups: int
    failure: DataError | None = None
    trace: str = ""  # of the failure; a traceback object cannot be pickled


class MicroBatchReader(Dataset[ReadReply]):
    """A map-style dataset of micro-batches for DataLoader: a source, a cache and a collate function.

    Args:
        source: map-style data; read as a batch by `read_batch` if that gives the same, else by
            `__getitems__(list of int)` if it has one, else item by item.
        collate: list of samples to batch.
        cache: samples read before.
    """

    def __init__(self, source: SampleSource, collate: CollateFunction, cache: SampleCache) -> None:
        self._source = source
        self._collate = collate
        self._cache = cache
        self._numpy_bits = np.random.MT19937()
        self._at_once = uses_default_collate(collate) and not cache.capacity_bytes
        self._source_draws = False
        with seeded_generators(_UNDRAWN_SEED, self._numpy_bits):
            self._undrawn = self._next_numbers()

    def __getitem__(self, request: ReadRequest) -> ReadReply:
        """Read a request of DataLoader. A failure is returned, because DataLoader would change its class."""
        hits, lookups = self._cache.hits, self._cache.lookups
        try:
            batch = self.read(*request)
        except DataError as error:
            return ReadReply(None, 0, 0, error, "".join(traceback.format_exception(error)))
        return ReadReply(batch, self._cache.hits - hits, self._cache.lookups - lookups)

    def read(self, indices: list[int], micro_batch_key: int, seed_and_step: tuple[int, int]) -> Any:
        """Read and collate samples.

        Raises:
            DataError: a sample cannot be read, or the samples cannot be collated.
        """
        batch = read_batch(self._source, indices) if self._at_once else None
        if batch is not None:
            return batch
        with seeded_generators(_UNDRAWN_SEED, self._numpy_bits):
            samples = self._samples(indices, seed_and_step)
            _seed_generators(key(micro_batch_key, "loader"))
            with self._describe_errors(indices, "cannot be collated", samples=samples):
                return self._collate(samples)

    def _samples(self, indices: list[int], seed_and_step: tuple[int, int]) -> list[Any]:
        if self._cache.capacity_bytes:
            return self._cached_samples(indices)
        # Seeding costs more than reading a small sample, so it waits until the source has drawn a number.
        if not self._source_draws:
            samples = list(self._fetch(indices))
            if self._next_numbers() == self._undrawn:
                return samples
            self._source_draws = True
        return [self._seeded_sample(index, seed_and_step) for index in indices]

    def _seeded_sample(self, index: int, seed_and_step: tuple[int, int]) -> Any:
        seed, step = seed_and_step
        _seed_generators(key(seed, "sample", step, index))
        return self._fetch([index])[0]

    def _next_numbers(self) -> tuple[int, int, int]:
        """Return the next number of each global generator."""
        drawn = torch.empty((), dtype=torch.int64).random_()
        return random.getrandbits(64), int(self._numpy_bits.random_raw()), int(drawn)

    def _cached_samples(self, indices: list[int]) -> list[Any]:
        by_index = {index: self._cache.get(index) for index in indices}
        missing = [index for index in indices if by_index[index] is CACHE_MISS]
        samples = self._fetch(missing)
        # A source that draws random numbers must not be cached: its first draw would be repeated.
        if missing and self._next_numbers() != self._undrawn:
            raise DataError(
                f"samples {_indices_text(missing)} draw random numbers, and a cache would keep the first",
                where=type(self._source).__name__,
                next_step="draw in the collate function or in the loss, or set loader.cache_bytes = 0",
            )
        for index, sample in zip(missing, samples, strict=True):
            self._cache.put(index, sample)
            by_index[index] = sample
        return [by_index[index] for index in indices]

    def _fetch(self, indices: list[int]) -> Sequence[Any]:
        fetch_many = getattr(self._source, "__getitems__", None)
        if not callable(fetch_many) or not indices:
            return [self._fetch_one(index) for index in indices]
        with self._describe_errors(indices, "cannot be read together", retries=indices):
            samples = fetch_many(indices)
        if len(samples) != len(indices):
            raise DataError(
                f"__getitems__ returned {format_count(len(samples), 'sample')} for {len(indices)} indices",
                where=type(self._source).__name__,
                next_step="return one sample for each index, in order",
            )
        return samples

    def _fetch_one(self, index: int) -> Any:
        try:
            return self._source[index]
        except Exception as error:
            raise self._failure(f"sample {index} cannot be read", error) from error

    @contextmanager
    def _describe_errors(
        self,
        indices: list[int],
        problem: str,
        retries: Sequence[int] = (),
        samples: Sequence[Any] = (),
    ) -> Iterator[None]:
        """Turn any error in the block into a DataError that names the samples.

        Args:
            indices: of the samples.
            problem: the end of the sentence about them.
            retries: indices of samples that are first read one by one.
            samples: the samples, if they were read: the first that differs in shape is described.
        """
        try:
            yield
        except Exception as error:
            # One of these raises, and its error has the index of the sample.
            for index in retries:
                self._fetch_one(index)
            what = f"samples {_indices_text(indices)} {problem}"
            raise self._failure(what, error, _describe_odd_sample(indices, samples)) from error

    def _failure(self, what: str, error: Exception, odd_sample: str = "") -> DataError:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        advice = "read that sample alone to reproduce the error, then repair it or leave it out"
        return DataError(
            ": ".join(filter(None, [what, odd_sample, type(error).__name__, str(error)])),
            where=f"{type(self._source).__name__}, {frame.filename}:{frame.lineno}",
            next_step="pad or cut them to one shape in the data set or in Task(collate=...)"
            if odd_sample
            else advice,
        )


@contextmanager
def seeded_generators(seed: int, numpy_bits: np.random.MT19937) -> Iterator[None]:
    """Seed the global generators (random, numpy, torch on CPU) in the block, and restore them after it.

    `numpy_bits` replaces NumPy's bit generator in the block: to save and restore its state would take 50 us
    for each micro-batch, and the exchange takes 1 us. A normal number that NumPy's legacy generator has drawn
    in advance is lost.
    """
    state = random.getstate()
    numpy_state = mtrand.get_bit_generator()
    torch_state = torch.default_generator.get_state()
    mtrand.set_bit_generator(numpy_bits)
    _seed_generators(seed)
    try:
        yield
    finally:
        random.setstate(state)
        mtrand.set_bit_generator(numpy_state)
        torch.default_generator.set_state(torch_state)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    mtrand.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def _describe_odd_sample(indices: list[int], samples: Sequence[Any]) -> str:
    """Describe the first sample and the first that has another shape; empty if there is none."""
    kinds = [*map(_describe_sample, samples)]
    other = next((place for place, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is None:
        return ""
    return f"sample {indices[0]} is {kinds[0]}, and sample {indices[other]} is {kinds[other]}"


def _describe_sample(sample: Any) -> str:
    """Return types and shapes of what a sample holds."""
    leaves = tree_flatten(sample)[0]
    shapes = [list(leaf.shape) if hasattr(leaf, "shape") else "" for leaf in leaves]
    return ", ".join(
        f"{type(leaf).__name__} {shape}".strip() for leaf, shape in zip(leaves, shapes, strict=True)
    )


def _indices_text(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return f"[{shown}, ...]" if len(indices) > 8 else f"[{shown}]"
