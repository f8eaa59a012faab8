"""Replicas that meet in pairs over channels: exact limits, the bound in a real job, what is learned."""

from __future__ import annotations

import time
from functools import partial
from statistics import mean, stdev
from typing import Any

import pytest
from torch import nn

from paceline.job.cluster import Cluster
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import build_test_session, run_oracle, whole_trajectory
from tests.parity.training_runs import asked_to_stop, each_case, held_out_losses, train_whole
from tests.recipes import recipe_of

STEPS, BOUND = 24, 2


digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [32]},
    steps=STEPS,
    batch={"size": 48, "shards": 6},
    optimizer={"name": "sgd", "lr": 0.1},
)


@pytest.mark.capability("I2", "I4", clause="without a server: two replicas at S = 0 are every-step")
def test_two_replicas_that_wait_for_each_other_are_every_step() -> None:
    right = run_oracle(digits("replicas=1"), STEPS)
    for end in run_ranks(train_whole, 2, digits("sync=gossip:0")):
        assert end.distance(right) < 1e-5


@pytest.mark.capability("I2", "Z1")
class TestGossip(RuleContract):
    strategy, num_ranks = "replicas=2 sync=gossip:0", 2


def test_one_replica_alone_has_the_bits_of_every_step() -> None:
    recipes = [(digits(f"replicas=1 sync={sync}"),) for sync in ("every-step", "gossip:2")]
    ((plain, gossip),) = run_ranks(each_case, 1, train_whole, recipes)
    assert plain.distance(gossip) == 0.0


def with_a_slow_one(cluster: Cluster) -> dict[str, Any]:
    session = build_test_session(cluster, digits(f"sync=gossip:{BOUND}"))

    def wait(module: nn.Module, inputs: Any) -> None:
        time.sleep(0.01 * (cluster.global_rank == 1))

    session.runner.sharded_model.model.register_forward_pre_hook(wait)
    rounds = list(session.rounds())
    weight, sent = session.rule.push_sum.weight, session.net.ledger.rows["send", "channel"].calls
    sums = session.net.ledger.rows["all_reduce", "world"].calls
    end = whole_trajectory([stats.loss for stats in rounds], session)
    session.close()
    return {"rounds": [stats.metrics for stats in rounds], "weight": weight, "sent": sent, "end": end,
            "sums": sums, "samples": sum(stats.num_samples for stats in rounds)}  # fmt: skip


@pytest.mark.capability("I2", "I3", clause="without a server, between hosts")
def test_a_slow_replica_is_never_more_than_the_bound_late_and_all_end_alike() -> None:
    first, *others = found = run_ranks(with_a_slow_one, 3)
    for rank in found:
        assert all(metrics["staleness_max"] <= BOUND for metrics in rank["rounds"])
        assert rank["samples"] == STEPS * 48 and rank["weight"] == 3.0
        assert rank["sums"] == 3 * len(first["rounds"])  # all parameters, the tally, how late they were
    ends = 3 * 2 * len(first["rounds"])  # each tells each how far it has come
    assert sum(rank["sent"] for rank in found) == 2 * STEPS + ends  # one of three rests
    for other in others:
        assert other["end"].distance(first["end"]) == 0.0
        assert other["rounds"] == first["rounds"]


def stopped(cluster: Cluster, slow: int) -> tuple[int, float, float]:
    """Rank 1 is asked to stop; one rank is slower than the others."""
    session = asked_to_stop(cluster, digits(f"sync=gossip:{BOUND}"))
    session.runner.sharded_model.model.register_forward_pre_hook(
        lambda module, inputs: time.sleep(0.01 * (cluster.global_rank == slow))
    )
    stops = [stats.stops for stats in session.rounds()]
    state, weight = session.state, session.rule.push_sum.weight
    assert weight == 3.0  # nothing is under way
    return state.step, float(session.sum(state.step)), stops[-1]


@pytest.mark.capability("I2", clause="without a server, between hosts")
@pytest.mark.parametrize("slow", [1, 2])
def test_a_stop_ends_all_after_the_same_step_and_soon(slow: int) -> None:
    """Nobody is further ahead than the bound, a turn of the pairs, and the step that it was in."""
    (step, total, stops), *others = run_ranks(stopped, 3, slow)
    assert others == [(step, total, stops)] * 2 and total == 3 * step and stops == 1
    assert 10 <= step <= 10 + BOUND + 3 + 1  # the next pause is at step 2,000


def learned(cluster: Cluster, strategy: str) -> list[float]:
    return held_out_losses(cluster, (digits(strategy, seed=seed, steps=160) for seed in (1, 2, 3, 4, 5)))


@pytest.mark.soak
@pytest.mark.capability("I2", clause="loss over seeds")
def test_it_learns_as_every_step_does() -> None:
    """Five seeds: the mean loss within 15 % and two deviations of every-step's."""
    strategies = ("sync=every-step", "sync=gossip:0", "sync=gossip:2", "sync=gossip:8")
    found = run_ranks(each_case, 3, learned, [(one,) for one in strategies], deadline=600.0)[0]
    right, *others = found
    for losses in others:
        assert mean(losses) <= 1.15 * mean(right) + 2 * max(stdev(right), stdev(losses)), found
