"""The rate that falls on a plateau: the same on every rank, saved, and bitwise equal after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from paceline.job.cluster import Cluster
from paceline.observe.step_stats import StepStats
from paceline.recipe import Recipe
from paceline.recipe.resume_changes import compare_recipes
from paceline.session import fit, run_folder
from paceline.session.fit_loop import RunSchedule
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.recipes import recipe_of

STEPS, EVERY = 30, 3
# No evaluation improves on the first, so every second one reduces the rate.
PLATEAU = {
    "decay": "plateau",
    "patience": 1,
    "factor": 0.5,
    "threshold": 10.0,
    "threshold_mode": "abs",
    "metric": "far.l1",
}


def task() -> Task:
    """The metric on held-out points falls, then stays."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator)
    data = list(zip(x, x.sum(1) + 0.3 * torch.randn(64, generator=generator), strict=True))

    def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
        error = model(batch[0]).view(-1) - batch[1]
        return Loss(error.square().sum(), len(error), {"l1": error.abs().sum()})

    torch.manual_seed(0)
    return Task(nn.Linear(4, 1), data[:48], loss, held_out={"near": data[48:56], "far": data[56:]})


def recipe(folder: Path, steps: int = STEPS, strategy: str = "", **settings: Any) -> Recipe:
    values: dict[str, Any] = {
        "optimizer": {"name": "adam", "lr": 0.2},
        "schedule": PLATEAU,
        "evaluate": {"every_steps": EVERY},
        "checkpoint": {"every_steps": 7, "keep": 9},
        "run_dir": str(folder),
    }
    return recipe_of(strategy, steps=steps, **(values | settings))


class Events:
    """A sink that remembers rates and reductions."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.reductions: list[dict[str, Any]] = []

    def step(self, stats: StepStats) -> None:
        self.rates.append(stats.lr)

    def event(self, name: str, record: Any) -> None:
        if name == "plateau":
            self.reductions.append(dict(record))

    def close(self) -> None:
        return


class End(NamedTuple):
    rates: list[float]
    reductions: list[dict[str, Any]]
    weight: Tensor
    multiplier: float


def run(cluster: Cluster, chosen: Recipe, resume: bool = False) -> End:
    session, events = build_test_session(cluster, chosen, task), Events()
    folder = Path(str(chosen.run_dir))
    if resume:
        run_folder.restore_run(session, folder)
    fit(session, folder, [events])
    assert session.plateau is not None
    weight = session.state.model.get_parameter("weight").detach().clone()
    session.close()
    return End(events.rates, events.reductions, weight, session.plateau.multiplier)


def test_a_resumed_run_has_the_rates_and_the_bits_of_one_without_a_stop(tmp_path: Path) -> None:
    """Stopped where an evaluation is due, whose save comes first, and where none is."""
    whole = run(Cluster.single(), recipe(tmp_path / "whole"))
    assert [r["step"] for r in whole.reductions] == [9, 15, 21, 27]
    assert [whole.rates[step] for step in (8, 9, 15, 21, 27)] == [0.2, 0.1, 0.05, 0.025, 0.0125]
    for stop in (12, 13, 15, 18, 23):
        first = run(Cluster.single(), recipe(tmp_path / f"at-{stop}", steps=stop))
        rest = run(Cluster.single(), recipe(tmp_path / f"at-{stop}"), resume=True)
        assert first.rates + rest.rates == whole.rates, stop
        assert first.reductions + rest.reductions == whole.reductions, stop
        assert torch.equal(rest.weight, whole.weight) and rest.multiplier == whole.multiplier


def test_without_the_evaluation_that_was_due_it_ends_elsewhere(tmp_path: Path) -> None:
    """The mutation twin."""
    whole = run(Cluster.single(), recipe(tmp_path / "whole"))
    different = []
    with patch.object(RunSchedule, "make_missed_evaluation", lambda self: None):
        for stop in (12, 15, 18):
            run(Cluster.single(), recipe(tmp_path / f"at-{stop}", steps=stop))
            rest = run(Cluster.single(), recipe(tmp_path / f"at-{stop}"), resume=True)
            different.append(not torch.equal(rest.weight, whole.weight))
    assert any(different)


def run_all(cluster: Cluster, folder: Path) -> list[End]:
    strategies = ("replicas=2", "replicas=1 shard=2 zero=3", f"sync=every-step@{STEPS // 2},local:3")
    ends = [run(cluster, recipe(folder / str(i), strategy=words)) for i, words in enumerate(strategies)]
    stopped = recipe(folder / "stopped", steps=15, strategy="replicas=2")
    run(cluster, stopped)
    return [*ends, run(cluster, stopped.replace(steps=STEPS), resume=True)]


def test_all_ranks_have_one_multiplier_under_every_rule(tmp_path: Path) -> None:
    alone = run(Cluster.single(), recipe(tmp_path / "alone"))
    (first, second) = run_ranks(run_all, 2, tmp_path)
    for replicas, sharded, switched, resumed in (first, second):
        assert replicas.rates == sharded.rates == alone.rates
        assert alone.rates[15:] == resumed.rates
        # Another rule takes over the multiplier, and goes on with it.
        assert switched.rates[:15] == alone.rates[:15] and switched.rates[15] == alone.rates[15] < 0.2
    assert [end.multiplier for end in first] == [end.multiplier for end in second]


def test_the_interval_of_evaluations_matters_for_a_resume_on_a_plateau(tmp_path: Path) -> None:
    before = recipe(tmp_path)
    (change,) = compare_recipes(before, before.replace(evaluate={"every_steps": 5}))
    assert change.matters and not change.refusal
    before = before.replace(schedule={})
    (change,) = compare_recipes(before, before.replace(evaluate={"every_steps": 5}))
    assert not change.matters


def test_a_checkpoint_of_another_schedule_starts_the_plateau_anew(tmp_path: Path) -> None:
    session = build_test_session(Cluster.single(), recipe(tmp_path, steps=12, schedule={}), task)
    fit(session, tmp_path, [])
    session.close()
    rest = run(Cluster.single(), recipe(tmp_path), resume=True)
    assert rest.rates[0] == 0.2 and rest.rates[-1] < 0.2
