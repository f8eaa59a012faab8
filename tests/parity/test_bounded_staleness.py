"""Bounded staleness: nothing too old is applied, S = 0 is every-step, and a run repeats another."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest

from paceline.job.cluster import Cluster
from paceline.observe.metrics_schema import find_schema_errors
from paceline.recipe import Recipe, to_toml
from paceline.session.fit_loop import fit
from paceline.session.sink_setup import build_sinks
from paceline.sync.server import gradient_push, server_builders
from paceline.sync.server.server_policies import BoundedStaleness, WorkerPush, WorkTicket
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.parity import (
    Trajectory,
    build_test_session,
    make_task,
    run_oracle,
    run_strategy,
    trajectory_of,
)
from tests.marks import soak_param
from tests.parity.training_runs import SlowSamples, each_case, pause_seldom
from tests.recipes import recipe_of

STEPS = 16


digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [32], "dropout": 0.1},
    steps=STEPS,
    batch={"size": 48, "shards": 6},
    optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9},
)


@pytest.mark.capability("I4")
def test_with_a_bound_of_0_two_workers_have_the_bits_of_two_replicas() -> None:
    """One addition has one order; micro-batches of a part are added alike."""

    def run(cluster: Cluster, strategy: str) -> list[Trajectory]:
        return [run_strategy(cluster, digits(strategy, batch=batch)) for batch in batches]

    batches = [{"size": 46, "shards": 6}, {"size": 46, "shards": 2}]
    served, right = run_ranks(run, 3, "servers=1 sync=bounded:0"), run_ranks(run, 2, "replicas=2")[0]
    for rank in served:
        for mine, theirs in zip(rank, right, strict=True):
            assert mine.distance(theirs) == 0.0 and mine.losses == theirs.losses


ORDERED = (
    {"optimizer": {"name": "adamw", "lr": 5e-3, "clip_norm": 0.05}},
    {"options": {"model": "convnet"}, "steps": 6},
)


def in_one_order(cluster: Cluster, strategy: str, twin: bool) -> list[Trajectory]:
    """Reproducible runs; the twin's server adds the nodes of the tree from the last to the first."""
    plain = gradient_push.tree_sum

    def backwards(places: Any, values: Any) -> Any:
        return sum(values[-2::-1], start=values[-1])

    with patch.object(gradient_push, "tree_sum", backwards if twin else plain):
        return [run_strategy(cluster, digits(strategy, reproducible=True, **changes)) for changes in ORDERED]


@pytest.mark.capability("I4", "Z6", "I10")
@pytest.mark.parametrize("rule", ["bounded:0", soak_param("server")])
def test_under_reproducible_three_workers_have_the_bits_of_one_process(rule: str) -> None:
    """Dropout, a clip, BatchNorm and a batch that is not even; and a twin."""
    right = run_ranks(in_one_order, 1, "replicas=1", False)[0]
    for rank in run_ranks(in_one_order, 4, f"servers=1 sync={rule}", False):
        for mine, theirs in zip(rank, right, strict=True):
            assert mine.distance(theirs) == 0.0 and mine.losses == theirs.losses
    if rule == "bounded:0":
        twin = run_ranks(in_one_order, 4, f"servers=1 sync={rule}", True)[0]
        assert all(mine.distance(theirs) > 0.0 for mine, theirs in zip(twin, right, strict=True))


class Ages(BoundedStaleness):
    """Notes how many clocks were missing in the parameters of a gradient, and how far others were ahead."""

    found: ClassVar[list[Any]] = []

    def ticket(self, worker: int) -> WorkTicket | None:
        given = super().ticket(worker)
        if given is not None:
            Ages.found.append(("read", given.step - self.step))
        return given

    def push(self, worker: int, push: WorkerPush) -> Sequence[WorkerPush] | None:
        self.newest = max(getattr(self, "newest", 0), push.ticket.step)
        Ages.found.append(("newest", self.newest - push.ticket.step))
        return super().push(worker, push)


