"""Replicas that train alone on unequal shares, one of them at times on none, end where a plain loop ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.job.cluster import Cluster
from paceline.optim import UserOptimizer
from paceline.parallel.state_hash import find_divergence
from paceline.recipe import Recipe, Strategy
from paceline.session import Session
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.parity.local_sgd_reference import LocalPlan, train_local

SIZE, SHARDS, STEPS = 7, 3, 8
NUM_SAMPLES = 3 * SIZE + 1  # the fourth step of an epoch has one sample: replica 0 has none


class Centre(nn.Module):
    """A buffer that every micro-batch moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        found = x - self.mean
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.25)
        return found


class Expert(nn.Module):
    """A layer that sees some samples only, so that some replicas have no gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :1] > 1.0
        return torch.where(chosen, self.layer(x), x) if bool(chosen.any()) else x


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), Centre(), nn.Tanh(), Expert(), nn.Linear(8, 3)).double()


def samples() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    return [(torch.randn(6).double(), torch.randint(3, ())) for _ in range(NUM_SAMPLES)]


class Walks(UserOptimizer):
    """Its rate grows with how far it has gone, which differs by replica; it keeps numbers and a list."""

    elementwise = True

    def update(self, params: Sequence[Tensor], grads: Sequence[Tensor], step: int) -> None:
        self.group["far"] = self.group.get("far", 0.0) + float(sum(g.abs().sum() for g in grads))
        for p, g in zip(params, grads, strict=True):
            steps = self.state[p].setdefault("steps", [])
            steps.append(g.clone())
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
            p -= self.group["lr"] * (1 + self.group["far"]) / self.state[p]["count"] * sum(steps[-2:])


def adamw(m: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.0, foreach=False)


def walks(m: nn.Module) -> torch.optim.Optimizer:
    return Walks(m.parameters(), lr=0.02)


OPTIMIZERS = {"adamw": adamw, "walks": walks}


def session(cluster: Cluster, sync: str, optimizer: str, **changes: Any) -> Session:
    def task() -> Task:
        def loss(m: nn.Module, batch: Any) -> Loss:
            x, y = batch
            return Loss(nn.functional.cross_entropy(m(x), y, reduction="sum"), len(y))

        return Task(model(), samples(), loss, optimizer=OPTIMIZERS[optimizer])

    recipe = Recipe(
        task="own",
        steps=STEPS,
        batch={"size": SIZE, "shards": SHARDS, "shuffle": False},
        strategy=Strategy.parse(f"sync={sync}"),
        **changes,
    )
    return build_test_session(cluster, recipe, task)


def trained(cluster: Cluster, sync: str, optimizer: str) -> dict[str, Tensor]:
    found = session(cluster, sync, optimizer)
    list(found.rounds())
    return {n.removeprefix("model/"): t.clone() for n, t in found.state.tensors().items() if "model/" in n}


@pytest.mark.capability("I6")
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    ("sync", "outer"), [("local:1", (1.0, 0.0)), ("local:3", (1.0, 0.0)), ("diloco:3", (0.7, 0.9))]
)
def test_unequal_shares_have_their_weights(sync: str, outer: tuple[float, float], replicas: int) -> None:
    plan = LocalPlan(replicas, int(sync[-1]), SIZE, SHARDS, STEPS, *outer)
    right = train_local(model(), samples(), plan, adamw)
    for found in run_ranks(trained, replicas, sync, "adamw"):
        assert max(float((found[n] - t).abs().max()) for n, t in right.items()) < 1e-12


@pytest.mark.capability("I6")
def test_buffers_of_equal_weight_would_be_seen() -> None:
    """The mutation twin: replicas with one and with two shards."""
    plan = LocalPlan(2, 1, SIZE, SHARDS, STEPS)
    right = train_local(model(), samples(), plan, adamw)
    other = train_local(model(), samples(), LocalPlan(1, 1, SIZE, SHARDS, STEPS), adamw)
    assert float((right["1.mean"] - other["1.mean"]).abs().max()) > 1e-6


def resumed(
    cluster: Cluster, sync: str, optimizer: str
) -> list[tuple[int, dict[str, Tensor], dict[str, Tensor]]]:
    """Where the run ends straight, and from a snapshot after each round."""
    schedule = {"schedule": {"decay": "cosine"}}
    straight, kept = session(cluster, sync, optimizer, **schedule), []
    for _ in straight.rounds():
        assert find_divergence(straight.state, straight.mesh, straight.net) is None
        snapshot = straight.snapshot()
        tensors = {name: t.clone() for name, t in snapshot.tensors().items()}
        kept.append((straight.state.step, tensors, json.loads(json.dumps(snapshot.scalars()))))
    end = {name: t.clone() for name, t in straight.state.tensors().items()}
    found = []
    for step, tensors, scalars in kept[:-1]:
        again = session(cluster, sync, optimizer, **schedule)
        again.restore(tensors, scalars)
        list(again.rounds())
        found.append((step, end, {name: t.clone() for name, t in again.state.tensors().items()}))
    return found


@pytest.mark.capability("I6", "N1")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resume_keeps_what_each_replica_has_learned(optimizer: str) -> None:
    for rank in run_ranks(resumed, 2, "diloco:2", optimizer):
        assert len(rank) == 3
        for step, straight, again in rank:
            assert straight.keys() == again.keys()
            apart = [name for name, t in straight.items() if not torch.equal(t, again[name])]
            assert not apart, (step, apart)
