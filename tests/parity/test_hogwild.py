"""Replicas of one host on the same parameters, without a lock; and a store of which the host has one copy."""

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from torch import Tensor, nn

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import Session, evaluate
from paceline.testing import run_ranks
from paceline.testing.parity import (
    Trajectory,
    build_test_session,
    make_task,
    run_oracle,
    run_strategy,
    trajectory_of,
    whole_trajectory,
)
from tests.parity.training_runs import asked_to_stop
from tests.recipes import recipe_of

STEPS = 80


digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [32]},
    steps=STEPS,
    batch={"size": 48, "shards": 6},
    optimizer={"name": "sgd", "lr": 0.1},
)


def mapping_of(t: Tensor) -> tuple[int, int, int]:
    """The file that a tensor lies in (0: none), its bytes, and how many of them count for this process."""
    found, inside = (0, 0, 0), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(x, 16) for x in words[0].split("-"))
            inside = start <= t.data_ptr() < end
            found = (int(words[4]), end - start, 0) if inside else found
        elif inside and words[0] == "Pss:":
            found = (*found[:2], int(words[1]) * 1024)
    return found


def of_a_run(session: Session) -> dict[str, Any]:
    samples: Counter[int] = Counter()
    inner = session.feed.loader.open

    def opened(micro_batches: Any) -> Any:
        def seen() -> Any:
            for one in micro_batches:
                samples.update(one.indices.tolist())
                yield one

        return inner(seen())

    session.parts.feed = replace(session.feed, loader=_Reader(session.feed.loader, opened))
    rounds = [stats.metrics for stats in session.rounds()]
    evaluation = evaluate(session)
    assert evaluation is not None
    return {
        "rounds": rounds,
        "loss": evaluation.loss,
        "accuracy": evaluation.metrics["accuracy"],
        "step": session.state.step,
        "samples": samples,
        "end": trajectory_of([], session),
        "places": [mapping_of(p)[0] for p in session.runner.sharded_model.computes.values()],
    }


class _Reader:
    def __init__(self, inner: Any, opened: Any) -> None:
        self._inner, self.open = inner, opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def lock_free(cluster: Cluster) -> list[dict[str, Any]]:
    found = []
    for seed in (1, 2, 3):
        session = build_test_session(cluster, digits("sync=hogwild", seed=seed))
        found.append(of_a_run(session))
        session.close()
    return found


def every_step(cluster: Cluster) -> list[dict[str, Any]]:
    return [of_a_run(build_test_session(cluster, digits("replicas=1", seed=seed))) for seed in (1, 2, 3)]


@pytest.mark.capability("I5", "I2")
def test_it_reaches_the_accuracy_of_every_step_and_says_how_much_was_lost() -> None:
    """Three seeds: accuracy within a hundredth and two deviations of one process; every sample once."""
    ranks = run_ranks(lock_free, 3)
    (right,) = run_ranks(every_step, 1)
    for first, *others in zip(*ranks, strict=True):
        assert first["step"] == STEPS
        assert len({*first["places"]}) == 1 and first["places"][0]
        for other in others:
            assert other["end"].distance(first["end"]) == 0.0
            assert (other["rounds"], other["loss"]) == (first["rounds"], first["loss"])
            assert other["places"] == first["places"]  # one file that all have mapped
        assert all(0.0 <= metrics["lost_updates"] < 0.5 for metrics in first["rounds"])
        assert max(metrics["staleness"] for metrics in first["rounds"]) > 0.0
    for seed, plain in enumerate(right):
        taken: Counter[int] = sum((rank[seed]["samples"] for rank in ranks), Counter())
        assert taken == plain["samples"]
    reached, sync = ([run["accuracy"] for run in runs] for runs in (ranks[0], right))
    assert mean(reached) >= mean(sync) - 0.01 - 2 * max(stdev(sync), stdev(reached)), (reached, sync)


@pytest.mark.capability("I5")
def test_one_worker_alone_has_the_bits_of_every_step() -> None:
    def run(cluster: Cluster) -> list[Trajectory]:
        syncs = ("every-step", "hogwild")
        return [run_strategy(cluster, digits(f"replicas=1 sync={sync}", steps=20)) for sync in syncs]

    ((right, found),) = run_ranks(run, 1)
    assert found.distance(right) == 0.0


def with_a_slow_one(cluster: Cluster, sync: str) -> dict[str, Any]:
    """Rank 1 sleeps in every forward; how far behind a rank the slowest was when it began a step, at most."""
    session, behind = build_test_session(cluster, digits(f"sync={sync}")), dict[int, int]()

    def see(module: nn.Module, inputs: Any) -> None:
        step, clocks = session.state.step, session.rule.shared_counters.clocks
        behind.setdefault(step, step - int(clocks.min()))
        time.sleep(0.01 * (cluster.global_rank == 1))

    session.runner.sharded_model.model.register_forward_pre_hook(see)
    rounds = [stats.metrics["staleness"] for stats in session.rounds()]
    session.close()
    return {"behind": max(behind.values()), "steps": len(behind), "staleness": max(rounds)}


