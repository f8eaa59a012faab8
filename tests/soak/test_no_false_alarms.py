"""Right code raises no alarm: 19 foreign models under seven strategies, strict where samples are apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import CPU
from paceline.verification import compare_with_oracle
from paceline.verification.verification_report import conclusion_lines
from tests.parity.correct_tasks import CORRECT_TASKS

STEPS = 4
COUPLED = {"rarely-used"}  # the batch chooses the expert
WAYS: dict[str, dict[str, Any]] = {
    "replicas=2": {},
    "replicas=2 route=tree": {},
    "replicas=1 shard=2 zero=1": {},
    "replicas=1 shard=2 zero=3": {},
    "replicas=1 pipeline=2": {},
    "replicas=2 lanes=2": {},
    "replicas=2 route=native": {"reproducible": True},
}


def verified(cluster: Cluster, way: str, seeds: list[int]) -> dict[tuple[str, int], str]:
    """What is said of each model and seed; nothing if all steps agree."""
    torch.set_num_threads(1)
    return {(name, seed): one(cluster, way, name, seed) for name in CORRECT_TASKS for seed in seeds}


def one(cluster: Cluster, way: str, name: str, seed: int) -> str:
    settings: dict[str, Any] = {
        "task": "given",
        "steps": 20,
        "seed": seed,
        "batch": {"size": 13, "shards": 4},
        "optimizer": {"name": "adamw", "lr": 0.01, "clip_norm": 0.5},
        "runtime": {"bucket_bytes": 64},
        "strategy": Strategy.parse(way),
    }
    recipe = Recipe(**(settings | CORRECT_TASKS[name][1] | WAYS[way]))
    try:
        report = compare_with_oracle(
            recipe, CORRECT_TASKS[name][0](), cluster, CPU, STEPS, strict=name not in COUPLED
        )
    except PacelineError as error:
        return f"refused: {error}"
    return "" if report.ok and report.steps == STEPS else " ".join(conclusion_lines(report))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.capability("Z2")
def test_a_hundred_clean_runs_raise_no_alarm() -> None:
    found = {
        (way, *key): said
        for way in WAYS
        for key, said in run_ranks(verified, 2, way, [1, 2], deadline=900)[0].items()
    }
    alarms = {key: said for key, said in found.items() if said and not said.startswith("refused")}
    assert not alarms
    clean = [key for key, said in found.items() if not said]
    assert len(clean) >= 100
    assert len({name for _, name, _ in clean}) >= 15 and len({way for way, _, _ in clean}) >= 6
