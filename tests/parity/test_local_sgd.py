"""Replicas that train alone and meet at times: exact where the paper says so, and the bytes fall."""

from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import evaluate
from paceline.sync import DiLoCo
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, trajectory_of

SGD = {"name": "sgd", "lr": 0.1}
ADAMW = {"name": "adamw", "lr": 2e-3}


def digits(strategy: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [32]},
        "steps": 24,
        "batch": {"size": 46, "shards": 4},
        "optimizer": SGD,
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def run(cluster: Cluster, recipe: Recipe) -> Trajectory:
    session = build_test_session(cluster, recipe)
    return trajectory_of([stats.loss for stats in session.rounds()], session)


@pytest.mark.capability("I6")
@pytest.mark.parametrize("world", [2, 3])
def test_averaging_after_every_step_of_sgd_is_every_step(world: int) -> None:
    """46 samples in 4 shards: the replicas have unequal shares, and are weighted by their items."""
    local = run_ranks(run, world, digits("sync=local:1"))
    sync = run_ranks(run, world, digits("replicas=all"))
    assert local[0].distance(sync[0]) <= 1e-6
    assert max(abs(a - b) for a, b in zip(local[0].losses, sync[0].losses, strict=True)) <= 1e-6


@pytest.mark.capability("I6")
def test_an_unweighted_mean_is_not_every_step() -> None:
    """The mutation twin."""

    def unweighted(cluster: Cluster, recipe: Recipe) -> Trajectory:
        plain = DiLoCo._agree

        def agree(self: DiLoCo, half: Any, runner: Any) -> Any:
            same = [(replace(tally, count=1.0), update) for tally, update in half.results]
            return plain(self, replace(half, results=same), runner)

        DiLoCo._agree = agree
        return run(cluster, recipe)

    batch = {"size": 46, "shards": 3}  # two shards for one replica, one for the other
    local = run_ranks(unweighted, 2, digits("sync=local:1", batch=batch))
    sync = run_ranks(run, 2, digits("replicas=all", batch=batch))
    assert local[0].distance(sync[0]) > 1e-4


@pytest.mark.capability("I6")
@pytest.mark.parametrize("num_local_steps", [1, 2, 4, 8])
def test_the_bytes_fall_with_the_number_of_local_steps(num_local_steps: int) -> None:
    def sent(cluster: Cluster, strategy: str) -> float:
        session = build_test_session(cluster, digits(strategy))
        list(session.rounds())
        return session.net.ledger.rows["all_reduce", "replica"].sent_bytes

    every = run_ranks(sent, 2, "replicas=all")[0]
    assert run_ranks(sent, 2, f"sync=local:{num_local_steps}")[0] == every / num_local_steps


def losses_of(cluster: Cluster, strategies: list[str]) -> dict[str, list[float]]:
    """Held-out losses after the same samples, three seeds each."""
    found: dict[str, list[float]] = {}
    for strategy in strategies:
        for seed in (1, 2, 3):
            session = build_test_session(cluster, digits(strategy, steps=120, seed=seed, optimizer=ADAMW))
            list(session.rounds())
            evaluation = evaluate(session)
            assert evaluation is not None
            found.setdefault(strategy, []).append(evaluation.loss)
    return found


@pytest.mark.capability("I6", "H8")
def test_the_loss_after_the_same_samples_stays_near_that_of_every_step() -> None:
    strategies = ["replicas=2", "sync=local:4", "sync=diloco:8", "codec=int8", "sync=diloco:8 codec=int8"]
    found = run_ranks(losses_of, 2, strategies, deadline=440)[0]
    right = found["replicas=2"]
    for strategy, losses in found.items():
        assert mean(losses) <= 1.25 * mean(right) + 2 * stdev(right), (strategy, losses, right)


@pytest.mark.capability("I6")
def test_the_outer_optimizer_is_nesterov_of_the_mean_movement() -> None:
    """One round of DiLoCo by hand: mean movement d, momentum m = d, update lr (d + 0.9 m)."""

    def one_round(cluster: Cluster) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        recipe = digits("sync=diloco:3", steps=6, batch={"size": 48, "shards": 4})
        session, alone = build_test_session(cluster, recipe), build_test_session(cluster, recipe)
        start = [p.detach().clone() for p in session.runner.sharded_model.computes.values()]
        next(session.rounds())
        with alone.feed.from_step(0) as stream:
            for _ in range(3):
                alone.rule.inner.step(alone.work, stream, alone.runner, alone.update_step)
                alone.state.step += 1
        moved = [
            a - p.detach() for a, p in zip(start, alone.runner.sharded_model.computes.values(), strict=True)
        ]
        mean_moved = [alone.net.all_reduce(m.clone(), alone.mesh.replica).wait() / 2 for m in moved]
        after = [p.detach().clone() for p in session.runner.sharded_model.computes.values()]
        return start, mean_moved, after, moved

    start, mean_moved, after, moved = run_ranks(one_round, 2)[0]
    for a, d, b, own in zip(start, mean_moved, after, moved, strict=True):
        assert torch.allclose(b, a - 0.7 * (d + 0.9 * d), atol=1e-6)
        assert not torch.allclose(own, d, atol=1e-5)  # the replicas did go different ways


@pytest.mark.capability("Z2")
@pytest.mark.parametrize("strategy", ["sync=local:2", "codec=int8", "replicas=1 pipeline=2 sync=pipedream"])
def test_what_is_approximate_by_nature_is_not_held_against_the_oracle(strategy: str) -> None:
    from paceline.errors import StrategyError
    from paceline.testing.parity import CPU, make_task
    from paceline.verification import compare_with_oracle

    recipe = digits(strategy)
    with pytest.raises(StrategyError, match="is an approximation"):
        compare_with_oracle(recipe, make_task(recipe), Cluster.single(), CPU, 1)