@pytest.mark.capability("I2", "I4", clause="without a server, on one host")
def test_with_a_bound_nobody_is_further_ahead_of_a_slow_rank() -> None:
    for rank in run_ranks(with_a_slow_one, 3, "hogwild:1"):
        assert rank["behind"] <= 1 and rank["steps"] == STEPS
        assert rank["staleness"] <= 2 * (2 * 1 + 1)  # of two others, while one step is taken
    assert max(rank["behind"] for rank in run_ranks(with_a_slow_one, 3, "hogwild")) > 1


def stopped(cluster: Cluster) -> tuple[int, float, int]:
    session = asked_to_stop(cluster, digits("sync=hogwild"))
    stops = [stats.stops for stats in session.rounds()]
    return session.state.step, float(session.sum(session.state.step)), stops[-1]


def test_a_stop_ends_all_after_the_same_step() -> None:
    found = run_ranks(stopped, 2)
    (step, total, stops), other = found
    assert other == (step, total, stops) and total == 2 * step and stops == 1
    assert 10 <= step < 2000  # the pause after which it would end otherwise


def stored(
    cluster: Cluster, strategy: str
) -> tuple[Trajectory, dict[int, tuple[int, int]], tuple[int, int], int]:
    """Where a run ends, this rank's share of the memory of its parameters, its numbers of optimizer state and
    of sums of gradients, and bytes of the model."""
    session = build_test_session(cluster, large(f"{strategy} shard={cluster.world_size}"))
    losses = [stats.loss for stats in session.rounds()]
    session.sum(0.0)  # all are here, and all have mapped it
    places = {}
    for p in session.runner.sharded_model.computes.values():
        file, size, share = mapping_of(p)
        places[file] = (size, share)
    kept = [value for state in session.state.optimizer.state.values() for value in state.values()]
    numbers = sum(value.numel() if isinstance(value, Tensor) else 1 for value in kept)
    sums = sum(p.grad.numel() for p in session.runner.sharded_model.updates.values() if p.grad is not None)
    model = sum(p.numel() * 4 for p in session.runner.sharded_model.computes.values())
    session.sum(0.0)  # nobody goes on before all have looked
    return whole_trajectory(losses, session), places, (numbers, sums), model


def large(strategy: str, **changes: Any) -> Recipe:
    options = {"model": "mlp", "hidden": [512, 512]}
    return digits(strategy, steps=4, options=options, optimizer={"name": "adamw", "lr": 1e-3}, **changes)


@pytest.mark.capability("B5")
def test_central_storage_has_one_copy_of_parameters_and_all_moments_on_one_rank() -> None:
    found = run_ranks(stored, 3, "central-storage")
    (_, places, _, model), *_ = found
    assert 0 not in places and all(other[1].keys() == places.keys() for other in found)
    held = sum(share for _, of_rank, _, _ in found for _, share in of_rank.values())
    assert model <= sum(size for size, _ in places.values()) <= 1.02 * model + 8192
    assert held <= 1.05 * model + 3 * 8192  # pages that several processes have mapped count once in all
    num_values, num_tensors = (
        model // 4,
        6,
    )  # AdamW has two moments of each value, and a counter of each tensor
    (numbers, sums), *compute_ranks = (of_rank for _, _, of_rank, _ in found)
    assert (numbers, sums) == (2 * num_values + num_tensors, num_values)
    assert compute_ranks == [(0, 0)] * 2
    (right,) = run_ranks(lambda cluster: run_oracle(large("replicas=1"), 4), 1)
    assert all(rank[0].distance(right) <= 2e-5 for rank in found)


def test_with_state_that_is_spread_every_rank_has_moments() -> None:
    """The twin: ZeRO 3 in the same memory."""
    found = run_ranks(stored, 3, "replicas=1 zero=3 route=shared-memory")
    assert all(numbers > 0 and sums > 0 for _, _, (numbers, sums), _ in found)


@pytest.mark.capability("B5", clause="the bits of one process")
def test_central_storage_has_the_bits_of_one_process() -> None:

    def reproducible(cluster: Cluster, strategy: str) -> tuple[Trajectory, int]:
        session = build_test_session(cluster, large(strategy, reproducible=True))
        losses = [stats.loss for stats in session.rounds()]
        return whole_trajectory(losses, session), len(session.state.optimizer.state)

    found = run_ranks(reproducible, 2, "central-storage")
    ((right, num_tensors),) = run_ranks(reproducible, 1, "replicas=1")
    assert all(end.distance(right) == 0.0 and end.losses == right.losses for end, _ in found)
    assert [number for _, number in found] == [num_tensors, 0]


def test_replicas_would_hold_more() -> None:
    """The twin: each of two replicas has parameters and moments of its own."""

    def replicas(cluster: Cluster) -> tuple[int, int]:
        session = build_test_session(cluster, large("replicas=2"))
        list(session.rounds())
        state = session.state.optimizer.state.values()
        files = {mapping_of(p)[0] for p in session.runner.sharded_model.computes.values()}
        return sum(t.numel() * 4 for s in state for t in s.values() if t.dim()), len(files - {0})

    model = sum(p.numel() * 4 for p in make_task(large("replicas=1")).model.parameters())
    assert run_ranks(replicas, 2) == [(2 * model, 0)] * 2
