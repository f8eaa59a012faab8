"""What `plan_memory` says of lanes, beside the bytes that are allocated in the steps of a run.

Lanes run shards, or are the stages. What each has at most counts as if all had it at a time; see
tests/by_lane.py.
"""

from __future__ import annotations

import gc

import pytest
import torch

from paceline.job.cluster import Cluster
from paceline.plan import plan_memory
from paceline.plan.memory_budget import check_budget
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.allocations import Case, case, require_close
from tests.by_lane import ByLane
from tests.mapped import Mapped
from tests.planned_tasks import TASKS

ALONE = [
    case("replicas=1 lanes=2"),
    case("replicas=1 lanes=4", "chain"),
    case("replicas=1 pipeline=2 lanes=2 schedule=1f1b", shards=16),
    case("replicas=1 pipeline=6 lanes=6", "long", shards=8),
    case("replicas=1 lanes=2", shards=8),
    case("replicas=1 lanes=2", memory={"recompute": "blocks"}, shards=2),
    case("replicas=1 pipeline=2 lanes=2"),
    case("replicas=1 pipeline=2 lanes=2", "long"),
    case("replicas=1 pipeline=3 lanes=3 schedule=1f1b", "long", shards=8),
    case("replicas=1 pipeline=4 lanes=4", "chain", shards=16),
    case("replicas=1 pipeline=2 lanes=2 schedule=1f1b", optimizer="sgd"),
    case("replicas=1 pipeline=2 lanes=2", memory={"recompute": "blocks"}),
    case("replicas=1 pipeline=4 lanes=4 schedule=1f1b", shards=16),
]
TWO = [
    case("replicas=2 lanes=2 route=native", "chain", shards=8),
    case("replicas=1 shard=2 zero=1 lanes=2 route=native", "chain"),
    case("replicas=1 shard=2 zero=2 pipeline=2 lanes=2", "long"),
    case("replicas=2 lanes=2"),
    case("replicas=2 lanes=2 route=native", "chain", shards=4),
    case("replicas=2 lanes=3", "chain", shards=8),
    case("replicas=2 lanes=2 route=native", "chain", shards=6),
    case("replicas=1 shard=2 zero=1 lanes=2"),
    case("replicas=1 shard=2 zero=1 lanes=2", "chain"),
    case("replicas=1 shard=2 zero=2 lanes=2 route=native"),
    case("replicas=1 shard=2 zero=2 lanes=2 route=native", "chain", shards=6),
    case("replicas=2 pipeline=2 lanes=2"),
    case("replicas=2 pipeline=3 lanes=3 route=native schedule=1f1b", "chain", shards=8),
    case("replicas=1 shard=2 zero=1 pipeline=2 lanes=2"),
    case("replicas=1 shard=2 zero=2 pipeline=2 lanes=2 route=native schedule=1f1b", "chain"),
]
FOUR = [
    case("replicas=2 shard=2 zero=1 lanes=2", "chain", shards=8),
    case("replicas=2 shard=2 zero=1 lanes=2 route=native", "chain", shards=8),
    case("replicas=1 shard=4 zero=2 lanes=2 route=native", "chain", shards=8),
    case("replicas=2 shard=2 zero=1 pipeline=2 lanes=2 route=native", "chain", shards=16),
]


def allocated(cluster: Cluster, cases: list[Case]) -> list[int]:
    """By case, the most bytes of this rank."""
    torch.set_num_threads(1)
    found = []
    for one in cases:
        others, lanes = Mapped(), ByLane()
        with others.counting(), lanes.counting():
            session = build_test_session(cluster, one.recipe, TASKS[one.task])
            for _ in session.rounds():
                pass
        found.append(lanes.most - others.num_bytes)
        session.close()
        del session
        gc.collect()
    return found


@pytest.mark.capability("L3", "A7")
def test_lanes_allocate_what_was_planned() -> None:
    for cases, ranks in ((ALONE[:4], 1), (TWO[:3], 2)):
        require_close(cases, ranks, run_ranks(allocated, ranks, cases))


@pytest.mark.soak
@pytest.mark.capability("L3")
def test_all_lanes_allocate_what_was_planned() -> None:
    for cases, ranks in ((ALONE, 1), (TWO, 2), (FOUR, 4)):
        require_close(cases, ranks, run_ranks(allocated, ranks, cases))


@pytest.mark.capability("L3")
@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("replicas=1 pipeline=2 lanes=2 schedule=1f1b", 1),
        ("replicas=1 shard=2 zero=1 lanes=2", 2),
    ],
)
def test_a_budget_of_lanes_is_kept(words: str, ranks: int) -> None:
    recipe, task = case(words).recipe, TASKS["gpt"]()
    plain, lean = (
        plan_memory(recipe.replace(memory={"recompute": how}), task, ranks) for how in ("none", "blocks")
    )
    budget = (plain.peak + lean.peak) // 2
    verdict = check_budget(recipe.replace(memory={"budget": budget}), task, ranks)
    assert lean.peak <= verdict.plan.peak <= budget < plain.peak
    assert verdict.refusal is None and verdict.plan.recipe.memory.recomputes
    tight = check_budget(recipe.replace(memory={"budget": lean.peak // 2}), task, ranks)
    assert tight.refusal is not None
