"""Replicas that meet in pairs over channels: exact limits, the bound in a real job, what is learned."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import pytest
from torch import nn

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import evaluate
from paceline.testing import run_ranks
from paceline.testing.contracts import RuleContract
from paceline.testing.parity import Trajectory, build_test_session, run_oracle, whole_trajectory

STEPS, BOUND = 24, 2


def digits(strategy: str, **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": [32]},
        "steps": STEPS,
        "batch": {"size": 48, "shards": 6},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def of_a_pair(cluster: Cluster) -> Trajectory:
    session = build_test_session(cluster, digits("sync=gossip:0"))
    return whole_trajectory([stats.loss for stats in session.rounds()], session)


@pytest.mark.capability("I2", "I4", clause="without a server: two replicas at S = 0 are every-step")
def test_two_replicas_that_wait_for_each_other_are_every_step() -> None:
    right = run_oracle(digits("replicas=1"), STEPS)
    for end in run_ranks(of_a_pair, 2):
        assert end.distance(right) < 1e-5


@pytest.mark.capability("I2", "Z1")
class TestGossip(RuleContract):
    strategy, num_ranks = "replicas=2 sync=gossip:0", 2


def alone(cluster: Cluster) -> list[Trajectory]:
    sessions = [
        build_test_session(cluster, digits(f"replicas=1 sync={sync}")) for sync in ("every-step", "gossip:2")
    ]
    return [whole_trajectory([stats.loss for stats in session.rounds()], session) for session in sessions]


def test_one_replica_alone_has_the_bits_of_every_step() -> None:
    ((plain, gossip),) = run_ranks(alone, 1)
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


def asked_to_stop(cluster: Cluster, slow: int) -> tuple[int, float, float]:
    """Rank 1 is asked in its tenth step; one rank is slower than the others."""
    session = build_test_session(cluster, digits(f"sync=gossip:{BOUND}"))
    session.parts.feed = replace(session.feed, intervals=(), num_steps=40_000)
    session.runner.sharded_model.model.register_forward_pre_hook(
        lambda module, inputs: time.sleep(0.01 * (cluster.global_rank == slow))
    )
    if cluster.global_rank == 1:
        session.rule._stop_requested = session.rule.inner._stop_requested = lambda: session.state.step >= 10
    stops = [stats.stops for stats in session.rounds()]
    state, weight = session.state, session.rule.push_sum.weight
    assert weight == 3.0  # nothing is under way
    return state.step, float(session.sum(state.step)), stops[-1]


@pytest.mark.capability("I2", clause="without a server, between hosts")
@pytest.mark.parametrize("slow", [1, 2])
def test_a_stop_ends_all_after_the_same_step_and_soon(slow: int) -> None:
    """Nobody is further ahead than the bound, a turn of the pairs, and the step that it was in."""
    (step, total, stops), *others = run_ranks(asked_to_stop, 3, slow)
    assert others == [(step, total, stops)] * 2 and total == 3 * step and stops == 1
    assert 10 <= step <= 10 + BOUND + 3 + 1  # the next pause is at step 2,000


def learned(cluster: Cluster, strategies: tuple[str, ...], seeds: tuple[int, ...]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for strategy in strategies:
        for seed in seeds:
            session = build_test_session(cluster, digits(strategy, seed=seed, steps=160))
            for _ in session.rounds():
                pass
            evaluation = evaluate(session)
            assert evaluation is not None
            found.setdefault(strategy, []).append(evaluation.loss)
            session.close()
    return found


@pytest.mark.soak
@pytest.mark.capability("I2", clause="loss over seeds")
def test_it_learns_as_every_step_does() -> None:
    """Five seeds: the mean loss within 15 % and two deviations of every-step's."""
    strategies = ("sync=every-step", "sync=gossip:0", "sync=gossip:2", "sync=gossip:8")
    found = run_ranks(learned, 3, strategies, (1, 2, 3, 4, 5), deadline=600.0)[0]
    right = found["sync=every-step"]
    for strategy in strategies[1:]:
        losses = found[strategy]
        assert mean(losses) <= 1.15 * mean(right) + 2 * max(stdev(right), stdev(losses)), found
