"""What DiLoCo costs in loss: four replicas of a byte-gpt after equal samples, over five seeds.

Loss does not depend on the link, so replicas meet over the loopback; `diloco` measures bytes and time in the
lab. Every side begins with a seed's weights and takes its samples at the same rates. A gap is the mean of
what a seed's held-out loss is above that of its every-step, with its standard error. DiLoCo is the streaming
one, in four bits, but for H = 1, where fragments have no steps of their own. The last side trains longer, and
tells after how many samples it was first at every-step's loss.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
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
_REPLICAS = 4
_LOOKS = 96  # steps between two evaluations


@dataclass(frozen=True)
class Side:
    """One rule.

    Args:
        interval: H; 0: every-step.
        rate, momentum: of the outer optimizer.
        longer: how many times the samples.
        seeds: of those there are, so many.
    """

    name: str
    interval: int = 0
    rate: float = 0.7
    momentum: float = 0.9
    longer: int = 1
    seeds: int = 5

    @property
    def strategy(self) -> str:
        """Of the recipe."""
        return f"replicas={_REPLICAS} " + (f"sync=diloco:{self.interval} codec=int4" if self.interval else "")

    def outer(self) -> dict[str, float | int]:
        """Of the recipe: fragments leave in turn, and travel beside the steps."""
        found: dict[str, float | int] = {"lr": self.rate, "momentum": self.momentum}
        if self.interval < 8:
            return found
        return {**found, "fragments": 4, "delay_steps": self.interval // 8, "mixing": 0.5}


SIDES = (
    Side("every-step"),
    Side("diloco:96", 96),
    Side("diloco:96, outer rate 1, no momentum", 96, 1.0, 0.0),
    Side("diloco:32", 32),
    Side("diloco:8", 8),
    Side("diloco:1", 1, seeds=2),
    Side("diloco:96, 4 times the samples", 96, longer=4, seeds=1),
)

Found = dict[str, dict[int, list[tuple[int, float]]]]
"""By side and seed: the steps of each evaluation, and its loss."""


def recipe_of(side: Side, seed: int, *, quick: bool) -> Recipe:
    """What a run trains: 2.1 million parameters, a window of 64 bytes for a replica and step."""
    sizes = ("options.layers=1", "options.width=32") if quick else ("options.layers=3", "options.width=240")
    steps = (8 if quick else 3 * _LOOKS) * side.longer
    changes = [
        *("options.context=64", "options.held_out_tokens=32768", "batch.size=4", "batch.shards=4", *sizes),
        *(f"steps={steps}", f"seed={seed}", "schedule.warmup_steps=20", "precision.compute=fp32"),
        f"evaluate.every_steps={_LOOKS}",
    ]
    recipe = load_recipe(_RECIPES / "byte-gpt.toml", changes)
    recipe = recipe.replace(strategy=Strategy.parse(side.strategy))
    return recipe.replace(outer=recipe.outer.replace(**side.outer())) if side.interval else recipe


def losses_of(recipe: Recipe, cluster: Cluster) -> list[tuple[int, float]]:
    """Held-out losses in nats a byte, with the steps before each; the last is that of the end."""
    torch.set_num_threads(1)
    session = build_session(recipe, build_task(recipe, None, _RECIPES), cluster, torch.device("cpu"))
    found = []
    for _ in session.rounds():
        if session.state.step % _LOOKS == 0 or session.state.step == recipe.steps:
            held_out = evaluate(session)
            assert held_out is not None
            found.append((session.state.step, held_out.loss))
    session.close()
    return found


def train(seeds: Sequence[int], *, quick: bool) -> Found:
    """All runs, seed by seed; what each has found goes to standard error at once."""
    found: Found = {side.name: {} for side in SIDES}
    for seed in seeds:
        for side in SIDES:
            if seeds.index(seed) >= side.seeds:
                continue
            run = partial(losses_of, recipe_of(side, seed, quick=quick))
            losses = run_ranks(run, _REPLICAS, deadline=3000.0)[0]
            found[side.name][seed] = losses
            print(json.dumps([side.name, seed, losses]), file=sys.stderr, flush=True)
    return found


def table_of(found: Found) -> Table:
    """Each side beside every-step after as many samples."""
    every, rows = {seed: losses[-1][1] for seed, losses in found[SIDES[0].name].items()}, []
    for side in SIDES:
        last = {seed: losses[-1][1] for seed, losses in found[side.name].items()}
        if not last or side.longer > 1:
            continue
        gaps = [100 * (loss / every[seed] - 1) for seed, loss in last.items()]
        rows.append(
            (
                side.name,
                f"{statistics.fmean(last.values()):.4f}",
                f"{_spread([*last.values()]):.4f}",
                f"{statistics.fmean(gaps):+.1f} ± {_spread(gaps) / len(gaps) ** 0.5:.1f} %",
                " ".join(f"{loss:.4f}" for loss in last.values()),
            )
        )
    head = ("side", "mean", "spread", "above every-step", "losses by seed")
    return Table("Held-out loss after equal samples, nats a byte", head, rows)


def times_of(found: Found) -> Table:
    """How many times every-step's samples it took to be at its loss."""
    every, rows = found[SIDES[0].name], []
    for side in SIDES:
        for seed, losses in found[side.name].items() if side.longer > 1 else ():
            steps, target = every[seed][-1]
            there = [step for step, loss in losses if loss <= target]
            times = f"{there[0] / steps:.2f}" if there else f"more than {losses[-1][0] / steps:.0f}"
            rows.append((side.name, f"{seed}", f"{target:.4f}", times, f"{losses[-1][1]:.4f}"))
    head = ("side", "seed", "every-step's loss", "times its samples", "loss at the end")
    return Table(f"Samples to every-step's loss, looked at every {_LOOKS} steps", head, rows)


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def report_of(found: Found, seeds: Sequence[int]) -> Report:
    """Both tables."""
    question = f"{_REPLICAS} replicas of a byte-gpt: Streaming DiLoCo beside every-step, {len(seeds)} seeds."
    data: Mapping[str, Any] = {"losses": found}
    return Report(question, [table_of(found), times_of(found)], {**data})


def measure(options: Options) -> Report:
    """All sides and seeds."""
    seeds = (1,) if options.quick else (1, 2, 3, 4, 5)
    return report_of(train(seeds, quick=options.quick), seeds)


if __name__ == "__main__":
    present(measure, __doc__ or "")
