"""What `plan_memory` says before a start, beside the bytes that are allocated in the steps of a run.

How these are counted: tests/allocations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from paceline.cluster import Cluster
from paceline.comm.handle import Handle
from paceline.comm.line import Line, Rounds, run_alone
from paceline.plan import plan_memory
from paceline.testing import run_ranks
from tests.allocations import SMALL_BYTES, Case, allocated, case, kept, named, require_close
from tests.planned_tasks import TASKS

ALONE = [
    case("replicas=1"),
    case("replicas=1", shards=1),
    case("replicas=1", optimizer="sgd"),
    case("replicas=1", memory={"recompute": "blocks"}, shards=1),
    case("replicas=1", memory={"recompute": "segments"}, shards=1),
    case("replicas=1", precision={"compute": "bf16"}, shards=2),
    case("replicas=1", "chain", shards=1),
    case("replicas=1 ", "chain", optimizer="rmsprop"),
    case("replicas=1", reproducible=True),
    case("replicas=1", "chain", reproducible=True),
]
TWO = [
    case("replicas=2"),
    case("replicas=2 route=native"),
    case("replicas=2 route=native", "chain", shards=2),
    case("replicas=2 route=native", reproducible=True),
    case("replicas=1 pipeline=2", "chain", reproducible=True, shards=8),
    case("replicas=1 shard=2 zero=1"),
    case("replicas=1 shard=2 zero=1", "chain"),
    case("replicas=1 shard=2 zero=1 route=native"),
    case("replicas=1 shard=2 zero=1 route=native", "chain"),
    case("replicas=1 shard=2 zero=2"),
    case("replicas=1 shard=2 zero=2 route=native"),
    case("replicas=1 shard=2 zero=3"),
    case("replicas=1 shard=2 zero=3", memory={"recompute": "blocks"}, shards=2),
    case("replicas=1 shard=2 zero=3 route=native"),
    case("replicas=1 shard=2 zero=3 route=native", shards=2),
    case("replicas=1 shard=2 zero=3 route=native", memory={"recompute": "blocks"}),
    case("replicas=1 tensor=2"),
    case("replicas=1 tensor=2", "chain", shards=2),
    case("replicas=1 pipeline=2"),
    case("replicas=1 pipeline=2 route=native"),
    case("replicas=1 pipeline=2 schedule=1f1b", shards=8),
    case("replicas=1 pipeline=2 schedule=1f1b rechunk=1,4", shards=2),
    case("replicas=1 pipeline=2 schedule=1f1b rechunk=2,1", "chain", shards=2),
    case("replicas=1 pipeline=2 schedule=interleaved:2", "chain"),
    case("replicas=1 pipeline=2", memory={"recompute": "blocks"}),
    case("replicas=2 sync=local:1"),
    case("replicas=2 sync=diloco:1", "chain", shards=2),
    case("replicas=1 pipeline=2 sync=pipedream", "chain", steps=40),
    case("replicas=1 pipeline=2 sync=pipedream", "chain", steps=40, shards=2),
    case("replicas=1 pipeline=2 sync=pipedream:2bw", "chain", steps=40),
    case("replicas=1 pipeline=2 sync=pipedream:2bw", "chain", steps=40, shards=2),
    case("replicas=2 sync=hogwild:0"),
    case("replicas=2 sync=hogwild:0", "chain", shards=2),
    case("replicas=2 sync=gossip:0"),
    case("replicas=2 sync=gossip:0", "chain", shards=2),
    case("replicas=2 route=native sync=every-step@2,diloco:1", steps=4),
    case("replicas=2 route=native sync=local:1@2,every-step", "chain", steps=4),
    case("replicas=1 context=2", shards=1),
    case("replicas=1 context=2", memory={"recompute": "segments"}, shards=1),
    case("replicas=1 context=2", "ring"),
    case("replicas=1 context=2", "ring", memory={"recompute": "blocks"}, shards=1),
    case("replicas=1 context=2 route=native", "ring", precision={"compute": "bf16"}, shards=1),
    case("replicas=1 servers=1 sync=server"),
    case("replicas=1 servers=1 sync=server-async", "chain", shards=2),
]
FOUR = [
    case("replicas=1 context=4", shards=1),
    case("replicas=1 context=4", "ring", shards=1),
    case("replicas=2 context=2", "ring", shards=2),
    case("replicas=1 shard=2 context=2 zero=2", "ring", shards=2),
    case("replicas=1 shard=2 context=2 zero=3", shards=2),
    case("replicas=1 tensor=2 context=2", shards=2),
    case("replicas=1 pipeline=2 context=2", "ring", shards=2),
    case("replicas=1 pipeline=2 context=2", "ring", memory={"recompute": "blocks"}, shards=2),
]
SPREAD = [
    case("replicas=2 shard=2 zero=1 sync=local:1", "chain"),
    case("replicas=2 shard=2 zero=1", "chain"),
    case("replicas=2 shard=2 zero=2 sync=diloco:1"),
    case("replicas=2 shard=2 zero=3 sync=diloco:1", "chain"),
    case("replicas=2 shard=2 zero=3 sync=local:1"),
    case("replicas=2 tensor=2 sync=diloco:1", "chain", shards=2),
    case("replicas=2 pipeline=2 sync=diloco:1"),
    case("replicas=2 pipeline=2 sync=local:1", "chain"),
    case("replicas=2 context=2 sync=diloco:1", "ring", shards=2),
]
SWITCHES = [
    case("replicas=2 shard=2 zero=1 route=native sync=every-step@2,local:1", "chain", steps=4),
    case("replicas=2 shard=2 zero=3 route=native sync=diloco:1@2,every-step", "chain", steps=4),
    case("replicas=2 shard=2 zero=2 sync=local:1@2,diloco:1", steps=4),
    case("replicas=2 pipeline=2 sync=diloco:1@2,every-step", steps=4),
    case("replicas=2 tensor=2 sync=every-step@2,local:1", "chain", shards=2, steps=4),
]

FEW = {
    "gpt replicas=2 sync=local:1 adamw auto 4",
    "chain replicas=2 sync=diloco:1 adamw auto 2",
    "chain replicas=2 sync=every-step route=native adamw auto 2",
    "chain replicas=1 shard=2 zero=1 sync=every-step adamw auto 4",
    "chain replicas=1 shard=2 zero=1 sync=every-step route=native adamw auto 4",
    "gpt replicas=1 shard=2 zero=2 sync=every-step route=native adamw auto 4",
    "gpt replicas=1 shard=2 zero=3 sync=every-step adamw auto 4",
    "gpt replicas=1 shard=2 zero=3 sync=every-step route=native adamw auto 4",
    "chain replicas=1 tensor=2 sync=every-step adamw auto 2",
    "gpt replicas=1 pipeline=2 sync=every-step adamw blocks 4",
    "gpt replicas=1 pipeline=2 schedule=1f1b rechunk=1,4 sync=every-step adamw auto 2",
    "chain replicas=1 pipeline=2 sync=pipedream adamw auto 4",
    "gpt replicas=2 sync=hogwild:0 adamw auto 4",
    "chain replicas=2 sync=gossip:0 adamw auto 2",
    "gpt replicas=1 context=2 sync=every-step adamw auto 1",
    "ring replicas=1 context=2 sync=every-step adamw blocks 1",
    "gpt replicas=1 servers=1 sync=server adamw auto 4",
    "chain replicas=2 sync=local:1@2,every-step route=native adamw auto 4",
}


@pytest.mark.capability("L3", "D9")
def test_ranks_allocate_what_was_planned() -> None:
    few = [one for one in TWO if named(one) in FEW]
    assert len(few) == len(FEW)
    require_close(few, 2, run_ranks(allocated, 2, few))


@pytest.mark.soak
@pytest.mark.capability("L3")
def test_every_configuration_allocates_what_was_planned() -> None:
    require_close(ALONE, 1, run_ranks(allocated, 1, ALONE))
    require_close(TWO, 2, run_ranks(allocated, 2, TWO))


@pytest.mark.soak
@pytest.mark.capability("L3")
def test_positions_that_are_split_beside_other_cuts_allocate_what_was_planned() -> None:
    require_close(FOUR, 4, run_ranks(allocated, 4, FOUR))


@pytest.mark.soak
@pytest.mark.capability("L3", "I6")
def test_replicas_of_several_ranks_that_train_alone_allocate_what_was_planned() -> None:
    require_close(SPREAD, 4, run_ranks(allocated, 4, SPREAD))


@pytest.mark.soak
@pytest.mark.capability("L3", "I6")
def test_spread_replicas_that_change_their_rule_allocate_what_was_planned() -> None:
    require_close(SWITCHES, 4, run_ranks(allocated, 4, SWITCHES))


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

    def whole(line: Line, op: str, hops: Callable[[], Any]) -> Handle:
        return Handle.ready(hops())

    def by_turns(line: Line, op: str, rounds: Callable[[int], Rounds]) -> Handle:
        return Handle.ready(run_alone(rounds(next(line._places))))

    with patch.object(Line, "submit", whole), patch.object(Line, "submit_rounds", by_turns):
        return allocated(cluster, cases)


@pytest.mark.soak
@pytest.mark.capability("L3")
def test_coded_sums_allocate_what_was_planned() -> None:
    sums = [one for one in CODED if one.recipe.strategy.rule.word == "every-step"]
    require_close(sums, 2, run_ranks(coded_here, 2, sums))
    require_close(CODED_INSIDE, 4, run_ranks(coded_here, 4, CODED_INSIDE))
