"""Mistakes in what users bring: `verify` on two ranks detects each, and passes once it is fixed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import CPU
from paceline.verification import VerificationReport, compare_with_oracle
from tests.known_mistakes.data import NUM_SAMPLES
from tests.known_mistakes.tasks import TASKS

STEPS = 5


def verify(cluster: Cluster, name: str, *, wrong: bool) -> VerificationReport:
    """Two shards on each of two ranks, two steps an epoch."""
    torch.set_num_threads(1)
    recipe = Recipe(
        task="own", steps=STEPS, batch={"size": NUM_SAMPLES // 2, "shards": 4}, strategy=Strategy()
    )
    task = TASKS[name](cluster.global_rank, cluster.world_size, wrong=wrong).task()
    return compare_with_oracle(recipe, task, cluster, CPU, STEPS)


def all_of_them(cluster: Cluster) -> dict[str, tuple[VerificationReport, VerificationReport]]:
    return {name: (verify(cluster, name, wrong=True), verify(cluster, name, wrong=False)) for name in TASKS}


@pytest.fixture(scope="module")
def reports() -> dict[str, tuple[VerificationReport, VerificationReport]]:
    found: Sequence[dict[str, tuple[VerificationReport, VerificationReport]]] = run_ranks(all_of_them, 2)
    return found[0]


@pytest.mark.capability("Z17", "Z2")
@pytest.mark.parametrize("name", TASKS)
def test_verify_is_red_with_a_known_mistake_and_green_without(
    name: str, reports: dict[str, tuple[VerificationReport, VerificationReport]]
) -> None:
    wrong, fixed = reports[name]
    assert fixed.ok, (fixed.failure, fixed.diagnosis)
    assert fixed.steps == STEPS
    assert not wrong.ok
