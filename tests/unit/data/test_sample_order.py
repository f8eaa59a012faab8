"""The keyed permutation and the order of samples built on it."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from paceline.data import sample_order
from paceline.data.sample_order import KeyedOrder, KeyedPermutation
from paceline.errors import DataError
from tests.marks import soak_param


def chi_square(counts: np.ndarray) -> float:
    """Pearson's statistic against equal expectation, in standard deviations above its mean."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("num_samples", [*range(1, 70), 255, 256, 257, 1000, 4097, 100_003])
def test_permutation_is_a_bijection(num_samples: int) -> None:
    for permutation_key in (0, 1, 2**63 - 1):
        image = KeyedPermutation(num_samples, permutation_key)[np.arange(num_samples)]
        assert np.array_equal(np.sort(image), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [10**9, 10**9 + 7, 2**31, 2**40 + 1, 2**60])
def test_permutation_of_a_huge_range_stays_inside_and_does_not_collide(num_samples: int) -> None:
    last = num_samples - 1
    positions = np.unique(
        np.concatenate([np.arange(5000), last - np.arange(5000), last // 2 + np.arange(5000)])
    )
    image = KeyedPermutation(num_samples, 7)[positions]
    assert image.dtype == np.int64
    assert image.min() >= 0
    assert image.max() < num_samples
    assert len(np.unique(image)) == len(positions)


def test_every_order_of_a_tiny_range_is_equally_likely() -> None:
    num_keys = 4_000
    orders = Counter(tuple(KeyedPermutation(4, k)[np.arange(4)].tolist()) for k in range(num_keys))
    counts = np.array([orders[order] for order in itertools.permutations(range(4))])
    assert counts.min() > 0
    assert abs(chi_square(counts)) < 4


def test_odd_and_even_permutations_are_equally_likely() -> None:
    """Nine samples would fill a 3 x 3 grid, on which no sequence of rounds makes an odd permutation."""
    num_keys = 1000
    identity = np.eye(9)
    images = (KeyedPermutation(9, k)[np.arange(9)] for k in range(num_keys))
    num_odd = sum(np.linalg.det(identity[image]) < 0 for image in images)
    assert abs(chi_square(np.array([num_odd, num_keys - num_odd]))) < 4


@pytest.mark.parametrize("num_samples", [soak_param(5), 6, soak_param(9), soak_param(10), 13])
def test_pairs_land_uniformly(num_samples: int) -> None:
    """First and last position together: as likely in every pair of places, over keys."""
    ends = np.array([0, num_samples - 1])
    images = [KeyedPermutation(num_samples, k)[ends] for k in range(2500)]
    counts = np.zeros((num_samples, num_samples))
    np.add.at(counts, tuple(np.array(images).T), 1)
    off_diagonal = counts[~np.eye(num_samples, dtype=bool)]
    assert np.trace(counts) == 0
    assert abs(chi_square(off_diagonal)) < 4


def test_one_large_permutation_looks_random() -> None:
    num_samples = 200_000
    image = KeyedPermutation(num_samples, 3)[np.arange(num_samples)]
    cells, _, _ = np.histogram2d(np.arange(num_samples), image, bins=20)
    steps = np.bincount((np.diff(image) % num_samples) * 100 // num_samples, minlength=100)
    assert abs(chi_square(cells)) < 4
    assert abs(chi_square(steps)) < 4
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.01


def test_the_statistics_see_an_order_that_is_not_random() -> None:
    """The twin of the tests above: a stride is a bijection, and must not pass for random."""
    num_samples = 200_000
    image = np.arange(num_samples) * 77_773 % num_samples
    steps = np.bincount((np.diff(image) % num_samples) * 100 // num_samples, minlength=100)
    assert abs(chi_square(steps)) > 1000


@pytest.mark.capability("A5")
def test_epochs_differ_and_the_same_seed_and_epoch_reproduce() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        order = KeyedOrder(1000, 64, seed)
        first = number * order.steps_per_epoch
        return np.concatenate([order.batch(first + i) for i in range(order.steps_per_epoch)]).tolist()

    assert epoch(1, 0) == epoch(1, 0)
    assert epoch(1, 3) == epoch(1, 3)
    assert len({tuple(epoch(seed, number)) for seed in (1, 2) for number in range(5)}) == 10
    assert all(sorted(epoch(1, number)) == list(range(1000)) for number in range(5))


@pytest.mark.parametrize(("num_samples", "size"), [(1, 1), (1, 8), (7, 8), (8, 8), (9, 8), (1003, 32)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_gives_every_sample_once(num_samples: int, size: int, drop_last: bool) -> None:
    if drop_last and num_samples < size:
        with pytest.raises(DataError, match="drop_last leaves nothing"):
            KeyedOrder(num_samples, size, 1, drop_last=True)
        return
    order = KeyedOrder(num_samples, size, 1, drop_last=drop_last)
    for epoch in range(3):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        batches = [order.batch(step) for step in steps]
        assert {order.epoch_of(step) for step in steps} == {epoch}
        assert [len(batch) for batch in batches] == [order.batch_size(step) for step in steps]
        assert all(len(batch) == size for batch in batches[:-1])
        seen = np.concatenate(batches)
        assert len(np.unique(seen)) == len(seen)
        assert len(seen) == (num_samples // size * size if drop_last else num_samples)


def test_without_shuffle_the_order_is_that_of_the_source() -> None:
    order = KeyedOrder(10, 4, 1, shuffle=False)
    assert [order.batch(step).tolist() for step in (0, 1, 2, 3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [0, 1, 2, 3],
    ]


def test_a_part_of_a_batch_is_that_slice() -> None:
    order = KeyedOrder(1000, 64, 5)
    assert np.array_equal(order.batch(20, range(10, 30)), order.batch(20)[10:30])
    assert order.batch(20, range(3, 3)).shape == (0,)


@pytest.mark.capability("A5")
def test_seeking_in_a_billion_samples_costs_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work and memory of a seek depend on the window, not on the epoch or on how far the seek goes."""
    evaluated = []
    encrypt = sample_order._encrypt

    def counted(cells: np.ndarray, *grid: Any) -> np.ndarray:
        evaluated.append(cells.size)
        return encrypt(cells, *grid)

    monkeypatch.setattr(sample_order, "_encrypt", counted)
    order = KeyedOrder(10**9, 256, 1)
    for step in (0, order.steps_per_epoch - 2, 17 * order.steps_per_epoch + 123_456):
        evaluated.clear()
        tracemalloc.start()
        batch = order.batch(step)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(np.unique(batch)) == 256
        assert sum(evaluated) < 1100
        assert peak_bytes < 100_000


def test_no_data_is_an_error_with_a_next_step() -> None:
    with pytest.raises(DataError, match="empty") as caught:
        KeyedOrder(0, 4, 1)
    assert caught.value.next_step
    with pytest.raises(DataError, match="batch of 0"):
        KeyedOrder(4, 0, 1)


def test_the_order_never_changes() -> None:
    """A changed order breaks the resume of every checkpoint there is: change these numbers only knowingly."""
    assert KeyedOrder(1000, 8, 1).batch(0).tolist() == [858, 475, 181, 975, 416, 789, 617, 768]
