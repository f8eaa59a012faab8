"""Rules with a server whose steps are those of one process are verified step by step."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, make_task
from paceline.testing.planted_faults import PLANTED_FAULTS
from paceline.verification import VerificationReport, compare_with_oracle
from paceline.verification.verification_report import conclusion_lines

EXACT = ("servers=1 sync=server", "servers=1 sync=bounded:0", "servers=1 sync=backup:0")


def served(strategy: str, **changes: Any) -> Recipe:
    """Shares of a batch differ, the last batch is smaller, and BatchNorm's buffers come from the workers."""
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "convnet", "dropout": 0.2},
        "steps": 40,
        "batch": {"size": 27, "shards": 5},
        "optimizer": {"name": "adamw", "lr": 3e-3, "clip_norm": 0.5},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


def verify(cluster: Cluster, strategy: str, **changes: Any) -> VerificationReport:
    recipe = served(strategy, **changes)
    return compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 3)


@pytest.mark.capability("I1", "Z2")
def test_a_server_that_waits_for_all_workers_is_verified() -> None:
    def verify_all(cluster: Cluster) -> list[VerificationReport]:
        return [*(verify(cluster, s) for s in EXACT), verify(cluster, EXACT[0], reproducible=True)]

    for reports in run_ranks(verify_all, 3):
        for report in reports:
            assert report.ok and report.steps == 3, conclusion_lines(report)


@pytest.mark.capability("Z2")
def test_a_broken_round_of_a_server_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin, once in what workers run, and once in what they receive."""

    def verify_broken(cluster: Cluster) -> list[VerificationReport]:
        recipe = served(EXACT[0])
        components = PLANTED_FAULTS["same-data"].components(2)
        same_data = compare_with_oracle(recipe, make_task(recipe), cluster, CPU, 3, components=components)
        with monkeypatch.context() as broken:
            broken.setattr("paceline.sync.server.server_worker.load_server_values", lambda *values: None)
            stale_worker = verify(cluster, EXACT[1])
        return [same_data, stale_worker]

    for same_data, stale_worker in run_ranks(verify_broken, 3):
        assert not same_data.ok and same_data.diagnosis.cause == "same data on every rank"
        assert stale_worker.failure is not None and stale_worker.diagnosis.cause == "ranks drifted apart"


@pytest.mark.parametrize("rule", ["servers=1 sync=bounded:1", "servers=1 sync=server-async"])
def test_a_server_with_stale_gradients_has_no_step_to_compare(rule: str) -> None:
    with pytest.raises(StrategyError, match="is an approximation"):
        verify(Cluster.single(), rule)
