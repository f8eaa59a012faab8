"""A tensor plan that would train something else is refused before the first step, and would have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss, Task
from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.parallel.tensor import TensorPlanEntry
from paceline.recipe import Recipe, Strategy
from paceline.session import build
from paceline.session.partition_check import modules_to_compare
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session


class Between(nn.Module):
    """Two linear layers, with something between them."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between
        self.up = nn.Linear(6, 16 if between == "halves" else 8)
        self.down = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(BETWEEN[self.between](self.up(x)))


def halves(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return gate.sigmoid() * value


BETWEEN = {
    "each": torch.tanh,
    "halves": halves,
    "norm": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
}
WRONG = [name for name in BETWEEN if name != "each"]


def task_of(between: str) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Between(between), nn.Tanh(), nn.Linear(3, 3))
    samples = [(torch.randn(6), torch.randint(3, ())) for _ in range(24)]
    return Task(model, samples, loss, tensor={"1.up": "column", "1.down": "row"})


def loss(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def trained(cluster: Cluster, between: str, strategy: str, checks: bool) -> list[float] | str:
    """The losses of three steps, or what was said."""
    if not checks:
        build.check_tensor_plan = lambda *_: None
    recipe = Recipe(
        task="own",
        steps=3,
        batch={"size": 8, "shards": 4, "shuffle": False},
        optimizer={"name": "sgd", "lr": 0.5},
        strategy=Strategy.parse(strategy),
    )
    try:
        session = build_test_session(cluster, recipe, lambda: task_of(between))
    except TaskError as error:
        return str(error)
    found = [stats.loss for stats in session.rounds()]
    session.close()
    return found


def all_of_them(cluster: Cluster, strategy: str, checks: bool) -> dict[str, list[float] | str]:
    return {between: trained(cluster, between, strategy, checks) for between in BETWEEN}


@pytest.mark.capability("C4")
@pytest.mark.parametrize("strategy", ["replicas=1 tensor=2", "replicas=1 tensor=2 pipeline=2"])
def test_what_mixes_features_between_a_column_and_its_row_is_refused(strategy: str) -> None:
    num_ranks = 4 if "pipeline" in strategy else 2
    for found in run_ranks(all_of_them, num_ranks, strategy, True):
        for between in WRONG:
            text = str(found[between])
            assert "partitioned by its tensor plan, '1' computes other values than whole" in text
        assert len(found["each"]) == 3


@pytest.mark.capability("C4")
def test_what_is_refused_would_train_something_else() -> None:
    right = run_ranks(all_of_them, 1, "replicas=1", True)[0]
    found = run_ranks(all_of_them, 2, "replicas=1 tensor=2", False)[0]
    assert found["each"] == pytest.approx(right["each"], rel=1e-6)
    for between in WRONG:
        assert found[between] != pytest.approx(right[between], rel=1e-4)


@pytest.mark.parametrize(
    "entries, parts",
    [
        (["h.0.up column", "h.0.down row", "h.1.up column", "h.1.down row"], ["h.0", "h.1"]),
        (["b.0.attn heads", "b.0.mid.dense column", "b.0.out.dense row"], ["b.0.attn", "b.0"]),
        (["gate column", "up column", "down row"], [""]),
        (["m.gate column", "m.up column", "m.drop split", "m.down row"], ["m"]),
    ],
)
def test_parts_are_where_results_are_whole_again(entries: list[str], parts: list[str]) -> None:
    found = modules_to_compare(
        [TensorPlanEntry(name, nn.Identity(), word) for name, word in map(str.split, entries)]
    )
    assert found == parts
