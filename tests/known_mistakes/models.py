"""Mistakes in the model and optimizer that a user brings: `verify` on two ranks finds each."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss
from tests.known_mistakes.data import Batch, Mistake
from tests.known_mistakes.mistake import Story


class _OwnStream(nn.Module):
    """Dropout of its own."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.stream, self.wrong = random.Random(0), wrong

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if not self.wrong:
            return F.dropout(x, 0.3)
        return x * torch.tensor([float(self.stream.random() > 0.3) for _ in range(8)]) / 0.7


class DropoutOfItsOwn(Mistake):
    story = Story(
        "a layer draws from its own random stream",
        "stochastic depth, mixup and noise with a generator in the module",
        "the masks of a sample depend on how many samples the rank has seen before it",
        "a stream has a position, which depends on rank and accumulation and is lost in a resume",
        "keep = self.generator.random() > p",
        "keep = torch.rand(()) > p  # seeded for each shard",
    )

    def between(self) -> list[nn.Module]:
        return [_OwnStream(self.wrong)]


class CountsItsCalls(Mistake):
    story = Story(
        "a coefficient of the loss grows with the number of calls",
        "annealed KL terms, temperature schedules and curricula inside forward",
        "the schedule runs P times slower on P ranks, and restarts after a resume",
        "calls are counted per rank, and a step has one call per micro-batch of the rank",
        "self.calls += 1; beta = min(1, self.calls / 100)",
        "beta = min(1, step / 100)  # step of the optimizer, passed in",
    )

    def __init__(self, rank: int, world: int, *, wrong: bool) -> None:
        super().__init__(rank, world, wrong=wrong)
        self.calls = 0

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        found = super().loss(model, batch)
        self.calls += 1
        return Loss(found.total * (min(1.0, self.calls / 20) if self.wrong else 1.0), found.count)


class _Centre(nn.Module):
    """Subtracts a running mean."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        mean = torch.zeros(8)
        if wrong:
            self.mean = mean
        else:
            self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        out = x - self.mean
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return out


class StateThatIsNoBuffer(Mistake):
    story = Story(
        "a running statistic is a plain attribute of the module",
        "centers of DINO, code books, queues of MoCo",
        "ranks drift apart; a resumed run starts from nothing",
        "only registered buffers are saved, moved and synchronized",
        "self.mean = torch.zeros(8)",
        'self.register_buffer("mean", torch.zeros(8))',
    )

    def between(self) -> list[nn.Module]:
        return [_Centre(self.wrong)]


class _Masked(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.mask = (torch.rand(8, generator=torch.Generator().manual_seed(seed)) > 0.5).float()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class MaskOfEachRank(Mistake):
    story = Story(
        "a random tensor of the model is not a parameter and differs between ranks",
        "sparsity masks, random features and permutations created in a constructor",
        "ranks train different models, whose gradients are averaged",
        "the initial broadcast sends parameters and buffers only",
        "torch.manual_seed(seed + rank); self.mask = torch.rand(n) > 0.5",
        'torch.manual_seed(seed); self.register_buffer("mask", torch.rand(n) > 0.5)',
    )

    def between(self) -> list[nn.Module]:
        return [_Masked(self.rank if self.wrong else 0)]


class LeftInEvaluation(Mistake):
    story = Story(
        "the model is switched to evaluation mode for a metric and stays in it",
        "accuracy inside the loss; generation in the middle of training",
        "dropout and BatchNorm updates are off for the rest of the step or run",
        "model.eval() is permanent, and train() is not called again",
        "model.eval(); score = accuracy(model, x)",
        "model.eval(); score = accuracy(model, x); model.train()",
    )

    def between(self) -> list[nn.Module]:
        return [nn.Dropout(0.5)]

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        found = super().loss(model, batch)
        training = model.training
        model.eval()
        with torch.no_grad():
            model(batch[0])
        if not self.wrong:
            model.train(training)
        return found


class RateOfEachRank(Mistake):
    story = Story(
        "the ranks have different learning rates",
        "an optimizer configured from a rank's own metrics; ReduceLROnPlateau on a local loss",
        "replicas drift apart from the first update",
        "equal gradients with unequal rates give unequal updates",
        "scheduler.step(local_loss)",
        "dist.all_reduce(loss); scheduler.step(loss / world_size)",
    )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        rate = 0.1 * (1 + 0.5 * self.rank * self.wrong)
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


class _Langevin(torch.optim.SGD):
    """SGD with noise."""

    def __init__(self, parameters: object, seed: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.noise = random.Random(seed)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p += 0.01 * self.noise.gauss(0.0, 1.0)
        return found


class NoiseInTheUpdate(Mistake):
    story = Story(
        "the optimizer adds different noise on every rank",
        "Langevin dynamics, differentially private SGD, noisy Adam under DDP",
        "replicas drift apart in a random walk",
        "averaged gradients are equal, but noise that is added afterwards is not",
        "p += sigma * torch.randn_like(p)  # seeded by rank",
        "torch.manual_seed(key(seed, step)); p += sigma * torch.randn_like(p)",
    )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _Langevin(model.parameters(), self.rank if self.wrong else 0)
