"""Partitions: every sample has one client, and the words mean what the papers say."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.federated import partition

CRITICAL_VALUE_171_DEGREES = 217.0  # of chi-squared, for p = 0.01: (20 - 1) x (10 - 1) degrees of freedom


def labels_of(num_samples: int, num_labels: int = 10) -> np.ndarray:
    """Labels in an order that no partition may depend on."""
    draws = random.Random(num_samples)
    return np.array([draws.randrange(num_labels) for _ in range(num_samples)])


def chi_squared(labels: np.ndarray, parts: list[np.ndarray]) -> float:
    """The statistic of independence of client and label."""
    table = np.array([np.bincount(labels[part], minlength=10) for part in parts], dtype=float)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return float(((table - expected) ** 2 / expected).sum())


@pytest.mark.capability("Q3")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        ["iid", "labels:1", "labels:3", "dirichlet:0.5", "dirichlet:100", "quantity:0", "quantity:2"]
    ),
    st.integers(1, 12),
    st.integers(40, 300),
    st.integers(0, 5),
)
def test_every_sample_belongs_to_one_client(how: str, clients: int, num_samples: int, seed: int) -> None:
    labels = labels_of(num_samples)
    parts = partition(labels, how, clients, seed)
    assert len(parts) == clients and all(len(part) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(num_samples))
    again = partition(labels.tolist(), how, clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.capability("Q3")
def test_a_large_concentration_is_iid_by_a_chi_squared_test_and_a_small_one_is_not() -> None:
    labels = labels_of(4000)
    for how in ("iid", "dirichlet:1e6"):
        assert chi_squared(labels, partition(labels, how, 20, 1)) < CRITICAL_VALUE_171_DEGREES, how
    # The twins: partitions that are skewed by label.
    for how in ("dirichlet:0.3", "labels:2"):
        assert chi_squared(labels, partition(labels, how, 20, 1)) > 10 * CRITICAL_VALUE_171_DEGREES, how


def test_a_client_has_at_most_its_shards_of_the_sorted_labels() -> None:
    labels = np.repeat(np.arange(10), 40)
    for part in partition(labels, "labels:2", 20, 3):
        assert len(part) == 20 and len(set(labels[part])) <= 2


def test_sizes_are_skewed_by_sigma_and_equal_without() -> None:
    sizes = {s: [len(p) for p in partition(np.zeros(1000), f"quantity:{s}", 50, 1)] for s in (0, 1.5)}
    assert max(sizes[0]) - min(sizes[0]) <= 1
    assert max(sizes[1.5]) > 5 * np.median(sizes[1.5])


def test_a_draw_with_an_empty_client_is_repeated_with_the_next_key() -> None:
    redraws: list[int] = []
    parts = partition(labels_of(200), "dirichlet:0.2", 25, 2, on_redraw=redraws.append)
    assert redraws and redraws == [*range(1, len(redraws) + 1)] and all(map(len, parts))
    with pytest.raises(DataError, match="each left one of 90 clients") as caught:
        partition(labels_of(100), "dirichlet:0.01", 90, 2)
    assert "fewer clients" in caught.value.next_step


def test_natural_clients_are_those_of_the_column() -> None:
    parts = partition(["b", "a", "b", "c"], "natural", 3, 1)
    assert [part.tolist() for part in parts] == [[1], [0, 2], [3]]
    with pytest.raises(DataError, match=r"3 clients, and federated\.clients = 2") as caught:
        partition(["b", "a", "b", "c"], "natural", 2, 1)
    assert caught.value.next_step == "set federated.clients = 3"


def test_more_clients_or_shards_than_samples_are_refused() -> None:
    with pytest.raises(DataError, match="some would have none"):
        partition([0, 1], "iid", 3, 1)
    with pytest.raises(DataError, match="some would be empty"):
        partition([0, 1, 0, 1], "labels:2", 3, 1)