def slowed(cluster: Cluster, recipe: Recipe, slow: int, seconds: float = 0.003) -> Task:
    task = make_task(recipe)
    return replace(task, data=SlowSamples(task.data, seconds)) if cluster.global_rank == slow else task


def with_slow_worker(cluster: Cluster, bound: str) -> dict[str, Any]:
    Ages.found = []
    recipe = digits(f"servers=1 sync=bounded:{bound}")
    with patch.object(server_builders, "BoundedStaleness", Ages):
        session = build_test_session(cluster, recipe, lambda: slowed(cluster, recipe, 3))
    pause_seldom(session, 8)
    oldest = max(stats.metrics["staleness_max"] for stats in session.rounds())
    session.close()
    ages = {kind: max((a for k, a in Ages.found if k == kind), default=-1) for kind in ("read", "newest")}
    return {**session.rule.ledger.record(), **ages, "oldest": oldest}


@pytest.mark.capability("I4")
def test_in_a_job_with_a_slow_worker_nothing_older_than_the_bound_is_applied() -> None:
    """The last is the twin: without a bound the same job applies older gradients."""
    server, *workers = run_ranks(each_case, 4, with_slow_worker, [("0",), ("1",), ("inf",)])
    for bound, found in zip((0, 1), server, strict=False):
        assert 0 <= found["read"] <= bound and 0 <= found["newest"] <= bound
        assert found["oldest"] == max(map(int, found["staleness"])) <= (3 * (2 * bound + 1) - 1) * (bound > 0)
    assert max(server[2]["read"], server[2]["newest"]) > 1
    for worker in workers:
        assert [one["staleness"] for one in worker] == [one["staleness"] for one in server]


def repeated(cluster: Cluster, folder: Path) -> tuple[Trajectory, Trajectory]:
    """A run, and one that hears its workers as the first did, though another of them is slow."""
    ends = []
    for replays in (False, True):
        debug = {"replay_arrivals": str(folder)} if replays else {}
        recipe = digits("servers=1 sync=bounded:2", steps=60, debug=debug, log={"level": "debug"})
        if cluster.global_rank == 0 and not replays:
            (folder / "recipe.toml").write_text(to_toml(recipe))
        slow, draw = 2 - replays, random.Random(cluster.global_rank + 10 * replays)
        session = build_test_session(
            cluster, recipe, lambda r=recipe, s=slow, d=draw: slowed(cluster, r, s, d.random() * 0.004)
        )
        fit(session, None, [] if replays else build_sinks(session, folder, None))
        ends.append(trajectory_of([], session))
        session.close()
    return ends[0], ends[1]


@pytest.mark.capability("I4", "I3", "Z6")
def test_a_recorded_order_of_arrival_is_replayed_to_the_bit(tmp_path: Path) -> None:
    for first, second in run_ranks(repeated, 3, tmp_path):
        assert first.distance(second) == 0.0
        assert first.optimizer.keys() == second.optimizer.keys()
        assert all(bool((second.optimizer[n] == t).all()) for n, t in first.optimizer.items())
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    work = [record for record in records if record["event"] == "work"][-1]
    assert find_schema_errors(work) == [] and work["taken"] == work["applied"] == 60 * 2
    assert sum(work["staleness"].values()) == work["applied"]


@pytest.mark.capability("I4", "Z1")
def test_three_workers_end_where_one_process_ends() -> None:
    """Three workers, S = 0: every-step to rounding; S = 2: three updates a step.

    Late gradients act as momentum, and with much of it beside them a loss may swing at any time.
    """
    calm = {"name": "sgd", "lr": 0.05, "momentum": 0.5}

    def run(cluster: Cluster) -> list[Trajectory]:
        exact = digits("servers=1 sync=bounded:0", steps=40)
        late = digits("servers=1 sync=bounded:2", steps=40, optimizer=calm)
        return [run_strategy(cluster, one) for one in (exact, late)]

    ends = run_ranks(run, 4)
    right = run_oracle(digits("replicas=1"), 40)
    assert all(end[0].distance(right) <= 1e-5 for end in ends)
    assert ends[0][1].losses[-1] < 0.5 * ends[0][1].losses[0]
