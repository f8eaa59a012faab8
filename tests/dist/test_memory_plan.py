"""What `plan_memory` says before a start, beside the bytes that are allocated in the steps of a run.

How these are counted: tests/allocations.py. Activations of a layer are counted by a dispatch mode, from the
begin of its forward to that of the next; so the last layer of a rank, whose end nobody marks, is left out. So
are those of tensor shards, between which Gloo keeps what was sent, for a while that nobody knows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from paceline.job.cluster import Cluster
from paceline.plan import plan_memory
from paceline.plan.activation_memory import LayerTracker, LiveBytes
from paceline.plan.layer_memory import model_layers
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.allocations import Case, allocated, case, named, require_close, require_exact
from tests.marks import soak_param
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
    "chain replicas=2 sync=diloco:1 adamw auto 2",
    "chain replicas=2 sync=every-step route=native adamw auto 2",
    "gpt replicas=1 shard=2 zero=2 sync=every-step route=native adamw auto 4",
    "gpt replicas=1 shard=2 zero=3 sync=every-step route=native adamw auto 4",
    "chain replicas=1 tensor=2 sync=every-step adamw auto 2",
    "gpt replicas=1 pipeline=2 schedule=1f1b rechunk=1,4 sync=every-step adamw auto 2",
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


EXACT = [
    case("replicas=1 shard=2 zero=1", "chain"),
    case("replicas=1 shard=2 zero=2", reproducible=True),
    case("replicas=1 shard=2 zero=1 route=native", "chain", shards=2),
    case("replicas=1 shard=2 zero=2 route=native", "chain"),
    case("replicas=1 shard=2 zero=3 route=native", "chain"),
]
MORE_EXACT = [
    case("replicas=1 shard=2 zero=1"),
    case("replicas=1 shard=2 zero=2"),
    case("replicas=1 shard=2 zero=2", "chain"),
    case("replicas=1 shard=2 zero=3", "chain"),
    case("replicas=1 shard=2 zero=1", "chain", reproducible=True),
    case("replicas=1 shard=2 zero=1 route=native", "chain", reproducible=True),
    case("replicas=1 shard=2 zero=2 route=native"),
]
SIX = {"size": 24, "shards": 6}  # so that a rank has two nodes of the tree
IN_ORDER = [
    case("replicas=1 shard=2 zero=1 route=native", "chain", reproducible=True),
    case("replicas=1 shard=2 zero=1 route=native", "chain", reproducible=True, batch=SIX),
    case("replicas=1 shard=2 zero=2 route=native", reproducible=True, batch=SIX),
    case("replicas=2 route=native", "chain", reproducible=True, batch=SIX),
]
EXACT_OF_FOUR = [
    case("replicas=1 shard=4 zero=1"),
    case("replicas=2 shard=2 zero=1", "chain"),
    case("replicas=2 shard=2 zero=1 sync=local:1", "chain"),
    case("replicas=1 shard=4 zero=2", "chain"),
    case("replicas=1 shard=4 zero=3", "chain"),
]


@pytest.mark.capability("L3", "A11")
@pytest.mark.parametrize("cases", [EXACT, soak_param(MORE_EXACT)], ids=["some", "the others"])
def test_every_byte_of_a_sharded_state_is_planned(cases: list[Case]) -> None:
    """Buckets as wide as their widest row, slices, parts that are gathered, what is being handed on."""
    require_exact(cases, 2, run_ranks(allocated, 2, cases))


@pytest.mark.capability("L3", "A2")
def test_every_byte_of_sums_in_one_order_is_planned() -> None:
    """One node of the tree leaves from where it lies, several are laid together first."""
    require_exact(IN_ORDER[:1], 2, run_ranks(allocated, 2, IN_ORDER[:1]))
    require_close(IN_ORDER[1:], 2, run_ranks(allocated, 2, IN_ORDER[1:]))  # others have what one rank has


@pytest.mark.soak
@pytest.mark.capability("L3", "A11")
def test_every_byte_of_a_state_of_four_ranks_is_planned() -> None:
    require_exact(EXACT_OF_FOUR, 4, run_ranks(allocated, 4, EXACT_OF_FOUR))


@pytest.mark.capability("L3", "L4")
def test_scatters_once_a_step_are_planned_whatever_carries_them() -> None:
    """After an update of four ranks the most is what Gloo takes for itself, of which one row is not seen."""
    require_close(ONCE_OF_FOUR, 4, run_ranks(allocated, 4, ONCE_OF_FOUR))


ONCE_OF_FOUR = [case("replicas=1 shard=4 zero=1 route=native", "chain")]


SCATTERED = [
    case("replicas=1 shard=2 zero=2 pipeline=2 route=native", "chain"),
    case("replicas=1 shard=2 zero=2 context=2 route=native", "ring", shards=2),
]


@pytest.mark.soak
@pytest.mark.capability("L3", "L4")
def test_parameters_come_through_the_memory_of_scatters_beside_other_cuts_too() -> None:
    require_close(SCATTERED, 4, run_ranks(allocated, 4, SCATTERED))


CASES = [
    case("replicas=1 shard=2 zero=2", shards=2, memory={"recompute": "0,2"}),
    case("replicas=1 tensor=2", shards=1),
    case("replicas=1 pipeline=2", shards=1),
]
Bytes = dict[str, dict[str, int]]


def measured(cluster: Cluster, cases: list[Case]) -> list[Bytes]:
    torch.set_num_threads(1)
    return [one_measured(cluster, one) for one in cases]


def one_measured(cluster: Cluster, one: Case) -> Bytes:
    """By kind and layer, in the second step."""
    session = build_test_session(cluster, one.recipe, TASKS[one.task])
    sharded_model, rounds = session.runner.sharded_model, iter(session.rounds())
    layers, live = model_layers(session.task, sharded_model.model), LiveBytes()
    names = {number: name for number, (name, _) in layers.items()}
    places = LayerTracker({number: layer for number, (_, layer) in layers.items()}, live)
    next(rounds)
    live.leave_out([*sharded_model.model.parameters(), *sharded_model.model.buffers()])
    with live, places:
        next(rounds)
    found: Bytes = {"parameters": {}, "moments": {}, "activations": {}}
    for before, after in pairwise(places.entries if one.recipe.strategy.tensor == 1 else ()):
        found["activations"][names[before.layer]] = after.live - before.live
    for slot, p in sharded_model.updates.items():
        home = next(name for name in names.values() if slot.name.startswith(f"{name}."))
        state = sum(t.nbytes for t in session.state.optimizer.state[p].values() if t.numel() > 1)
        add(found["moments"], home, state)
    for slot, p in sharded_model.computes.items():
        home = next(name for name in names.values() if slot.name.startswith(f"{name}."))
        add(found["parameters"], home, p.nbytes)
    list(rounds)
    session.close()
    return found


def add(sizes: dict[str, int], layer: str, num_bytes: int) -> None:
    sizes[layer] = sizes.get(layer, 0) + num_bytes


@pytest.mark.capability("L3")
def test_every_layer_of_every_rank_has_what_was_planned() -> None:
    found, compared = run_ranks(measured, 2, CASES), 0
    for number, one in enumerate(CASES):
        for rank in plan_memory(one.recipe, TASKS[one.task](), 2).ranks:
            rows = {row.layer: row for row in rank.layers}
            for kind, sizes in found[rank.rank][number].items():
                for layer, size in sizes.items():
                    planned = getattr(rows[layer], kind) if layer in rows else 0
                    told = f"{one.recipe.strategy}, rank {rank.rank}, {kind} of {layer}"
                    assert planned == pytest.approx(size, rel=0.1, abs=4096), told
                    compared += size > 4096
    assert compared > 40  # layers, ranks and kinds
