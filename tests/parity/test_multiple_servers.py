"""Several servers are one: parts of the model lie on each, and the run is that of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.channel import ChannelMessage, MessageChannel
from paceline.data import TrainingFeed
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.parallel import server_partition
from paceline.parallel.server_partition import plan_partition
from paceline.recipe import Recipe, Strategy
from paceline.sync.server.server_common import ShardServer
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import Trajectory, build_test_session, make_task, run_oracle, trajectory_of

STEPS = 12
TWO = "servers=2 sync=server"
CLIPPED = {"name": "adamw", "lr": 5e-3, "clip_norm": 0.05}


def digits(strategy: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [32], "dropout": 0.1},
        "steps": STEPS,
        "batch": {"size": 46, "shards": 6},
        "optimizer": CLIPPED,
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


CONV = digits(TWO, options={"model": "convnet"}, optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9})


def trained(cluster: Cluster, recipe: Recipe) -> tuple[Trajectory, dict[str, Any]]:
    """Where a run ends, and what this rank held and knew."""
    session = build_test_session(cluster, recipe)
    losses = [stats.loss for stats in session.rounds()]
    found = trajectory_of(losses, session)
    told = {
        "moments": sum(t.numel() * t.element_size() for t in found.optimizer.values() if t.dim()),
        "notes": dict(session.events.take()),
        **session.rule.ledger.record(),
    }
    session.close()
    return found, told


class OneRound(TrainingFeed):
    """No pause before the end."""

    def next_pause(self, step: int) -> int:
        return self.num_steps


class Left(Exception):
    """A rank has closed its channel."""


class Leaving:
    """Closes its end with its tenth message in hand."""

    def __init__(self, inner: MessageChannel) -> None:
        self.inner, self.heard = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        message = self.inner.receive(deadline_seconds)
        self.heard += 1
        if self.heard == 10:
            self.inner.close()
            raise Left
        return message


def norm_of_one(self: ShardServer, own: Sequence[Tensor], updates: int) -> Sequence[Tensor]:
    """The twin: each server clips by what it holds itself."""
    return own


def held_by_nobody(*args: Any) -> Any:
    """The twin: one tensor is on no server."""
    plan = plan_partition(*args)
    largest = max(plan, key=lambda name: max(stop - start for start, stop in filter(None, plan[name])))
    return plan | {largest: (None,) * len(plan[largest])}


def of_two_servers(cluster: Cluster) -> list[Any]:
    """Runs of one job, the last two with a mistake in them."""
    whole = [
        trained(cluster, recipe) for recipe in (digits(TWO), CONV, digits(f"{TWO} partition=max-size:4096"))
    ]
    ShardServer._norms, kept = norm_of_one, ShardServer._norms
    whole.append(trained(cluster, digits(TWO)))
    ShardServer._norms = kept
    server_partition.plan_partition = held_by_nobody
    return [*whole, trained(cluster, digits(TWO))]


@pytest.mark.capability("B2", "B4")
def test_two_servers_and_two_workers_are_two_replicas() -> None:
    """With a clip by the norm of all, AdamW, BatchNorm and several partitioners; and two twins."""
    ranks = run_ranks(of_two_servers, 4)
    right, conv = run_oracle(digits("replicas=1"), STEPS), run_oracle(CONV, STEPS)
    for mlp, cnn, cut_otherwise, alone, nobody in ranks:
        assert mlp[0].distance(right) <= 1e-6 and cut_otherwise[0].distance(right) <= 1e-6
        assert cnn[0].distance(conv) <= 1e-5
        assert mlp[0].losses == ranks[0][0][0].losses
        assert alone[0].distance(right) > 1e-3, "each server clips by its own norm, and nobody notices"
        assert nobody[0].distance(right) > 1e-3, "a tensor is updated by nobody, and nobody notices"
    first, second, *workers = (rank[0][1] for rank in ranks)
    assert first["notes"]["servers"]["bytes"] == [first["moments"] // 2, second["moments"] // 2]
    assert all(worker["moments"] == 0 for worker in workers)
    assert all(rank["applied"] == 2 * STEPS and rank["dropped"] == 0 for rank in (first, second, *workers))


def as_one(cluster: Cluster, strategy: str) -> list[Trajectory]:
    """Values as they are, and coded without loss; no clip, so that no sum of squares has another order."""
    found = []
    for recipe in (digits(strategy, optimizer={}), digits(f"{strategy} codec=lossless", optimizer={})):
        session = build_test_session(cluster, recipe, lambda r=recipe: plainly_updated(r))
        found.append(trajectory_of([stats.loss for stats in session.rounds()], session))
    return found


def plainly_updated(recipe: Recipe) -> Task:
    """A fused kernel rounds the end of a tensor otherwise than its middle, so bits would follow the cut."""
    return replace(
        make_task(recipe), optimizer=lambda model: torch.optim.AdamW(model.parameters(), 5e-3, fused=False)
    )


@pytest.mark.capability("B4")
@pytest.mark.parametrize("rule", ["server", "server-async"])
def test_two_servers_have_the_bits_of_one(rule: str) -> None:
    """One worker's order of arrival is the only one, so an asynchronous run repeats another."""
    num_workers = 1 + (rule == "server")
    two, one = (
        run_ranks(as_one, servers + num_workers, f"servers={servers} sync={rule}") for servers in (2, 1)
    )
    for rank in two:
        for mine, theirs in zip(rank, one[0], strict=True):
            assert mine.distance(theirs) == 0.0 and mine.losses == theirs.losses


