"""Buckets are as small as latency allows: a pure function of alpha and beta of the links."""

from __future__ import annotations

import pytest

from paceline.comm.collective_cost import native_cost
from paceline.comm.link_profile import LinkModel
from paceline.errors import RecipeError
from paceline.recipe import Recipe, Strategy
from paceline.tuning.bucket_choice import MIN_BUCKET_BYTES, choose_bucket_bytes

MOST = 16 << 20
LINKS = [(5e-5, 8e-9), (5e-4, 8e-8), (1e-2, 8e-7), (1e-3, 8e-9)]


def share(alpha: float, beta: float, world: int, num_bytes: int) -> float:
    """Of latency in the sum of a bucket, by the closed form."""
    way = native_cost("all_reduce", num_bytes, world)
    return way.rounds * alpha / (way.rounds * alpha + way.sent_bytes * beta)


@pytest.mark.capability("G10", "G13")
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize(("alpha", "beta"), LINKS)
@pytest.mark.parametrize("most_latency", [0.02, 0.05, 0.5])
def test_a_bucket_is_the_smallest_whose_latency_is_small(
    alpha: float, beta: float, world: int, most_latency: float
) -> None:
    found = choose_bucket_bytes(LinkModel(alpha, beta, 0.0, ()), world, most_latency, MOST).bucket_bytes
    assert MIN_BUCKET_BYTES <= found <= MOST and found & (found - 1) == 0
    assert found == MOST or share(alpha, beta, world, found) <= most_latency
    assert found == MIN_BUCKET_BYTES or share(alpha, beta, world, found // 2) > most_latency


@pytest.mark.capability("G10")
def test_slow_links_have_smaller_buckets_than_links_of_long_latency() -> None:
    sizes = [
        choose_bucket_bytes(LinkModel(alpha, beta, 0.0, ()), 4, 0.05, MOST).bucket_bytes
        for alpha, beta in LINKS
    ]
    assert sizes == [1 << 19, 1 << 19, 1 << 20, MOST]
    for alpha, beta, most, right in (
        (1e-3, 0.0, MOST, MOST),  # no bandwidth was seen
        (0.0, 0.0, MOST, MIN_BUCKET_BYTES),
        (1e-3, 8e-8, 64, 64),
    ):
        assert choose_bucket_bytes(LinkModel(alpha, beta, 0.0, ()), 4, 0.05, most).bucket_bytes == right


def test_the_reason_names_alpha_and_bandwidth() -> None:
    said = str(choose_bucket_bytes(LinkModel(5e-4, 8e-8, 0.0, ()), 4, 0.05, MOST))
    assert said.startswith("buckets: 524,288 bytes (") and "0.5 ms a round at 100 Mbit/s" in said
    assert "bucket_latency = 0.05" in said


@pytest.mark.parametrize("strategy", ["replicas=2 codec=int8", "replicas=2 lanes=2"])
def test_it_is_refused_where_it_would_do_nothing(strategy: str) -> None:
    with pytest.raises(RecipeError, match="bucket_latency"):
        Recipe(task="none", steps=1, strategy=Strategy.parse(strategy), runtime={"bucket_latency": 0.05})
