"""What coding, and routes of messages, keep and take on their threads, beside what `plan_memory` says.

How these are counted: tests/allocations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from paceline.comm.comm_thread import CommRounds, CommThread, run_rounds
from paceline.comm.handle import Handle
from paceline.job.cluster import Cluster
from paceline.plan import plan_memory
from paceline.testing import run_ranks
from tests.allocations import SMALL_BYTES, TASKS, Case, allocated, case, kept, named, require_close

CODED = [
    case("replicas=2 codec=int8"),
    case("replicas=2 codec=topk:0.01", "chain", shards=2),
    case("replicas=2 codec=dgc:0.01:0.9", optimizer="sgd"),
    case("replicas=2 codec=lossless", shards=2),
    case("replicas=2 codec=sign sync=local:1", "chain", shards=2),
    case("replicas=1 shard=2 zero=1 codec=int8"),
    case("replicas=1 shard=2 zero=3 codec=topk:0.01", "chain", shards=2),
    case("replicas=1 shard=2 zero=2 codec=lossless"),
    case("replicas=1 shard=2 zero=3 codec=lossless", "chain"),
    case("replicas=1 context=2 codec=int8", shards=1),
    case("replicas=2 codec=lowrank:2"),
    case("replicas=1 shard=2 zero=1 codec=lowrank:4", "chain", shards=2),
]
CODED_ALONE = [
    case("replicas=2 shard=2 zero=1 codec=int8 sync=local:1"),
    case("replicas=2 shard=2 zero=2 codec=topk:0.01 sync=diloco:1", "chain"),
    case("replicas=2 shard=2 zero=3 codec=sign sync=diloco:1"),
    case("replicas=2 pipeline=2 codec=int8 sync=local:1", "chain"),
    case("replicas=2 context=2 codec=lossless sync=local:1", "ring", shards=2),
    case("replicas=2 shard=2 zero=1 codec=lowrank:2 sync=diloco:1"),
    case("replicas=2 tensor=2 codec=int8 sync=diloco:1", "chain", shards=2),
]
BY_HOPS = [
    case("replicas=2 route=ring"),
    case("replicas=2 route=tree", "chain"),
    case("replicas=1 shard=2 zero=1 route=recursive-doubling", "chain"),
    case("replicas=1 shard=2 zero=2 route=ring"),
    case("replicas=1 shard=2 zero=3 route=tree", "chain"),
    case("replicas=2 route=ring sync=local:1", "chain"),
]
BY_HOPS_OF_FOUR = [
    case("replicas=4 route=grid", "chain"),
    case("replicas=1 shard=4 zero=1 route=grid", "chain"),
    case("replicas=1 shard=4 zero=2 route=grid"),
    case("replicas=1 shard=4 zero=2 route=recursive-doubling", "chain"),
    case("replicas=2 shard=2 zero=3 route=tree", "chain"),
    case("replicas=2 shard=2 zero=1 route=ring sync=diloco:1", "chain"),
]
CODED_INSIDE = [
    case("replicas=2 pipeline=2 codec=int8", "chain"),
    case("replicas=2 shard=2 zero=3 codec=sign"),
    case("replicas=2 shard=2 zero=2 codec=lossless"),
    case("replicas=2 tensor=2 codec=topk:0.01"),
    case("replicas=2 shard=2 zero=2 codec=lowrank:2"),
]


def require_kept(cases: list[Case], ranks: int, found: list[list[int]]) -> None:
    """Never less than is there between steps, and at most a tenth more; replicas are alike."""
    wrong = []
    for number, one in enumerate(cases):
        planned = plan_memory(one.recipe, TASKS[one.task](), ranks).ranks
        for rank, real in enumerate(of_rank[number] for of_rank in found):
            plan = planned[rank % len(planned)].stays.total
            if not real - SMALL_BYTES <= plan <= 1.1 * real + SMALL_BYTES:
                wrong.append(f"{named(one)} {one.recipe.strategy.codec}, {rank}: planned {plan}, kept {real}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.capability("L3", "L4")
def test_what_coding_keeps_is_what_was_planned() -> None:
    """By what is there between steps: no profile sees the thread that codes."""
    require_kept(CODED, 2, run_ranks(kept, 2, CODED))


@pytest.mark.capability("L3", "L4")
def test_what_routes_of_messages_keep_is_what_was_planned() -> None:
    require_kept(BY_HOPS, 2, run_ranks(kept, 2, BY_HOPS))


@pytest.mark.soak
@pytest.mark.capability("L3", "L4")
def test_what_routes_of_messages_take_is_what_was_planned() -> None:
    require_kept(BY_HOPS_OF_FOUR, 4, run_ranks(kept, 4, BY_HOPS_OF_FOUR))
    require_close(BY_HOPS, 2, run_ranks(coded_here, 2, BY_HOPS))
    require_close(BY_HOPS_OF_FOUR, 4, run_ranks(coded_here, 4, BY_HOPS_OF_FOUR))


@pytest.mark.capability("L3", "L4")
def test_what_coding_keeps_beside_cuts_is_what_was_planned() -> None:
    few = CODED_INSIDE[:2]
    require_kept(few, 4, run_ranks(kept, 4, few))


@pytest.mark.capability("L3", "I6", "L4")
def test_what_replicas_of_several_ranks_keep_that_code_how_they_moved_is_what_was_planned() -> None:
    few = CODED_ALONE[1:4]
    require_kept(few, 4, run_ranks(kept, 4, few))


@pytest.mark.soak
@pytest.mark.capability("L3", "I6")
def test_coded_movements_of_parts_allocate_what_was_planned() -> None:
    require_kept(CODED_ALONE[:-1], 4, run_ranks(kept, 4, CODED_ALONE[:-1]))
    require_close(CODED_ALONE, 4, run_ranks(coded_here, 4, CODED_ALONE))


@pytest.mark.capability("L3")
def test_a_run_that_chooses_its_codec_keeps_no_more_than_was_planned() -> None:
    chooses = case("replicas=2 codec=auto:int8")
    plan = plan_memory(chooses.recipe, TASKS[chooses.task](), 2).ranks[0].stays.total
    assert max(real for (real,) in run_ranks(kept, 2, [chooses])) <= plan + SMALL_BYTES


def coded_here(cluster: Cluster, cases: list[Case]) -> list[int]:
    """As `allocated`, with all coding on the thread of the profile."""

    def whole(line: CommThread, op: str, hops: Callable[[], Any]) -> Handle:
        return Handle.ready(hops())

    def by_turns(line: CommThread, op: str, rounds: Callable[[int], CommRounds]) -> Handle:
        return Handle.ready(run_rounds(rounds(next(line._places))))

    with patch.object(CommThread, "submit", whole), patch.object(CommThread, "submit_rounds", by_turns):
        return allocated(cluster, cases)


@pytest.mark.soak
@pytest.mark.capability("L3")
def test_coded_sums_allocate_what_was_planned() -> None:
    sums = [one for one in CODED if one.recipe.strategy.rule.word == "every-step"]
    require_close(sums, 2, run_ranks(coded_here, 2, sums))
    require_close(CODED_INSIDE, 4, run_ranks(coded_here, 4, CODED_INSIDE))