def lossy(cluster: Cluster) -> list[Trajectory]:
    """Codecs that lose something, backup workers, and nobody waiting."""
    strategies = ("server codec=int8", "server codec=topk:0.2", "backup:1", "server-async", "bounded:1")
    return [
        trained(cluster, digits(f"servers=2 sync={one}", steps=40, optimizer={"name": "sgd", "lr": 0.1}))[0]
        for one in strategies
    ]


@pytest.mark.capability("B4", "I7")
def test_codecs_and_rules_go_with_two_servers() -> None:
    first, *others = run_ranks(lossy, 4)
    for number, found in enumerate(first):
        assert found.losses[-1] < 0.8 * found.losses[0]
        assert all(rank[number].distance(found) == 0.0 for rank in others)


def half_way(cluster: Cluster) -> tuple[dict[str, Tensor], dict[str, Any]]:
    session = build_test_session(cluster, digits(TWO))
    for _, _stats in zip(range(STEPS // 2), session.rounds(), strict=False):
        pass
    found = session.snapshot()
    assert session.state.step == STEPS // 2
    return {name: t.detach().clone() for name, t in found.tensors().items()}, dict(found.scalars())


def onwards(cluster: Cluster, strategy: str, tensors: Any, scalars: Any) -> Trajectory:
    session = build_test_session(cluster, digits(strategy))
    session.restore({n: t for n, t in tensors.items() if "servers" in strategy or "work/" not in n}, scalars)
    list(session.rounds())
    return trajectory_of([], session)


@pytest.mark.capability("B4", "N3")
def test_a_run_goes_on_with_other_numbers_of_servers_and_workers() -> None:
    """Two servers and two workers, then three and one, or replicas: all end where one process ends."""
    tensors, scalars = run_ranks(half_way, 4)[2]
    right = run_oracle(digits("replicas=1"), STEPS)
    for strategy, num_ranks in (("servers=3 sync=server", 4), ("replicas=2", 2)):
        for end in run_ranks(onwards, num_ranks, strategy, tensors, scalars):
            assert end.distance(right) <= 1e-6


def with_a_loss(cluster: Cluster, lost: int, steps: int) -> str:
    """One rank closes its channel and leaves; what the others say."""
    recipe = digits("servers=2 sync=server-async", steps=steps, runtime={"deadline_seconds": 20.0})
    session = build_test_session(cluster, recipe)
    feed = session.feed
    session.parts.feed = OneRound(feed.work, feed.loader, feed.num_steps)
    if cluster.global_rank == lost:
        session.rule.channel = Leaving(session.rule.channel)
    try:
        list(session.rounds())
    except (Left, CommunicationError) as error:
        return f"{type(error).__name__} {error}"
    weight = trajectory_of([], session).parameters["layers.0.weight"]
    return f"whole {session.rule.ledger.applied} {weight.sum()}"


@pytest.mark.capability("B4", "N5")
def test_a_server_that_is_lost_is_named_and_a_worker_is_not_missed() -> None:
    first, left, *workers = run_ranks(with_a_loss, 4, 1, 400)
    assert left.startswith("Left")
    assert "server rank 1 is lost" in first
    assert all("rank 1 is gone" in worker or "rank 0 is gone" in worker for worker in workers)
    first, second, left, worker = run_ranks(with_a_loss, 4, 2, 40)
    assert left.startswith("Left")
    assert first.startswith("whole 80 ") and first == second == worker


@pytest.mark.soak
@pytest.mark.capability("B2", "B4")
class TestTwoServers(RuleContract):
    strategy, num_ranks, interrupts = "servers=2 sync=server", 4, 2
