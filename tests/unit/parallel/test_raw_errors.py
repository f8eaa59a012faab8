"""Programs that PyTorch ends with an error of its own: they work, or the error has a next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.models.module_copy import deep_copy
from paceline.parallel.pipeline.model_chain import check_chain
from paceline.recipe import Recipe, Strategy
from paceline.task import Loss, Task
from paceline.testing.parity import build_test_session


class Keeps(nn.Module):
    """Keeps an activation, also in a list, and an auxiliary loss that is added to by each block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.maps, self.calls = nn.Linear(4, 4), list[Tensor](), 0

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        self.maps = [self.last.tanh()]
        return self.maps[0]


def test_a_copy_has_the_values_of_kept_activations_without_their_graph() -> None:
    model = nn.Sequential(Keeps(), nn.Linear(4, 1))
    model(torch.randn(2, 4))
    found: Any = deep_copy(model)[0]
    assert found.last.grad_fn is None and torch.equal(found.last, model[0].last)
    assert found.maps[0].grad_fn is None and found.maps[0] is not model[0].maps[0]
    assert found.layer.weight is not model[0].layer.weight


class Changing(nn.Module):
    """Appends to a list of auxiliary losses, which is longer when it runs again."""

    def __init__(self, sums: list[Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.__dict__["sums"] = sums

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.sums.append(y.mean() * torch.stack(self.sums).exp().sum() if self.sums else y.mean())
        return y.tanh() + 0.0 * self.sums[-1]


def changing() -> Task:
    sums: list[Tensor] = []
    blocks = [Changing(sums), Changing(sums)]

    def loss(model: nn.Module, x: Tensor) -> Loss:
        return Loss(model(x).square().sum(), len(x))

    return Task(nn.Sequential(*blocks), torch.randn(8, 4), loss, blocks=list)


@pytest.mark.parametrize("strategy", ["replicas=1", "replicas=1 pipeline=2 lanes=2"])
def test_a_recomputed_block_that_does_something_else_is_one_sentence(strategy: str) -> None:
    recipe = Recipe(
        task="own",
        steps=1,
        batch={"size": 4, "shards": 1},
        memory={"recompute": "blocks"},
        strategy=Strategy.parse(strategy),
    )
    session = build_test_session(Cluster.single(), recipe, changing)
    with pytest.raises(TaskError, match="let the block return its auxiliary loss"):
        next(session.rounds())
    session.abort()
    session.close()


def test_stages_refuse_jagged_and_sparse_activations_and_take_them_at_the_end() -> None:
    samples = [torch.randn(n, 4) for n in (2, 3, 5)]

    def collate(samples: list[Tensor]) -> Tensor:
        return torch.nested.nested_tensor(samples, layout=torch.jagged)

    def loss(model: nn.Module, x: Tensor) -> Loss:
        return Loss(model(x).values().square().sum(), 1)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    task = Task(model, samples, loss, collate=collate)
    with pytest.raises(TaskError, match="Linear returns a nested tensor, but stages only send dense"):
        check_chain(task, model, [*model])
    check_chain(task, model, [model])
