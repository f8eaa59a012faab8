"""Models, losses and data sets of tasks that are refused, and of their fixed twins."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import paceline
from paceline import Loss, Task

Batch = Sequence[Tensor]


def data() -> list[Batch]:
    g = torch.Generator().manual_seed(4)
    return [(torch.randn(4, generator=g), torch.randint(3, (), generator=g)) for _ in range(12)]


def model(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Batch) -> Loss:
    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))


def task(**changes: Any) -> Task:
    return Task(**({"model": model(), "data": data(), "loss": loss} | changes))


def mean_loss(model: nn.Module, batch: Batch) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def counted_mean(model: nn.Module, batch: Batch) -> Loss:
    return Loss.mean(F.cross_entropy(model(batch[0]), batch[1]), len(batch[1]))


def odd_metrics(model: nn.Module, batch: Batch) -> Loss:
    found = loss(model, batch)
    positive = bool(batch[0].sum() > 0) and model.training
    return Loss(found.total, found.count, {"positive": 1.0} if positive else {})


def same_metrics(model: nn.Module, batch: Batch) -> Loss:
    found = loss(model, batch)
    return Loss(found.total, found.count, {"positive": float((batch[0].sum(1) > 0).sum())})


def negatives_of_rank(model: nn.Module, batch: Batch) -> Loss:
    out = model(batch[0])
    return Loss(F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="sum"), len(out))


def negatives_of_batch(model: nn.Module, batch: Batch) -> Loss:
    out = paceline.gather(model(batch[0]))
    return Loss(F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="sum"), len(out))


def frozen() -> Task:
    made = model()
    made.requires_grad_(False)
    return task(model=made)


class Functional(nn.Module):
    """An activation that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Stream(IterableDataset[Batch]):
    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def __iter__(self) -> Iterator[Batch]:
        return iter([(x + self.shift, y) for x, y in data()])


class Noisy:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Batch:
        x, y = data()[index]
        return x + random.random(), y


def sgd(**settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda m: torch.optim.SGD(m.parameters(), lr=0.1, **settings)
