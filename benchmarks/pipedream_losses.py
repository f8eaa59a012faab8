"""The loss of the digits after PipeDream and after a pipeline that is flushed, over five seeds.

Stages train each task with each seed, all in the same processes, and with the same samples and rates. A flow
meets its bound if the mean of its held-out losses is within 2 % of that of every-step; the spread over seeds
stands beside, and the mean of what a seed loses or gains with its standard error, since all three begin from
the same weights. On digits the flat end of training tells little: accuracy is there, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Options, Report, Table, present
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy, load_recipe
from paceline.session.build import build_session
from paceline.session.evaluation import evaluate
from paceline.session.start_rank import build_task
from paceline.testing import run_ranks

_RECIPES = Path(__file__).resolve().parent.parent / "recipes"
_BOUND = 1.02
FLOWS = ("every-step", "pipedream", "pipedream:2bw")


@dataclass(frozen=True)
class Case:
    """A pipeline and how long it trains.

    Args:
        changes: of the recipe of the digits.
    """

    title: str
    stages: int
    changes: tuple[str, ...]


def cases(options: Options) -> list[Case]:
    """What is trained."""
    if options.quick:
        return [Case("quick digits", 2, ("epochs=0.5", "schedule.warmup_steps=1"))]
    sgd = ('optimizer.name="sgd"', "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.weight_decay=0.0")
    few = ("epochs=12", "batch.shards=2")
    return [
        Case("digits, AdamW, 12 epochs, 2 stages", 2, few),
        Case("digits, SGD with momentum 0.9, 12 epochs, 2 stages", 2, (*few, *sgd)),
    ]


def recipe_of(case: Case, flow: str, seed: int) -> Recipe:
    """What a run trains."""
    changes = [*case.changes, f"seed={seed}", "precision.compute=fp32"]
    recipe = load_recipe(_RECIPES / "digits.toml", changes)
    return recipe.replace(strategy=Strategy(replicas=1, pipeline=case.stages, sync=flow))


def outcome_of(case: Case, flow: str, seed: int, cluster: Cluster) -> tuple[float, float]:
    """Loss and accuracy of held-out samples after training."""
    recipe = recipe_of(case, flow, seed)
    session = build_session(recipe, build_task(recipe, None, _RECIPES), cluster, torch.device("cpu"))
    for _ in session.rounds():
        pass
    held_out = evaluate(session)
    session.close()
    assert held_out is not None
    return held_out.loss, held_out.metrics["accuracy"]


def train(case: Case, seeds: Sequence[int], cluster: Cluster) -> dict[str, list[tuple[float, float]]]:
    """All runs of a case, by flow."""
    torch.set_num_threads(1)
    return {flow: [outcome_of(case, flow, seed, cluster) for seed in seeds] for flow in FLOWS}


def table_of(case: Case, found: dict[str, list[tuple[float, float]]]) -> Table:
    """Each flow beside the pipeline that is flushed."""
    flushed, rows = [loss for loss, _ in found[FLOWS[0]]], []
    for flow, outcomes in found.items():
        losses, right = [loss for loss, _ in outcomes], [accuracy for _, accuracy in outcomes]
        gaps = [loss / other - 1 for loss, other in zip(losses, flushed, strict=True)]
        ratio, error = statistics.fmean(losses) / statistics.fmean(flushed), _spread(gaps) / len(gaps) ** 0.5
        rows.append(
            (
                flow,
                f"{statistics.fmean(losses):.4f}",
                f"{_spread(losses):.4f}",
                f"{ratio:.3f}",
                f"{100 * statistics.fmean(gaps):+.1f} ± {100 * error:.1f} %",
                f"{_BOUND} {'met' if ratio <= _BOUND else 'missed'}",
                f"{100 * statistics.fmean(right):.2f} %",
                " ".join(f"{loss:.4f}" for loss in losses),
            )
        )
    head = ("flow", "mean", "spread", "/ flushed", "by seed", "bound", "accuracy", "losses by seed")
    return Table(case.title, head, rows)


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def measure(options: Options) -> Report:
    """All cases."""
    seeds = (1, 2) if options.quick else (1, 2, 3, 4, 5)
    tables: list[Table] = []
    data: dict[str, Any] = {}
    for case in cases(options):
        found = run_ranks(partial(train, case, seeds), case.stages, deadline=2400.0)[0]
        tables.append(table_of(case, found))
        data[case.title] = found
    return Report(
        f"Losses of pipelines by what flows through them, over {len(seeds)} seeds.", tables, {"cases": data}
    )


if __name__ == "__main__":
    present(measure, __doc__ or "")
