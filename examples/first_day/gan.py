"""An own loop with two updates a step: a generator learns where points lie, a critic tells them apart."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline import Loss, Task


def critic_loss(model: nn.ModuleDict, x: torch.Tensor) -> Loss:
    fake = model["generator"](torch.randn(len(x), 2)).detach()
    total = F.softplus(-model["critic"](x)).sum() + F.softplus(model["critic"](fake)).sum()
    return Loss(total, len(x))


def generator_loss(model: nn.ModuleDict, x: torch.Tensor) -> Loss:
    return Loss(F.softplus(-model["critic"](model["generator"](torch.randn(len(x), 2)))).sum(), len(x))


def build() -> Task:
    critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    model = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": critic})
    points = torch.randn(512, 2, generator=torch.Generator().manual_seed(0)) * 0.5 + torch.tensor([2.0, -1.0])
    return Task(model, list(points), critic_loss, optimizer=optimizer)


def optimizer(model: nn.ModuleDict) -> torch.optim.Optimizer:
    """A rate for each part; `step(part)` moves that part alone, and its moments."""
    rates = {"generator": 1e-2, "critic": 2e-2}
    groups = [{"params": model[part].parameters(), "lr": lr, "name": part} for part, lr in rates.items()]
    return torch.optim.Adam(groups, betas=(0.5, 0.9))


def train_loop(loop: Any) -> None:
    """Two updates a step, each of one part; `paceline verify --loop` runs it beside the oracle."""
    for x in loop.batches():
        loop.backward(critic_loss(loop.model, x))
        loop.step("critic")
        loop.backward(generator_loss(loop.model, x))
        loop.step("generator")


if __name__ == "__main__":
    with paceline.own_loop("gan.toml", build) as loop:
        train_loop(loop)
    if loop.session.is_first:
        middle = loop.model["generator"].bias.tolist()
        print(f"{loop.result.steps} steps; the generator's middle is {middle[0]:.1f}, {middle[1]:.1f}")
