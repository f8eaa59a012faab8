"""What searches find and how they look for it, and the trials that come from Optuna and go to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tune import FUNCTIONS, regret
from paceline.errors import RecipeError
from paceline.recipe import Recipe
from paceline.search import plan_study, samplers, summarize_study
from paceline.search.optuna_storage import export_trials
from paceline.search.samplers import build_sampler
from paceline.search.search_comparison import SearchPath, result_rows, spending_rows
from tests.unit.search.test_study import LR, TWELVE, bowl, run, tables

# Samplers (S3)


def p_value(search: str, names: Sequence[str], seeds: int) -> float:
    """The probability that a search has no lower regrets than random draws, paired by function and seed."""
    stats = pytest.importorskip("scipy.stats")
    cells = [(name, seed) for name in names for seed in range(1, seeds + 1)]
    regrets = [
        [math.log(regret(name, way, seed) + 1e-12) for name, seed in cells] for way in (search, "random")
    ]
    return float(stats.wilcoxon(*regrets, alternative="less").pvalue)


@pytest.mark.capability("S3")
def test_tpe_finds_more_than_random_draws_and_proposals_of_a_batch_are_distinct() -> None:
    pytest.importorskip("optuna")
    assert p_value("tpe", ["sphere, 4", "Rosenbrock, 2"], 6) < 0.05
    for search in ("tpe", "gp"):
        plan = plan_study(tables(search=search, proposals=4))
        assert len({tuple(params.values()) for params in build_sampler(plan).propose(0, 4)}) == 4


@pytest.mark.soak
@pytest.mark.capability("S3")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("search", ["tpe", "gp"])
def test_searches_find_more_than_random_draws_on_five_functions(search: str) -> None:
    pytest.importorskip("optuna")
    assert p_value(search, list(FUNCTIONS), 10) < 0.05


# Exploration and exploitation (S7)


@pytest.mark.capability("S7")
def test_distance_is_to_the_best_before_and_improvement_is_of_it(tmp_path: Path) -> None:
    values = iter([1e-2, 1e-3, 1e-2, 1e-1, 2e-3])
    random = run(
        tmp_path / "steps",
        tables(LR, proposals=1),
        5,
        objective=lambda recipe: next(values),
    )
    path = SearchPath.of(random)
    assert list(path.best) == [1e-2, 1e-3, 1e-3, 1e-3, 1e-3]
    assert path.gains == pytest.approx([0.9, 0, 0, 0])
    rates = [math.log10(trial.params["optimizer.lr"]) for trial in random.trials]
    best = [0, 1, 1, 1]  # the best trial before each of the others
    away = [abs(rates[i + 1] - rates[at]) / 3 for i, at in enumerate(best)]
    assert path.distances == pytest.approx(away, abs=1e-5)
    # the twin: to the best one at the end, which the search could not know
    assert [abs(rate - rates[1]) / 3 for rate in rates[1:]] != pytest.approx(away, abs=1e-5)


@pytest.mark.capability("S7")
def test_a_search_that_exploits_looks_nearer_to_its_best_and_the_tables_say_so(tmp_path: Path) -> None:
    near = "tests.unit.search.test_study:towards_best"
    studies = {
        ("bowl", search): [run(tmp_path / f"{name}-{seed}", tables(LR, search=name, seed=seed), 24)]
        for seed, (search, name) in enumerate([("random", "random"), ("tpe", near)], 3)
    }
    random, towards = spending_rows(studies)
    halves = [float(row[3].split()[0]) for row in (random, towards)]
    assert halves[1] < 0.7 * halves[0]
    assert int(towards[5]) > int(random[5])  # trials near the best
    # the page of a study has the same by quarter of the search
    periods = [summarize_study(of_search[0]).periods for of_search in studies.values()]
    assert all(len(four) == 4 and four[0].improved >= 1 for four in periods)
    assert (periods[1][3].distance or 1) < (periods[0][3].distance or 0)
    assert [row[:3] for row in result_rows(studies)] == [["bowl", "random", "1"], ["bowl", "tpe", "1"]]


# Optuna's storages (S8)


def noisy_bowl(recipe: Recipe) -> float:
    if recipe.optimizer.lr > 0.05:
        raise ValueError("too large")
    return bowl(recipe)


@pytest.mark.capability("S8")
def test_an_export_is_read_by_optuna_and_continued_from(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    space = {**LR, "batch.size": {"choice": [16, 32]}}
    first = run(tmp_path / "first", tables(space), 20, objective=noisy_bowl)
    path = export_trials(first.folder, first.plan, first.trials)
    path = export_trials(first.folder, first.plan, first.trials)  # a second one replaces it
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    record = optuna.load_study(study_name="first", storage=storage)
    assert record.best_value == pytest.approx(first.best.value if first.best else math.nan)
    assert [trial.params for trial in record.trials] == [trial.params for trial in first.trials]
    failed = [trial for trial in record.trials if trial.state.name == "FAIL"]
    assert failed and all("too large" in trial.user_attrs["reason"] for trial in failed)

    values = tables(space, search=f"optuna:{path}")
    sampler = build_sampler(plan_study(values))
    assert isinstance(sampler, samplers.OptunaSampler)
    assert len(sampler._study.trials) == 20 - len(failed)
    second = run(tmp_path / "second", values, 9, workers=3)
    third = run(tmp_path / "third", values, 9)
    assert [t.params for t in second.trials] == [t.params for t in third.trials] == second.replay()
    # what it proposes is not what a search without the storage does
    fresh = run(tmp_path / "fresh", tables(space, search="tpe"), 9)
    assert [t.params for t in second.trials] != [t.params for t in fresh.trials]


@pytest.mark.parametrize(
    ("name", "study", "says"),
    [
        ("none.journal", {}, "no storage of Optuna"),
        ("optuna.journal#other", {}, "the storage holds stored"),
        ("optuna.journal", {"direction": "maximize"}, "is to minimize, and the objective of this one"),
        ("optuna.journal", {"space": TWELVE}, "its parameters are optimizer.lr"),
    ],
)
def test_a_storage_that_does_not_fit_is_refused(
    tmp_path: Path, name: str, study: dict[str, Any], says: str
) -> None:
    pytest.importorskip("optuna")
    stored = run(tmp_path / "stored", tables(LR), 3)
    export_trials(stored.folder, stored.plan, stored.trials)
    space = study.pop("space", LR)
    with pytest.raises(RecipeError, match=says):
        build_sampler(plan_study(tables(space, search=f"optuna:{tmp_path}/stored/{name}", **study)))


def test_a_database_of_optuna_is_read(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    pytest.importorskip("sqlalchemy")
    record = optuna.create_study(storage=f"sqlite:///{tmp_path}/one.db", direction="maximize")
    record.optimize(lambda trial: -trial.suggest_float("optimizer.lr", 1e-4, 1e-1, log=True), n_trials=4)
    record.optimize(lambda trial: trial.suggest_float("optimizer.lr", 1.0, 2.0, log=True), n_trials=2)
    values = tables(LR, search=f"optuna:{tmp_path}/one.db", direction="maximize")
    sampler = build_sampler(plan_study(values))
    assert isinstance(sampler, samplers.OptunaSampler)
    found = [trial.value for trial in sampler._study.trials]
    assert found == [trial.params["optimizer.lr"] for trial in record.trials[:4]]
