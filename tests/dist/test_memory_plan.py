"""What `plan_memory` says before a start, beside the bytes that are allocated in the steps of a run.

How these are counted: tests/allocations.py.
"""

from __future__ import annotations

import pytest

from paceline.testing import run_ranks
from tests.allocations import allocated, case, named, require_close

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
    case("replicas=1 context=2", shards=1),
    case("replicas=1 context=2", memory={"recompute": "segments"}, shards=1),
    case("replicas=1 context=2", "ring"),
    case("replicas=1 context=2", "ring", memory={"recompute": "blocks"}, shards=1),
    case("replicas=1 context=2 route=native", "ring", precision={"compute": "bf16"}, shards=1),
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
    "gpt replicas=1 context=2 sync=every-step adamw auto 1",
    "ring replicas=1 context=2 sync=every-step adamw blocks 1",
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
