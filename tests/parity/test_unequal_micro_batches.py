"""Products of layouts in which the ranks of the shard axis run different numbers of micro-batches.

The shards of a step are an odd number, and the last batch has fewer samples than shards. Buckets are so small
that a micro-batch has many of them: ranks that wait for each other's buckets in different orders would wait
until the deadline.
"""

from __future__ import annotations

import pytest

from paceline.job.cluster import Cluster
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, make_task
from paceline.testing.rank_processes import RanksFailed
from paceline.verification import compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.marks import soak_param
from tests.parity.test_strategy_combinations import gpt

OF_FOUR = (
    "replicas=1 shard=2 zero=3 tensor=2",
    "replicas=1 shard=2 zero=3 tensor=2 route=native",
    "replicas=1 shard=2 zero=2 tensor=2",
    "replicas=1 shard=2 zero=1 tensor=2",
    "replicas=1 shard=2 zero=3 context=2",
    "replicas=1 shard=2 zero=3 pipeline=2 schedule=1f1b",
    "replicas=1 shard=2 zero=3 pipeline=2 schedule=interleaved:2",
    "replicas=1 shard=2 zero=2 pipeline=2 schedule=interleaved:2 route=native",
)
SHORT = (OF_FOUR[1], OF_FOUR[4], OF_FOUR[7])
OF_EIGHT = (
    "replicas=1 shard=2 zero=3 tensor=2 context=2",
    "replicas=1 shard=2 zero=3 tensor=2 pipeline=2",
    "replicas=1 shard=2 zero=2 tensor=2 pipeline=2 schedule=interleaved:2",
    "replicas=2 shard=2 zero=3 tensor=2",
    "replicas=1 shard=4 zero=3 tensor=2",
    "replicas=1 shard=4 zero=2 tensor=2 route=native",
)


def conclusions(
    cluster: Cluster, strategies: tuple[str, ...], shard_counts: tuple[int, ...]
) -> dict[tuple[str, int], str]:
    """Verify two steps of each strategy, of which the second has three samples; return what is wrong."""
    wrong = {}
    for strategy in strategies:
        for shards in shard_counts:
            recipe = gpt(
                strategy,
                steps=2,
                batch={"size": 21, "shards": shards, "drop_last": False},
                options={
                    **gpt(strategy).options,
                    "layers": 4,
                    "width": 16,
                    "context": 8,
                    "dropout": 0.0,
                    "train_tokens": 24 * 8 + 1,
                },
                runtime={"bucket_bytes": 64, "deadline_seconds": 60},
            )
            report = compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 2)
            if not report.ok or report.steps != 2:
                wrong[strategy, shards] = " ".join(conclusion_lines(report))
    return wrong


@pytest.mark.capability("A11", "C4", "Z2")
@pytest.mark.parametrize("some", [SHORT, soak_param(OF_FOUR)], ids=["some", "all"])
def test_ranks_with_fewer_micro_batches_do_not_stop_the_others(some: tuple[str, ...]) -> None:
    assert run_ranks(conclusions, 4, some, (5,)) == [{}] * 4


@pytest.mark.soak
@pytest.mark.capability("A11", "C4", "Z2")
def test_no_count_of_micro_batches_stops_a_product() -> None:
    assert run_ranks(conclusions, 4, OF_FOUR, (2, 3, 7), deadline=600) == [{}] * 4
    assert run_ranks(conclusions, 8, OF_EIGHT, (4, 5, 7), deadline=900) == [{}] * 8


@pytest.mark.capability("A11", "C4")
def test_an_order_for_each_reduction_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: tensors that tensor ranks split, and those that all of them hold, in two orders."""

    def verify_in_two_orders(cluster: Cluster) -> None:
        reducer = "paceline.parallel.gradient_reduction.ScatterOrder"
        monkeypatch.setattr(reducer, lambda paths, slots: None)
        recipe = gpt(
            OF_FOUR[0],
            steps=1,
            batch={"size": 21, "shards": 5},
            runtime={"bucket_bytes": 64, "deadline_seconds": 5},
        )
        compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 1)

    with pytest.raises(RanksFailed, match="within 5 s"):
        run_ranks(verify_in_two_orders, 4, reuse=False)
