"""The loss of two tasks under each codec, over five seeds; and the top 1 % with and without feedback.

Two ranks train each task with each seed, all in the same processes. A codec meets its bound if the mean of
its losses is within 1 % of that of fp32; the spread over seeds stands beside. Top 1 % is to reach 1.02 times
the dense loss with error feedback, and is not to without.
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
from paceline.comm.collectives import CodedCollective, Collective
from paceline.job.cluster import Cluster
from paceline.parallel.session_context import Components
from paceline.recipe import Recipe, Strategy, load_recipe
from paceline.session.build import build_session
from paceline.session.evaluation import evaluate
from paceline.session.start_rank import build_task
from paceline.testing import run_ranks

_RECIPES = Path(__file__).resolve().parent.parent / "recipes"
_BOUND, _TOP_BOUND = 1.01, 1.02
FORGETS = "topk:0.01, no feedback"
CODECS = ("fp32", "bf16", "int8", "int4", "sign", "topk:0.01", FORGETS, "topk:0.01+int4", "lowrank:2")
MOMENTUM = "dgc:0.01:0.9"


@dataclass(frozen=True)
class Case:
    """A task.

    Args:
        changes: of its recipe.
        codecs: the first is the one that others are compared with.
    """

    title: str
    recipe: str
    changes: tuple[str, ...]
    codecs: tuple[str, ...] = CODECS


def cases(options: Options) -> list[Case]:
    """What is trained."""
    if options.quick:
        return [Case("quick digits", "digits", ("epochs=0.2", "schedule.warmup_steps=1"), ("fp32", "int8"))]
    small = ("options.layers=1", "options.width=64", "options.context=64", "epochs=", "steps=150")
    sgd = ('optimizer.name="sgd"', "optimizer.lr=0.2", "epochs=12")
    plain = (
        'optimizer.name="sgd"',
        "optimizer.lr=0.1",
        "epochs=40",
        "options.hidden=[64]",
        "options.dropout=0.0",
    )
    slow = (
        'optimizer.name="sgd"',
        "optimizer.betas=",
        "optimizer.weight_decay=0.0",
        "optimizer.lr=0.5",
        "steps=1000",
    )
    return [
        Case("digits, AdamW, 12 epochs", "digits", ("epochs=12",)),
        Case("byte-gpt of 1 layer, width 64, AdamW, 150 steps", "byte-gpt", small),
        Case(
            "digits, a small MLP, plain SGD, 40 epochs",
            "digits",
            (*plain, "options.shifts=false", "batch.size=64"),
        ),
        Case("byte-gpt of 1 layer, width 64, plain SGD, 1,000 steps", "byte-gpt", (*small, *slow)),
        Case("digits, SGD with momentum 0.9 where gradients are sent", "digits", sgd, ("fp32", MOMENTUM)),
    ]


def forget(path: Collective) -> Collective:
    """Keep nothing of what coding loses."""
    if isinstance(path, CodedCollective):
        path.codec.needs_error_feedback = False
    return path


def recipe_of(case: Case, codec: str, seed: int, ranks: int) -> Recipe:
    """What a run trains."""
    changes = list(case.changes)
    if MOMENTUM in case.codecs and codec == "fp32":
        changes.append("optimizer.momentum=0.9")
    word = codec.partition(",")[0]
    recipe = load_recipe(
        _RECIPES / f"{case.recipe}.toml", [*changes, f"seed={seed}", "precision.compute=fp32"]
    )
    return recipe.replace(strategy=Strategy(replicas=ranks, route="native", codec=word))


def loss_of(case: Case, codec: str, seed: int, cluster: Cluster) -> float:
    """The loss of held-out samples after training."""
    recipe = recipe_of(case, codec, seed, cluster.world_size)
    task = build_task(recipe, None, _RECIPES)
    components = Components(collective=forget) if codec == FORGETS else Components()
    session = build_session(recipe, task, cluster, torch.device("cpu"), components=components)
    for _ in session.rounds():
        pass
    held_out = evaluate(session)
    session.close()
    assert held_out is not None
    return held_out.loss


def train(case: Case, seeds: Sequence[int], cluster: Cluster) -> dict[str, list[float]]:
    """All runs of a task, by codec."""
    torch.set_num_threads(1)
    return {codec: [loss_of(case, codec, seed, cluster) for seed in seeds] for codec in case.codecs}


def table_of(case: Case, found: dict[str, list[float]]) -> Table:
    """Each codec beside the first one."""
    dense, rows = statistics.fmean(found[case.codecs[0]]), []
    for codec, losses in found.items():
        ratio = statistics.fmean(losses) / dense
        bound = _TOP_BOUND if codec in (FORGETS, "topk:0.01", MOMENTUM) else _BOUND
        rows.append(
            (
                codec,
                f"{statistics.fmean(losses):.4f}",
                f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "-",
                f"{ratio:.3f}",
                f"{bound} {'met' if ratio <= bound else 'missed'}",
                " ".join(f"{loss:.4f}" for loss in losses),
            )
        )
    return Table(case.title, ("codec", "mean", "spread", "/ fp32", "bound", "losses by seed"), rows)


def measure(options: Options) -> Report:
    """All tasks."""
    seeds = (1, 2) if options.quick else (1, 2, 3, 4, 5)
    tables: list[Table] = []
    data: dict[str, Any] = {}
    for case in cases(options):
        found = run_ranks(partial(train, case, seeds), 2, deadline=800.0)[0]
        tables.append(table_of(case, found))
        data[case.title] = found
    return Report(f"Two ranks: losses by codec over {len(seeds)} seeds.", tables, {"cases": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
