"""A parameter that nobody uses in a step: what coding has lost of it waits for the next gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.comm.collectives.error_feedback import ErrorFeedbackBuffers
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import build_session
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU


class Sometimes(nn.Module):
    """`other` has a part in every second forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.other = nn.Linear(6, 3), nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.always(x)
        return found + self.other(x) if self.calls % 2 else found


def squared_error(model: nn.Module, batch: tuple[Tensor, ...]) -> Loss:
    (x,) = batch
    return Loss((model(x) - x[:, :3]).square().sum(), len(x))


def make_task() -> Task:
    torch.manual_seed(3)
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    return Task(Sometimes(), TensorDataset(x), squared_error)


def lost(cluster: Cluster, codec: str) -> list[dict[str, Tensor]]:
    """Of `other`, all sides, after each step."""
    recipe = Recipe(
        task="given",
        steps=4,
        strategy=Strategy.parse(f"replicas=2 codec={codec}"),
        batch={"size": 12, "shards": 2},
        optimizer={"name": "sgd", "lr": 0.05},
        runtime={"device": "cpu"},
    )
    session = build_session(recipe, make_task(), cluster, CPU, warn=lambda _: None)
    found = []
    for _ in session.rounds():
        rows = session.snapshot().tensors()
        own = {name: x.clone() for name, x in rows.items() if "residual" in name and "other" in name}
        found.append({name: x for name, x in own.items() if "/factor/" not in name})
    session.close()
    return found


def kept(cluster: Cluster) -> dict[str, list[bool]]:
    """By codec, whether steps 1 and 3, in which nobody uses `other`, and step 2 leave what was lost."""
    found = {}
    for codec in ("topk:0.1", "sign", "int4", "lowrank:1"):
        steps = lost(cluster, codec)
        assert all(any(bool(x.any()) for x in step.values()) for step in steps)
        found[codec] = [
            all(torch.equal(before, steps[step][name]) for name, before in steps[step - 1].items())
            for step in (1, 2, 3)
        ]
    return found


def forgetful(cluster: Cluster) -> list[bool]:
    restore = ErrorFeedbackBuffers.restore
    ErrorFeedbackBuffers.restore = lambda self, key, places: None
    try:
        steps = lost(cluster, "topk:0.1")
    finally:
        ErrorFeedbackBuffers.restore = restore
    return [all(torch.equal(x, steps[1][name]) for name, x in steps[0].items())]


@pytest.mark.timeout(240)
@pytest.mark.capability("H4")
def test_what_was_lost_of_a_parameter_stays_until_it_is_used_again() -> None:
    """And is sent then; the twin forgets it in the step that has dropped its sum."""
    for rank in run_ranks(kept, 2):
        assert all(same == [True, False, True] for same in rank.values()), rank
    assert run_ranks(forgetful, 2) == [[False], [False]]
