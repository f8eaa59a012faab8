"""What every-step owed counts once where replicas take over that do not all apply their first steps.

A vector of ones is owed where local steps begin. The gradient does not depend on the parameters, so the run
without it ends as far away as one step of the whole batch would have moved them by it.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.comm.reduction import PendingResidual
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import Session, build_session
from paceline.sync.update import PendingUpdate, UpdateResult, insert_part_before
from paceline.testing import run_ranks
from paceline.testing.parity import CPU

pytestmark = [pytest.mark.timeout(240), pytest.mark.capability("Z1", "H4")]
RATE, SIZE, SWITCH = 0.5, 8, 2
PLAIN = {"lr": 1.0, "momentum": 0.0}
STREAMED = {**PLAIN, "fragments": 2}


class Sums(nn.Module):
    """Two tensors, so that there may be two fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(40)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a + x @ self.b


def session_of(cluster: Cluster, sync: str, outer: dict[str, Any]) -> Session:
    data = list(torch.randn(32, 40, generator=torch.Generator().manual_seed(2)))
    task = Task(Sums(), data, lambda model, x: Loss(model(x).sum(), len(x)))
    recipe = Recipe(
        task="given",
        steps=10,
        strategy=f"replicas=2 route=native codec=topk:1.0 sync=every-step@{SWITCH},{sync}",
        batch={"size": SIZE, "shards": 4},
        optimizer={"name": "sgd", "lr": RATE},
        outer=outer,
        runtime={"device": "cpu"},
    )
    return build_session(recipe, task, cluster, CPU, warn=lambda _: None)


def leave_out(session: Session, steps: list[int]) -> None:
    """Let this rank apply no update in these steps."""

    def part(record: PendingUpdate) -> None:
        if record.state.step in steps:
            record.update = UpdateResult(float("inf"), 0.0, applied=False)

    session.update_step.parts = insert_part_before(session.update_step.parts, "step", "leave out", part)


def end(
    cluster: Cluster, sync: str, outer: dict[str, Any], skipped: list[int], owes: bool
) -> dict[str, Tensor]:
    plain = PendingResidual.set_residuals

    def ones(owed: PendingResidual, residuals: Any) -> None:
        plain(owed, {("sent", slot.name): torch.ones(slot.shape) for slot in owed._tensors})

    with patch.object(PendingResidual, "set_residuals", ones if owes else plain):
        session = session_of(cluster, sync, outer)
        for _ in session.rounds():
            if session.state.step == SWITCH and cluster.global_rank == 1:
                session.enter_rule(SWITCH)
                leave_out(session, skipped)
        found = {name: session.snapshot().tensors()[f"model/{name}"].clone() for name in "ab"}
    session.close()
    return found


def times(cluster: Cluster, sync: str, outer: dict[str, Any], skipped: list[int], fault: bool) -> list[float]:
    """How many times what was owed has been applied, by tensor."""

    def kept(owed: PendingResidual, slots: Any, **more: Any) -> None:
        """It is owed still by who has not paid."""

    with patch.object(PendingResidual, "settle_mean", kept if fault else PendingResidual.settle_mean):
        without, with_it = (end(cluster, sync, outer, skipped, owes) for owes in (False, True))
    return [float((without[name] - with_it[name]).mean()) * SIZE / RATE for name in "ab"]


CASES = [
    ("local:2", {}, [2]),
    ("local:2", {}, [2, 3]),
    ("diloco:2", STREAMED, []),
    ("diloco:2", STREAMED, [2]),
    ("diloco:2", STREAMED, [2, 3]),
    ("diloco:4", {**STREAMED, "delay_steps": 1}, [2, 3]),
    ("diloco:4", {**STREAMED, "delay_steps": 2, "mixing": 0.5}, [2, 3]),
    ("diloco:4", {**STREAMED, "delay_steps": 2, "mixing": 0.5}, [2, 3, 4]),
]


@pytest.mark.parametrize(("sync", "outer", "skipped"), CASES)
def test_what_is_owed_is_applied_once(sync: str, outer: dict[str, Any], skipped: list[int]) -> None:
    for found in run_ranks(times, 2, sync, outer, skipped, False):
        assert found == pytest.approx([1.0, 1.0], abs=1e-4)


def test_a_replica_that_pays_after_the_first_mean_would_be_seen() -> None:
    """The twin: the other one has paid for both."""
    assert max(run_ranks(times, 2, *CASES[3], True)[0]) >= 1.1
