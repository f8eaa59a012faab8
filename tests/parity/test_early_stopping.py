"""Early stopping and the best checkpoint by any metric, alike on any number of ranks and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.recipe import EvaluateRecipe, Recipe
from paceline.session import fit, run_folder
from paceline.session.early_stopping import EvaluationScores
from paceline.session.evaluation import Evaluation
from paceline.session.fit_loop import RunSchedule
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.recipes import recipe_of

EVERY = {"every_steps": 5, "metric": "accuracy", "better": "higher", "patience": 3}


def separable() -> Task:
    """The accuracy on held-out points rises, then stays."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Loss:
        x, y = batch
        out = model(x)
        return Loss(
            F.cross_entropy(out, y, reduction="sum"), len(y), {"accuracy": (out.argmax(1) == y).sum()}
        )

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator)
    data = list(zip(x, (x[:, 0] > 0).long(), strict=True))
    torch.manual_seed(0)
    return Task(nn.Linear(4, 2), data[:48], loss, held_out=data[48:])


def stopping_recipe(folder: Path, steps: int = 400, **evaluate: Any) -> Recipe:
    return recipe_of(
        steps=steps,
        optimizer={"name": "sgd", "lr": 0.3},
        evaluate=EVERY | evaluate,
        checkpoint={"every_steps": 5, "keep": 1, "keep_best": 1},
        run_dir=str(folder),
    )


class Heard:
    """A sink that remembers events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def step(self, stats: Any) -> None:
        return

    def event(self, name: str, record: Any) -> None:
        self.events.append((name, dict(record)))

    def close(self) -> None:
        return


def run(cluster: Cluster, recipe: Recipe, resume: bool = False) -> tuple[int, list[tuple[str, Any]]]:
    session, heard = build_test_session(cluster, recipe, separable), Heard()
    folder = Path(str(recipe.run_dir))
    if resume:
        run_folder.restore_run(session, folder)
    result = fit(session, folder, [heard] if session.is_first else [])
    told = [e for e in heard.events if e[0] in ("evaluation", "early-stop")]
    return result.steps, told


@pytest.mark.capability("N1")
def test_a_run_ends_after_its_patience_on_any_number_of_ranks_and_after_a_resume(tmp_path: Path) -> None:
    steps, told = run(Cluster.single(), stopping_recipe(tmp_path / "one"))
    values = {e["step"]: e["metrics"]["accuracy"] for name, e in told if name == "evaluation"}
    ((_, end),) = [one for one in told if one[0] == "early-stop"]
    assert steps < 400 and end["step"] == steps == end["best_step"] + 15
    assert end["best"] == max(values.values()) == values[end["best_step"]]
    two = run_ranks(run, 2, stopping_recipe(tmp_path / "two"))
    assert [found[0] for found in two] == [steps, steps]
    half, _ = run(Cluster.single(), stopping_recipe(tmp_path / "half", steps=steps - 7))
    assert half == steps - 7
    assert run(Cluster.single(), stopping_recipe(tmp_path / "half"), resume=True)[0] <= steps
    shelf = CheckpointCatalog.read(StorageFolder(str(tmp_path / "one" / "checkpoints")))
    assert max(values[kept.step] for kept in shelf.whole) == end["best"]


def test_an_evaluation_that_a_stop_has_prevented_is_made_by_the_resumed_run(tmp_path: Path) -> None:
    """A signal ends a round before what is due after it; here the round is the one to step 10 of 20."""

    def stopped_at_ten(folder: Path) -> list[int]:
        recipe = stopping_recipe(folder, steps=20, patience=0)
        session, heard = build_test_session(Cluster.single(), recipe, separable), Heard()
        with patch.object(RunSchedule, "_evaluate_and_save", lambda self, before: before >= 9):
            assert fit(session, folder, [heard], until="steps:10").steps == 10
        return [
            e["step"] for name, e in run(Cluster.single(), recipe, resume=True)[1] if name == "evaluation"
        ]

    assert stopped_at_ten(tmp_path / "whole") == [10, 15, 20]
    with patch.object(RunSchedule, "make_missed_evaluation", lambda self: None):
        assert stopped_at_ten(tmp_path / "twin") == [15, 20]


def test_patience_counts_evaluations_since_the_best() -> None:
    def at(step: int, value: float) -> Evaluation:
        return Evaluation(step, value, {"f1": value}, 1, 1.0)

    lower = EvaluationScores(EvaluateRecipe(every_steps=1, patience=2), {})
    over = [
        (lower.add(at(step, v)), lower.is_over())[1] for step, v in enumerate([3.0, 2.0, 2.5, 1.0, 1.0, 1.5])
    ]
    assert over == [False, False, False, False, False, True]
    higher = EvaluationScores(
        EvaluateRecipe(every_steps=1, patience=1, metric="f1", better="higher"), {0: -0.5}
    )
    assert higher.add(at(1, 0.7)) == -0.7 and not higher.is_over()
    higher.add(at(2, 0.6))
    assert higher.is_over() and higher.record(2)["best"] == 0.7
    with pytest.raises(RecipeError, match="no metric 'auc'; it has loss, f1"):
        EvaluationScores(EvaluateRecipe(metric="auc"), {}).add(at(1, 1.0))
    with pytest.raises(RecipeError, match="expected only with every_steps"):
        EvaluateRecipe(patience=3)
