"""Studies of a function in this process: spaces, proposals, the log, replay, any number of workers."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import DataError, RecipeError
from paceline.recipe import Recipe
from paceline.search import Study, open_study, plan_study, samplers, study_runner
from paceline.search.samplers import DistinctProposals, Observation, RandomSampler, build_sampler
from paceline.search.space import Dimension, Space, read_study_file, rounded
from paceline.search.stopping import continues_in_asha, surviving_trials
from paceline.search.study_log import StudyLog, without_times
from tests.marks import soak_param

BASE = Recipe(task="digits", steps=4)
LR = {"optimizer.lr": {"log": [1e-4, 1e-1]}}
TWELVE = {
    "batch.size": {"choice": [16, 32, 64]},
    "optimizer.weight_decay": {"range": [0.0, 0.3], "step": 0.1},
}


def tables(space: dict[str, Any] = LR, stop: dict[str, Any] | None = None, **study: Any) -> dict[str, Any]:
    settings = {"objective": "value", "search": "random", "proposals": 3, **study}
    return {"study": settings, "space": space, **({"stop": stop} if stop else {})}


def bowl(recipe: Recipe) -> float:
    return (
        (math.log10(recipe.optimizer.lr) + 2.5) ** 2
        + recipe.batch.size / 1000
        + recipe.optimizer.weight_decay
    )


def run(folder: Path, values: dict[str, Any], trials: int | None = 12, **more: Any) -> Study:
    return paceline.tune(
        BASE, values, objective=more.pop("objective", bowl), trials=trials, out=folder, **more
    )


# Spaces


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ({"optimizer.lr": {"log": [0.0, 0.1]}}, "above 0"),
        ({"optimizer.lr": {"log": [0.1, 0.01]}}, "not below"),
        ({"optimizer.weight_decay": {"range": [0.0, 0.1], "step": 0.03}}, "does not divide"),
        ({"optimizer.lt": {"log": [0.01, 0.1]}}, "did you mean optimizer.lr"),
        ({"batch.size": {"choice": [16, 0]}}, "found 0"),
        ({"batch.size": {"choice": [16, 1.5]}}, "found 1.5"),
        ({"strategy": {"choice": ["replicass=2"]}}, "replicas"),
        ({"optimizer.lr": {"choice": [0.1, 0.10000000001]}}, "are one value"),
        ({"optimizer.lr": {"log": [0.01, 0.1], "step": 0.1}}, "expected log"),
        ({"optimizer.lr": [0.01]}, "expected log"),
        ({"seed": {"choice": [1, 2]}}, "cannot be searched"),
        ({}, "empty"),
    ],
)
def test_a_bad_space_is_refused(space: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        plan_study(tables(space))


@pytest.mark.parametrize(
    ("study", "stop", "says"),
    [
        ({"objective": "held_out accuracy"}, None, "by the test set"),
        ({"objective": "acurac"}, None, "is none"),
        ({"search": "tpee"}, None, 'did you mean "tpe"'),
        ({"search": "grid"}, None, "continuum"),
        ({"proposals": 0}, None, ">= 1"),
        ({"validation": 1.5}, None, "< 1"),
        ({}, {"rule": "halving"}, "stop.first"),
        ({}, {"first": "epochs:2"}, "rule"),
        ({}, {"rule": "median", "first": "steps:3", "keep": 0.2}, "keep"),
        ({"proposal": 4}, None, "did you mean study.proposals"),
    ],
)
def test_a_bad_study_is_refused(study: dict[str, Any], stop: dict[str, Any] | None, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        plan_study(tables(stop=stop, **study))


def test_an_error_names_the_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text('[study]\nobjective = "validation loss"\n[space]\n"optimizer.lr" = { log = [1, 0.1] }\n')
    with pytest.raises(RecipeError, match=r"not below") as error:
        read_study_file(path)
    assert error.value.where == f"{path}:4"


def test_a_study_and_its_call_must_agree(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="4 workers for 3 proposals"):
        run(tmp_path / "a", tables(), workers=4)
    with pytest.raises(RecipeError, match="no rungs"):
        run(tmp_path / "b", tables(stop={"rule": "halving", "first": "steps:2"}))
    with pytest.raises(RecipeError, match="reproducible"):
        paceline.tune(
            BASE.replace(reproducible=True),
            tables(stop={"rule": "asha", "first": "steps:2"}, objective="validation loss"),
            trials=3,
            out=tmp_path / "c",
        )
    run(tmp_path / "d", tables(), 3)
    with pytest.raises(
        RecipeError, match=r"study.space.optimizer.lr.log: \[0.0001, 0.1\] -> \[0.0001, 0.2\]"
    ):
        run(tmp_path / "d", tables({"optimizer.lr": {"log": [1e-4, 0.2]}}), 3)
    with pytest.raises(RecipeError, match=r"recipe.batch.size: 32 -> 16"):
        paceline.tune(
            BASE.replace(batch=BASE.batch.replace(size=16)),
            tables(),
            objective=bowl,
            trials=3,
            out=tmp_path / "d",
        )
    log = StudyLog(tmp_path / "d")
    with pytest.raises(DataError, match="another process works"):
        run(tmp_path / "d", tables(), 3)
    log.close()


# Distributions (S2)


def uniforms(dimension: Dimension, draws: int = 10_000) -> list[Any]:
    sampler = RandomSampler(Space((dimension,)), seed=7)
    return [params[dimension.key] for params in sampler.propose(0, draws)]


@pytest.mark.capability("S2")
def test_random_draws_have_their_distributions_and_are_keyed() -> None:
    stats = pytest.importorskip("scipy.stats")
    lr, wide = Dimension("optimizer.lr", "log", 1e-4, 1e-1), Dimension("x", "range", -1.0, 3.0)
    assert stats.kstest([math.log10(v) for v in uniforms(lr)], stats.uniform(-4, 3).cdf).pvalue > 0.01
    assert stats.kstest(uniforms(wide), stats.uniform(-1, 4).cdf).pvalue > 0.01
    for whole in (
        Dimension("i", "range", 2, 9, 1, whole=True),
        Dimension("s", "range", 0.0, 0.1, 0.01),
        Dimension("c", "choice", choices=(16, 32, "a")),
    ):
        counts = Counter(uniforms(whole))
        assert len(counts) == whole.size and stats.chisquare(list(counts.values())).pvalue > 0.01
    whole = Dimension("n", "log", 1, 100, whole=True)
    edges = [math.log((k + 0.5) / (k - 0.5)) / math.log(100.5 / 0.5) * 10_000 for k in range(1, 101)]
    counts = Counter(uniforms(whole))
    assert stats.chisquare([counts[k] for k in range(1, 101)], edges).pvalue > 0.01
    # equal for equal seeds, whatever was drawn before; not for others
    again, other = RandomSampler(Space((lr,)), 7), RandomSampler(Space((lr,)), 8)
    assert again.propose(500, 3) == RandomSampler(Space((lr,)), 7).propose(0, 503)[500:]
    assert other.propose(0, 3) != again.propose(0, 3)
    # the twin: a uniform draw in place of a log-uniform one
    twin = [1e-4 + (0.1 - 1e-4) * u / 10_000 for u in range(10_000)]
    assert stats.kstest([math.log10(v) for v in twin], stats.uniform(-4, 3).cdf).pvalue < 0.01


# Grid, duplicates, refusals (S1, S4)


@pytest.mark.capability("S1")
def test_a_grid_runs_the_product_once_and_chooses_the_smallest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, float]] = []

    def objective(recipe: Recipe) -> float:
        seen.append((recipe.batch.size, recipe.optimizer.weight_decay))
        return bowl(recipe)

    study = run(tmp_path / "grid", tables(TWELVE, search="grid"), None, objective=objective)
    assert sorted(seen) == [(size, decay) for size in (16, 32, 64) for decay in (0.0, 0.1, 0.2, 0.3)]
    values = {trial.number: trial.value for trial in study.trials}
    assert study.best is not None and study.best.number == min(values, key=lambda n: (values[n], n))
    assert study.best.params == {"batch.size": 16, "optimizer.weight_decay": 0.0}
    # twins: an evaluator that returns random numbers, and a best that is never chosen
    noise = iter([0.3, 0.9, 0.1, 0.7, 0.5, 0.2, 0.8, 0.6, 0.4, 0.95, 0.15, 0.55])
    random = run(
        tmp_path / "random", tables(TWELVE, search="grid"), None, objective=lambda recipe: next(noise)
    )
    assert random.best is not None and random.best.params != study.best.params
    monkeypatch.setattr(study_runner, "rank_trials", lambda plan, trials: list(trials)[::-1])
    assert study.best.number != min(values, key=lambda n: (values[n], n))


@pytest.mark.parametrize("search", ["random", "tpe"])
def test_a_space_of_twelve_ends_with_twelve_runs_and_says_so(tmp_path: Path, search: str) -> None:
    if search == "tpe":
        pytest.importorskip("optuna")
    lines: list[str] = []
    seen: list[tuple[int, float]] = []

    def objective(recipe: Recipe) -> float:
        seen.append((recipe.batch.size, recipe.optimizer.weight_decay))
        return bowl(recipe)

    study = run(tmp_path, tables(TWELVE, search=search), 24, objective=objective, log=lines.append)
    assert len(seen) == len(set(seen)) == len(study.trials) == 12
    assert any("12 combinations for 24 trials" in line for line in lines)
    assert any("all 12 combinations of the space have run" in line for line in lines)
    run(tmp_path, tables(TWELVE, search=search), 24, objective=objective)
    assert len(seen) == 12
    # the twin: without the check, a random sampler repeats itself
    plan = plan_study(tables(TWELVE))
    drawn = [tuple(params.values()) for params in build_sampler(plan).propose(0, 24)]
    assert len(set(drawn)) < 24


def test_equal_recipes_run_once_and_refused_ones_never(tmp_path: Path) -> None:
    words = ["replicas=1", "replicas=1 sync=every-step", "replicas=9", "replicas=2"]
    space = {"strategy": {"choice": words}, "batch.size": {"choice": [8]}}
    study = run(tmp_path / "a", tables(space, search="grid", proposals=4), None)
    assert [trial.status for trial in study.trials] == ["complete", "duplicate", "refused", "complete"]
    assert "equal to trial 0" in study.trials[1].reason and "replicas=9" in study.trials[2].reason
    assert {lease.run for lease in study.leases} == {"trial-0000", "trial-0003"}


# Results that do not depend on workers; replay (S3, S4)

SEARCHES = ["random", "tpe", "gp", "cma-es", "tests.unit.search.test_study:towards_best"]


def towards_best(space: Space, observations: Any, count: int, seed: int) -> list[dict[str, Any]]:
    """A search of the user: half the distance to the best value so far."""
    finite = [o for o in observations if math.isfinite(o.score)]
    middle = min(finite, key=lambda o: o.score).params["optimizer.lr"] if finite else 1e-2
    draws = RandomSampler(space, seed).propose(len(observations), count)
    return [{**p, "optimizer.lr": rounded(math.sqrt(p["optimizer.lr"] * middle))} for p in draws]


def slow(delays: dict[int, float]) -> Callable[[Recipe], float]:
    """A function whose calls end in another order than they begin."""
    calls, lock = iter(range(1000)), threading.Lock()

    def objective(recipe: Recipe) -> float:
        with lock:
            time.sleep(delays.get(next(calls) % 3, 0.0))
        return bowl(recipe)

    return objective


@pytest.mark.capability("S4")
@pytest.mark.parametrize("search", [soak_param(s) if s == "gp" else s for s in SEARCHES])
def test_the_log_does_not_depend_on_workers_and_replays(tmp_path: Path, search: str) -> None:
    if search in ("tpe", "gp", "cma-es"):
        pytest.importorskip("optuna")
    space = {**LR, "batch.size": {"choice": [16, 32]}, "optimizer.weight_decay": {"range": [0.0, 0.1]}}
    values = tables(space, search=search)
    one = run(tmp_path / "1", values, 15)
    two = run(tmp_path / "2", values, 15, workers=2, objective=slow({0: 0.02}))
    three = run(tmp_path / "3", values, 15, workers=3, objective=slow({1: 0.02}))
    assert without_times(one.events) == without_times(two.events) == without_times(three.events)
    assert one.replay() == [trial.params for trial in one.trials]
    # interrupted and continued: first six trials, then all
    run(tmp_path / "4", values, 6)
    four = run(tmp_path / "4", values, 15)
    assert without_times(four.events) == without_times(one.events)
    assert open_study(tmp_path / "4").best == one.best


def test_results_that_are_passed_as_they_arrive_are_detected(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    study = run(tmp_path, tables(search="tpe", proposals=3), 30)
    plan = study.plan
    sampler = DistinctProposals(plan.space, build_sampler(plan), plan.study.seed)
    observed = [study_runner.observe_trial(plan, trial) for trial in study.trials]
    proposals: list[dict[str, Any]] = []
    for batch in range(10):
        proposals += sampler.propose(3 * batch, 3)
        # the twin: the results of a batch that another number of workers would have seen by now
        late = observed[3 * batch : 3 * batch + 3]
        sampler.observe([replace(result, score=late[(i + 1) % 3].score) for i, result in enumerate(late)])
    assert proposals != [trial.params for trial in study.trials]


def test_bad_results_rank_worst_and_reach_the_sampler_as_the_worst_value(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")

    def objective(recipe: Recipe) -> float:
        if recipe.optimizer.lr > 0.03:
            return math.nan
        if recipe.optimizer.lr < 3e-4:
            raise ValueError("too small")
        return bowl(recipe)

    study = run(tmp_path, tables(search="tpe"), 24, objective=objective)
    statuses = {trial.status for trial in study.trials}
    assert statuses == {"complete", "diverged", "failed"}
    assert any("ValueError: too small" in trial.reason for trial in study.trials)
    sampler = build_sampler(study.plan)
    assert isinstance(sampler, samplers.OptunaSampler)
    results = [
        Observation(0, {}, "complete", 3.0),
        Observation(1, {}, "complete", 1.0),
        Observation(2, {}, "diverged", math.inf),
        Observation(3, {}, "stopped", 0.5, step=4),
    ]
    sampler.propose(0, 4)
    sampler.observe(results)
    first, second, worst, stopped = sampler._study.trials
    assert (first.value, second.value, worst.value) == (3.0, 1.0, 3.0)
    assert stopped.state == optuna.trial.TrialState.PRUNED and stopped.intermediate_values == {4: 0.5}
    assert sampler._study.best_value == 1.0  # not the 0.5 of the stopped trial


# The log


def test_a_torn_last_line_is_left_out_and_no_other(tmp_path: Path) -> None:
    values = tables()
    whole = run(tmp_path / "a", values, 9)
    text = (tmp_path / "a" / "study.jsonl").read_bytes()
    lines = text.splitlines(keepends=True)
    for length in (len(text) - 5, len(b"".join(lines[:3])) + 10, len(b"".join(lines[:6]))):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / "study.jsonl").write_bytes(text[:length])
        says: list[str] = []
        again = run(folder, values, 9, log=says.append)
        assert [t.params for t in again.trials] == [t.params for t in whole.trials]
        assert [t.value for t in again.trials] == [t.value for t in whole.trials]
        assert any("torn" in line for line in says) == (text[length - 1 : length] != b"\n")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "study.jsonl").write_bytes(b"".join([lines[0], b'{"event"\n', *lines[1:]]))
    with pytest.raises(DataError, match="no event") as error:
        run(broken, values, 9)
    assert error.value.where.endswith("study.jsonl:2")


def test_a_confirmation_has_new_seeds_and_decides(tmp_path: Path) -> None:
    seeds: list[int] = []

    def objective(recipe: Recipe) -> float:
        seeds.append(recipe.seed)
        lucky = recipe.seed == 1 and recipe.optimizer.lr > 1e-2  # only with the seed of the search
        return bowl(recipe) - 5 * lucky

    study = run(tmp_path, tables(confirm={"top": 12, "seeds": 2}), 12, objective=objective)
    assert sorted(set(seeds)) == [1, 2, 3] and study.best is not None
    assert study.best != study.ranked[0] and study.best.params["optimizer.lr"] <= 1e-2
    assert json.loads((tmp_path / "study.jsonl").read_text().splitlines()[-1])["event"] == "confirmed"


# Stopping


def test_rules_stop_the_worse_trials() -> None:
    def stop(rule: str, keep: float | None = None) -> Any:
        more = {} if keep is None else {"keep": keep}
        return plan_study(tables(stop={"rule": rule, "first": "epochs:2", **more})).stop

    scores = {4: 0.3, 5: math.inf, 6: 0.1, 7: 0.2}
    assert surviving_trials(stop("halving", 0.5), scores, []) == {6, 7}
    assert surviving_trials(stop("halving", 0.1), scores, []) == {6}
    assert surviving_trials(stop("median"), scores, [0.1, 0.2, 0.25, 0.9]) == {6, 7}
    assert surviving_trials(stop("median"), scores, [0.1]) == set(scores)
    assert continues_in_asha(0.5, 0.3, [0.3]) and continues_in_asha(0.5, 0.1, [0.3, 0.1])
    assert not continues_in_asha(0.5, 0.5, [0.3, 0.1, 0.5])
    plan = plan_study(tables(stop={"rule": "halving", "first": "epochs:1.5"}))
    assert [plan.rung(i) for i in range(3)] == ["epochs:1.5", "epochs:3", "epochs:6"]
