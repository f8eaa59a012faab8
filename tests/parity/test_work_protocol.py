"""Work is a protocol: actors and servers hand it out, and micro-batches may come in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.data import GeneratedBatches, LockstepWork, MicroBatch, TrainingFeed
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import Components, Session
from paceline.state.keys import key
from paceline.task import Loss, Task
from paceline.testing.parity import build_test_session, make_task, run_strategy
from paceline.testing.rank_processes import run_ranks

STEPS, RATE = 5, 0.1


@dataclass(frozen=True)
class Episodes:
    """What actors play: no samples that lie somewhere, other numbers in every step, the last first."""

    rank: int = 0
    ranks: int = 1
    shards: int = 6
    steps_per_epoch: int = 0

    def num_samples(self, step: int) -> int:
        return sum(2 + shard for shard in range(self._episodes(step)))

    def num_micro_batches(self, step: int) -> int:
        return len(self.micro_batches(step))

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        mine = reversed(range(self.rank, self._episodes(step), self.ranks))
        return tuple(MicroBatch(step, s, np.arange(2 + s), key(7, step, s), version) for s in mine)

    def part(self, number: int, of: int) -> Episodes:
        return replace(self, rank=number, ranks=of)

    def _episodes(self, step: int) -> int:
        return 4 + step % 3


class Actor:
    """Plays with the weights as they are: it sees what the key draws, and does what they say."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.versions: list[int | None] = []

    @torch.no_grad()
    def __call__(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        self.versions.append(micro_batch.version)
        generator = torch.Generator().manual_seed(micro_batch.key)
        seen = torch.randn(len(micro_batch.indices), 3, generator=generator)
        return seen, seen.sum(1, keepdim=True) + self.model(seen).tanh()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    seen, target = batch
    return Loss((model(seen) - target).square().sum(), len(seen))


def build() -> Task:
    """The one sample that it has is looked at before the first step, and never trained on."""
    torch.manual_seed(2)
    return Task(model=nn.Linear(3, 1), data=TensorDataset(torch.ones(1, 3), torch.zeros(1, 1)), loss=loss)


def play(session: Session) -> tuple[Tensor, list[float], list[int | None]]:
    """Weights and losses after some steps of episodes, and the versions that were asked for."""
    actor = Actor(session.state.model)
    place = session.mesh.data
    feed = TrainingFeed(
        Episodes().part(place.rank, place.size), GeneratedBatches(actor, torch.device("cpu")), STEPS
    )
    losses = [stats.loss for stats in session.rule.rounds(feed, session.runner, session.update_step)]
    session.close()
    return session.state.model.weight.detach().clone(), losses, actor.versions


def recipe(strategy: str) -> Recipe:
    return Recipe(
        task="given",
        steps=STEPS,
        batch={"size": 4},
        optimizer={"name": "sgd", "lr": RATE},
        strategy=strategy,
        runtime={"device": "cpu"},
    )


def played(cluster: Cluster, strategy: str) -> tuple[Tensor, list[float], list[int | None]]:
    return play(build_test_session(cluster, recipe(strategy), build))


def plain() -> tuple[Tensor, list[float]]:
    """All episodes of a step, one after another, and one update."""
    task = build()
    actor, losses = Actor(task.model), []
    for step in range(STEPS):
        task.model.zero_grad()
        found = [loss(task.model, actor(micro_batch)) for micro_batch in Episodes().micro_batches(step)]
        count = sum(float(one.count) for one in found)
        torch.stack([one.total for one in found]).sum().div(count).backward()
        losses.append(sum(float(one.total.detach()) for one in found) / count)
        with torch.no_grad():
            for p in task.model.parameters():
                p -= RATE * p.grad
    return task.model.weight.detach(), losses


@pytest.mark.parametrize("world", [1, 2])
def test_actors_drive_the_training_step(world: int) -> None:
    weight, losses = plain()
    ranks = run_ranks(played, world, f"replicas={world}")
    for found, told, versions in ranks:
        assert torch.allclose(found, weight, rtol=1e-5, atol=1e-6)
        assert told == pytest.approx(losses, rel=1e-5)
        assert set(versions) == {None}
    assert sum(len(versions) for _, _, versions in ranks) == sum(4 + step % 3 for step in range(STEPS))


def test_a_server_hands_out_the_same_episodes_with_the_version_of_its_weights() -> None:
    weight, losses = plain()
    (found, told, none), *workers = run_ranks(played, 3, "replicas=2 servers=1 sync=backup:0")
    assert torch.allclose(found, weight, rtol=1e-5, atol=1e-6) and none == []
    assert told == pytest.approx(losses, rel=1e-5)
    for own, _, versions in workers:
        assert torch.equal(own, found)
        assert versions == sorted(versions) and set(versions) == set(range(STEPS))


# In another order


@dataclass(frozen=True)
class AnyOrder(LockstepWork):
    """The micro-batches of a step, in an order of its own in every step."""

    def micro_batches(self, step: int, version: int | None = None) -> tuple[MicroBatch, ...]:
        found = super().micro_batches(step, version)
        return tuple(random.Random(step + 1).sample(found, len(found)))


def digits(strategy: str, *, reproducible: bool = True) -> Recipe:
    return Recipe(
        task="digits",
        options={"model": "convnet", "channels": 4, "dropout": 0.1},
        steps=4,
        batch={"size": 30, "shards": 8},
        reproducible=reproducible,
        strategy=strategy,
        runtime={"device": "cpu"},
    )


def ends(cluster: Cluster, strategy: str, *, reproducible: bool = True) -> tuple[float, bool, bool]:
    """How far another order ends from the usual one, whether losses are equal, and whether it was another."""
    chosen = digits(strategy, reproducible=reproducible)
    usual = run_strategy(cluster, chosen)
    other = run_strategy(cluster, chosen, components=Components(work=AnyOrder))
    session = build_test_session(cluster, chosen, lambda: make_task(chosen), Components(work=AnyOrder))
    shards = [[one.shard for one in session.work.micro_batches(step)] for step in range(4)]
    session.close()
    return usual.distance(other), usual.losses == other.losses, all(s == sorted(s) for s in shards)


@pytest.mark.parametrize(("world", "strategy"), [(1, "replicas=1"), (1, "lanes=2"), (2, "replicas=2")])
def test_any_order_of_micro_batches_gives_the_same_bits(world: int, strategy: str) -> None:
    """With norms over the batch, whose changes are added by shard, and dropout."""
    assert run_ranks(ends, world, strategy) == [(0.0, True, False)] * world


def test_without_the_tree_the_order_is_a_matter_of_rounding() -> None:
    """The twin: it shows, and is no more than that."""
    (distance, _, _) = ends(Cluster.single(), "replicas=1", reproducible=False)
    assert 0.0 < distance < 1e-4
