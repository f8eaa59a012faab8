"""The sample cache: bounded in bytes, least recently used out first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.data.sample_reader import CACHE_MISS, SampleCache, size_bytes

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
