"""Batches that are made at once are those that the default collate function makes of single samples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from paceline.data.sample_reader import (
    CACHE_MISS,
    MicroBatchReader,
    ReadRequest,
    SampleCache,
    read_batch,
    size_bytes,
    uses_default_collate,
)
from paceline.data.text_corpus import TextWindows
from paceline.errors import DataError

INDICES = [7, 0, 3, 3, 39, 12]
ROW = torch.arange(40.0)


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(40, 3, 5, generator=generator)
    return TensorDataset(
        wide.transpose(1, 2),  # not contiguous
        wide[:, 0, 0].to(torch.bfloat16),
        torch.arange(40),
        wide[:, 0] > 0,
        torch.complex(wide[:, 1], wide[:, 2]),
    )


def windows() -> TextWindows:
    return TextWindows(np.random.default_rng(0).integers(0, 256, 40 * 6 + 3).astype(np.uint8), 6)


def mapped() -> TextWindows:
    """As token files are opened."""
    with tempfile.NamedTemporaryFile() as file:
        np.arange(40 * 6 + 3, dtype=np.uint16).tofile(file.name)
        return TextWindows(np.memmap(file.name, np.uint16, "r"), 6)


SOURCES: dict[str, Callable[[], Any]] = {
    "tensors": tensors,
    "one tensor": lambda: TensorDataset(torch.arange(40.0)),
    "windows": windows,
    "windows of a mapped file": mapped,
    "windows of every other token": lambda: TextWindows(np.arange(600, dtype=np.uint16)[::2], 7),
    "subset": lambda: Subset(tensors(), np.arange(40)[::-1]),
    "subset of a subset": lambda: Subset(Subset(windows(), range(40)), [(7 * i) % 40 for i in range(40)]),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))


@pytest.mark.capability("M2")
@pytest.mark.parametrize("name", SOURCES)
def test_a_batch_at_once_is_what_collate_makes_of_the_samples(name: str) -> None:
    source = SOURCES[name]()
    batch = read_batch(source, INDICES)
    assert batch is not None
    assert same(batch, default_collate([source[i] for i in INDICES]))
    assert not same(batch, default_collate([source[i] for i in reversed(INDICES)]))


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(t + torch.rand(()) for t in super().__getitem__(index))


class Listed(Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Drawn(Sequence[int]):
    """Indices that are drawn when they are asked for."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: Any) -> Any:
        return int(torch.randint(40, ()))


@pytest.mark.capability("M2")
@pytest.mark.parametrize(
    "source",
    [
        Noisy(torch.zeros(40)),
        Subset(Noisy(torch.zeros(40)), range(40)),
        Subset(tensors(), torch.nonzero(torch.ones(40))),  # samples of these have one dimension more
        Subset(tensors(), torch.arange(40)),
        Subset(tensors(), [float(i) for i in range(40)]),
        Subset(tensors(), [True] * 40),
        Subset(tensors(), np.ones(40, dtype=bool)),
        Subset(tensors(), np.arange(40)[:, None]),
        Subset(tensors(), Drawn()),
        Listed(),
        TensorDataset(torch.zeros(40, requires_grad=True)),
        TensorDataset(torch.zeros(40, 2).to_sparse()),
    ],
)
def test_what_might_differ_is_read_sample_by_sample(source: Any) -> None:
    assert read_batch(source, INDICES) is None


def test_what_a_source_holds_may_be_replaced() -> None:
    inner = TensorDataset(torch.arange(40))
    source = Subset(inner, range(40))
    assert same(read_batch(source, INDICES), [torch.tensor(INDICES)])
    inner.tensors = (torch.arange(40) * 2,)
    assert same(read_batch(source, INDICES), [torch.tensor(INDICES) * 2])
    inner.tensors = (torch.arange(40.0, requires_grad=True),)
    assert read_batch(source, INDICES) is None
    source.dataset = TensorDataset(torch.arange(40) * 3)
    assert same(read_batch(source, INDICES), [torch.tensor(INDICES) * 3])


def test_the_default_device_is_not_where_samples_are() -> None:
    with torch.device("meta"):
        assert same(read_batch(TensorDataset(ROW), INDICES), [ROW[INDICES]])


def test_tensors_that_are_collated_in_another_way_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uses_default_collate(default_collate)
    monkeypatch.setitem(default_collate_fn_map, Tensor, lambda batch, **_: torch.stack(batch) + 1)
    assert not uses_default_collate(default_collate)


def test_an_own_collate_function_gets_the_samples() -> None:
    assert not uses_default_collate(len)
    reply = MicroBatchReader(tensors(), len, SampleCache(0))[ReadRequest(INDICES, 1, (0, 0))]
    assert reply.batch == len(INDICES)


def test_noise_is_still_drawn_by_the_key_of_the_sample() -> None:
    reader = MicroBatchReader(Noisy(torch.zeros(40)), default_collate, SampleCache(0))
    first, again, other = (reader[ReadRequest(INDICES, key, (0, key // 2))].batch[0] for key in (0, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("name", SOURCES)
def test_the_sample_to_blame_is_named(name: str) -> None:
    reply = MicroBatchReader(SOURCES[name](), default_collate, SampleCache(0))[
        ReadRequest([3, 4000], 1, (0, 0))
    ]
    assert isinstance(reply.failure, DataError)
    assert "sample 4000 cannot be read" in str(reply.failure)


def test_a_cache_keeps_single_samples() -> None:
    reader = MicroBatchReader(tensors(), default_collate, SampleCache(1 << 20))
    assert [reader[ReadRequest(INDICES, 1, (0, 0))].hits for _ in range(2)] == [0, len(INDICES)]


SAMPLE = torch.zeros(1000, dtype=torch.uint8)


def test_the_least_recently_used_sample_goes_first() -> None:
    cache = SampleCache(3 * size_bytes(SAMPLE))
    for index in (1, 2, 3):
        cache.put(index, SAMPLE)
    assert cache.get(1) is SAMPLE
    cache.put(4, SAMPLE)
    assert [cache.get(index) is CACHE_MISS for index in (1, 2, 3, 4)] == [False, True, False, False]
    assert (cache.hits, cache.lookups) == (4, 5)


@pytest.mark.capability("M3")
def test_held_bytes_never_exceed_the_capacity() -> None:
    cache = SampleCache(5_000)
    for index in range(200):
        cache.put(index, np.zeros(index * 7 % 2000, np.uint8))
        assert 0 < cache.held_bytes <= 5_000


def test_a_sample_larger_than_the_cache_is_not_kept() -> None:
    cache = SampleCache(500)
    cache.put(1, b"small")
    cache.put(2, SAMPLE)
    assert cache.get(2) is CACHE_MISS
    assert cache.get(1) == b"small", "and it does not drive the others out"


def test_no_capacity_keeps_and_counts_nothing() -> None:
    cache = SampleCache(0)
    cache.put(1, 1)
    assert cache.get(1) is CACHE_MISS
    assert cache.lookups == 0


@pytest.mark.parametrize(
    "sample",
    [
        torch.zeros(250),
        np.zeros(1000, np.uint8),
        b"x" * 1000,
        (torch.zeros(125), [torch.zeros(125)]),
        {"x": torch.zeros(250), "y": 1},
    ],
)
def test_size_counts_the_payload(sample: object) -> None:
    assert 1000 <= size_bytes(sample) < 2500
