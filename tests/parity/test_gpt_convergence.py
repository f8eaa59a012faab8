"""A GPT on real text under asynchronous and local rules: not exact, so judged by its loss over several seeds.

What is equal is the number of samples. Means over the seeds are compared, with two standard errors of their
difference. The twin is every-step after half of the samples: it has to be beyond the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, variance
from typing import Any

import pytest
import torch

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import evaluate
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.recipes import recipe_of

SMALL = {"context": 32, "layers": 1, "heads": 2, "width": 32, "train_tokens": 2**16, "held_out_tokens": 2**13}
LARGER = {
    "context": 64,
    "layers": 2,
    "heads": 2,
    "width": 64,
    "train_tokens": 2**20,
    "held_out_tokens": 2**15,
}
SYNC = "replicas=2"
SERVED = ("servers=1 sync=server-async", "servers=1 sync=bounded:2")


def gpt_recipe(strategy: str, options: Mapping[str, Any], steps: int, seed: int) -> Recipe:
    lr = 2e-3 if strategy in SERVED else 4e-3  # two updates a step, each of half a batch
    return recipe_of(
        strategy,
        task="byte-gpt",
        options=dict(options),
        steps=steps,
        seed=seed,
        batch={"size": 16, "shards": 2},
        optimizer={"name": "adamw", "lr": lr, "betas": [0.9, 0.95], "clip_norm": 1.0},
        schedule={"decay": "cosine", "final": 0.1},
        precision={"compute": "fp32"},
    )


Run = tuple[str, int]
"""A strategy, and the steps of a run."""


def losses(
    cluster: Cluster, runs: Sequence[Run], options: Mapping[str, Any], seeds: Sequence[int]
) -> dict[Run, list[float]]:
    """Held-out losses in nats a byte."""
    torch.set_num_threads(1)
    found: dict[Run, list[float]] = {}
    for run in runs:
        for seed in seeds:
            session = build_test_session(cluster, gpt_recipe(run[0], options, run[1], seed))
            list(session.rounds())
            evaluation = evaluate(session)
            assert evaluation is not None
            found.setdefault(run, []).append(evaluation.loss)
            session.close()
    return found


def bound_of(right: Sequence[float], own: Sequence[float], times: float) -> float:
    """So many times the mean of every-step, and two standard errors of the difference of the means."""
    error = (variance(right) / len(right) + variance(own) / len(own)) ** 0.5
    return times * mean(right) + 2 * error


def require_near(
    bounds: Mapping[str, float], options: Mapping[str, Any], steps: int, seeds: Sequence[int]
) -> None:
    """Every rule is near every-step after the same samples, and every-step after half of them is not."""
    alone = [(SYNC, steps), (SYNC, steps // 2), *((one, steps) for one in bounds if one not in SERVED)]
    found = run_ranks(losses, 2, alone, options, seeds, deadline=800)[0]
    found |= run_ranks(losses, 3, [(one, steps) for one in SERVED], options, seeds, deadline=800)[0]
    right, half = found[SYNC, steps], found[SYNC, steps // 2]
    for strategy, times in bounds.items():
        own = found[strategy, steps]
        assert mean(own) <= bound_of(right, own, times), (strategy, found)
    assert mean(half) > bound_of(right, half, min(bounds.values())), (half, right)


@pytest.mark.soak
@pytest.mark.capability("V9", "B3", "I4", "I6")
def test_a_small_gpt_learns_as_much_as_under_every_step() -> None:
    bounds = {"sync=local:4": 1.03, **dict.fromkeys(SERVED, 1.03)}
    require_near(bounds, SMALL, 60, (1, 2, 3))


@pytest.mark.soak
@pytest.mark.capability("V9", "B3", "I4", "I6")
@pytest.mark.timeout(1800)
def test_a_larger_gpt_learns_nearly_as_much_as_under_every_step() -> None:
    bounds = {"sync=local:4": 1.03, "sync=diloco:8": 1.15, **dict.fromkeys(SERVED, 1.08)}
    require_near(bounds, LARGER, 300, (1, 2, 3, 4, 5))
