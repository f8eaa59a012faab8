"""Ranks that compute the same: what they report counts once, and what they hold in common is not summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.parallel import session_context
from paceline.parallel.placement import TensorPlacement, TensorTransform
from paceline.recipe import Recipe, Strategy
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session
from paceline.verification import compare_with_oracle


def build(zero_gradient: bool = False) -> Task:
    """All tensor ranks see the same in BatchNorm. A bias right before one has a gradient of zero."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(4)] if zero_gradient else []
    pair = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)]
    model = nn.Sequential(nn.BatchNorm1d(6), *pair, *norm, nn.Tanh(), nn.Linear(4, 2))

    def loss(model: nn.Module, x: Tensor) -> Loss:
        return Loss((model(x) - 1).square().sum(), len(x))

    plan = {"1": "column", "3": "row"}
    return Task(model, torch.randn(32, 6) * 3 + 1, loss, tensor=plan, stages=chain)


def chain(model: nn.Sequential) -> Sequence[nn.Module]:
    return list(model)


def recipe(strategy: str) -> Recipe:
    settings = {"task": "own", "steps": 6, "batch": {"size": 8, "shards": 2}}
    return Recipe(**settings, strategy=Strategy.parse(strategy))


@pytest.mark.capability("Z1", "Z2")
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("replicas=1 tensor=2", 2), ("replicas=2 tensor=2", 4), ("replicas=1 tensor=2 pipeline=2", 4)],
)
def test_running_statistics_move_once_however_many_ranks_compute_them(strategy: str, ranks: int) -> None:
    def verified(cluster: Cluster, everybody: bool) -> tuple[bool, str]:
        if everybody:  # the twin
            session_context.SessionContext.reports = property(lambda self: True)
        report = compare_with_oracle(recipe(strategy), build(), cluster, CPU, 3)
        return report.ok, str(report.failure)

    assert all(ok for ok, _ in run_ranks(verified, ranks, False))
    assert not any(ok for ok, _ in run_ranks(verified, ranks, True))


@pytest.mark.capability("Z2")
def test_a_gradient_that_is_zero_but_for_rounding_raises_no_alarm() -> None:
    """Ranks add up a product in parts, so no digit of it agrees with the oracle's; bounds stay sharp."""

    def verified(cluster: Cluster) -> tuple[bool, float, str]:
        report = compare_with_oracle(recipe("replicas=1 tensor=2"), build(True), cluster, CPU, 4)
        bounds = [f.bound for f in report.worst.values() if f.quantity == "gradient"]
        return report.ok, max(bounds), str(report.failure)

    for ok, widest, failure in run_ranks(verified, 2):
        assert ok, failure
        assert widest < 1e-4  # gradients are of the size of 1


@pytest.mark.capability("E2")
def test_a_sum_over_ranks_that_hold_other_pieces_is_an_error() -> None:
    def refused(cluster: Cluster) -> str:
        cut = TensorTransform.cut

        def summed_too(
            self: TensorTransform, held: TensorPlacement, coordinate: int
        ) -> TensorPlacement | None:
            found = cut(self, held, coordinate)
            return found and replace(found, sums=("tensor", *found.sums))

        TensorTransform.cut = summed_too
        with pytest.raises(StrategyError, match="should be summed over tensor, replica, shard"):
            build_test_session(cluster, recipe("replicas=1 tensor=2"), build)
        return "refused"

    assert run_ranks(refused, 2) == ["refused"] * 2
