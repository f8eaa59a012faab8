"""Scatters of ZeRO-1 wait for none before them where ranks wait for each other within backward.

A rank that has no gradient for a bucket launches it behind its backward. SyncBatchNorm waits for the other
rank in the midst of it: were that to wait for the bucket, both would until the deadline.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from paceline import Loss, Task
from paceline.comm.reduction import ScatterWindow
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.parallel import gradient_reduction
from paceline.recipe import Recipe, Strategy
from paceline.session import build_session
from paceline.testing import run_ranks
from paceline.testing.parity import CPU

pytestmark = [pytest.mark.timeout(240), pytest.mark.capability("A11", "L4")]
STEPS, WIDTH = 4, 16


class Branched(nn.Module):
    """The last layer is used by one rank only."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head, self._uses = nn.Linear(WIDTH, WIDTH), uses

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(self.norm(self.first(x)))
        return self.head(found) if self._uses else found


def steps(cluster: Cluster, waits: bool) -> int:
    """How many were taken."""
    torch.manual_seed(1)
    model, data = Branched(cluster.global_rank == 0), list(torch.randn(16, WIDTH))
    task = Task(model, data, lambda net, x: Loss(net(x).square().sum(), len(x)))
    recipe = Recipe.model_validate(
        {
            "task": "given",
            "steps": STEPS,
            "strategy": Strategy(replicas=1, shard=2, zero=1, route="native"),
            "batch": {"size": 8, "shards": 2, "sync_batchnorm": True},
            "optimizer": {"name": "sgd", "lr": 1e-3},
            "runtime": {
                "device": "cpu",
                "bucket_bytes": 4 * WIDTH * WIDTH,
                "deadline_seconds": 10.0 if waits else 60.0,
            },
        }
    )
    always = (
        (lambda context: ScatterWindow(context.workspace)) if waits else gradient_reduction._scatter_order
    )
    with patch.object(gradient_reduction, "_scatter_order", always):
        session = build_session(recipe, task, cluster, CPU, warn=lambda _: None)
    try:
        for _ in session.rounds():
            pass
    except CommunicationError:
        session.abort()
    return session.state.step


def test_one_rank_has_no_gradient_for_a_bucket() -> None:
    assert run_ranks(steps, 2, False) == [STEPS] * 2


def test_waiting_for_it_would_be_seen() -> None:
    """The twin."""
    assert max(run_ranks(steps, 2, True)) < STEPS
