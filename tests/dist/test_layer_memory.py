"""What a plan says of each layer on each rank, beside the tensors that a run has there.

Activations are counted by a dispatch mode, from the begin of a layer's forward to that of the next; so the
last layer of a rank, whose end nobody marks, is left out. So are those of tensor shards, between which Gloo
keeps what was sent, for a while that nobody knows.
"""

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
from tests.allocations import Case, case
from tests.planned_tasks import TASKS

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
