"""LAMB and Adam at 32 times the batch: the held-out loss on digits after equal samples, over five seeds.

Adam has the best of three rates at the small batch, scaled by 32 (linear rule) or by its root; LAMB has the
best of three rates at the large batch. One more side is Adam with the best of three rates at the large batch,
which is no longer a scaled rate. Rates are chosen with a seed of their own. Every run warms up for a tenth of
its updates, and its rate falls linearly to 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch

from benchmarks.report import Options, Report, Table, present
from paceline.errors import NumericError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session.build import build_session
from paceline.session.evaluation import evaluate
from paceline.session.start_rank import build_task

BASE, FACTOR = 16, 32
SAMPLES = 14_980  # two epochs of the images and their copies
HIDDEN = (128, 128)
_RATES = {"adam": (3e-3, 1e-2, 3e-2), "lamb": (0.01, 0.03, 0.1)}


@dataclass(frozen=True)
class Side:
    """One way to train.

    Args:
        factor: of the batch.
        rule: by which the rate of the small batch is scaled; "none": the rate is that of this batch.
    """

    name: str
    optimizer: str
    factor: int
    rule: str = "none"


BASE_ADAM = Side("adam, batch 16", "adam", 1)
LINEAR = Side("adam, batch 512, 32 times the rate", "adam", FACTOR, "linear")
ROOT = Side("adam, batch 512, 5.66 times the rate", "adam", FACTOR, "sqrt")
TUNED = Side("adam, batch 512, a rate of its own", "adam", FACTOR)
LAMB = Side("lamb, batch 512", "lamb", FACTOR)
SIDES = (BASE_ADAM, LINEAR, ROOT, TUNED, LAMB)


def recipe_of(side: Side, lr: float, seed: int, samples: int = SAMPLES) -> Recipe:
    """Return the recipe of a run."""
    batch = BASE * side.factor
    steps = samples // batch
    scaling = {} if side.rule == "none" else {"batch_scaling": side.rule, "base_batch": BASE}
    return Recipe(
        task="digits",
        options={"model": "mlp", "hidden": list(HIDDEN), "shifts": True},
        steps=steps,
        seed=seed,
        strategy=Strategy(replicas=1),
        batch={"size": batch, "shards": 1},
        optimizer={"name": side.optimizer, "lr": lr},
        schedule={"decay": "linear", "warmup_steps": max(1, steps // 10), **scaling},
        precision={"compute": "fp32"},
    )


def loss_of(side: Side, lr: float, seed: int, samples: int = SAMPLES) -> float:
    """Train, and return the loss of the held-out images; infinite if training has diverged."""
    recipe = recipe_of(side, lr, seed, samples)
    task = build_task(recipe, None, Path(__file__).parent)
    session = build_session(recipe, task, Cluster.single(), torch.device("cpu"))
    try:
        for _ in session.rounds():
            pass
        held_out = evaluate(session)
    except NumericError:
        return inf
    finally:
        session.close()
    assert held_out is not None
    return held_out.loss


def choose_rates(samples: int = SAMPLES) -> dict[Side, float]:
    """Return the rate of each side, with seed 0; a scaled side has that of the small batch."""
    tuned = {
        side: min(_RATES[side.optimizer], key=lambda lr: loss_of(side, lr, 0, samples))
        for side in (BASE_ADAM, TUNED, LAMB)
    }
    return tuned | dict.fromkeys((LINEAR, ROOT), tuned[BASE_ADAM])


def train(seeds: Sequence[int], samples: int = SAMPLES) -> dict[Side, tuple[float, list[float]]]:
    """Return the rate and the losses of each side."""
    rates = choose_rates(samples)
    return {
        side: (rates[side], [loss_of(side, rates[side], seed, samples) for seed in seeds]) for side in SIDES
    }


def table_of(found: Mapping[Side, tuple[float, Sequence[float]]]) -> Table:
    """Return a row for each side."""
    rows = []
    for side, (lr, losses) in found.items():
        lower = sum(lamb < loss for lamb, loss in zip(found[LAMB][1], losses, strict=True))
        rows.append(
            (
                side.name,
                f"{lr:g}",
                f"{statistics.fmean(losses):.4f}",
                f"{statistics.stdev(losses):.4f}",
                "-" if side == LAMB else f"{lower} of {len(losses)}",
                " ".join(f"{loss:.4f}" for loss in losses),
            )
        )
    columns = ("side", "rate", "mean", "spread", "LAMB is lower", "losses by seed")
    return Table("digits, MLP of widths 128 and 128, 14,980 samples", columns, rows)


def measure(options: Options) -> Report:
    """Train all sides."""
    torch.set_num_threads(1)
    seeds, samples = ((1, 2), SAMPLES // 8) if options.quick else ((1, 2, 3, 4, 5), SAMPLES)
    found = train(seeds, samples)
    data = {side.name: {"rate": lr, "losses": losses} for side, (lr, losses) in found.items()}
    question = f"Held-out loss at 32 times the batch after equally many samples, over {len(seeds)} seeds."
    return Report(question, [table_of(found)], {"sides": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
