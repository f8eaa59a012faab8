"""Mistakes in the data and loss that a user brings: `verify` on two ranks finds each.

A class builds the task of one rank, with or without the mistake. All are of the same small model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss, Task
from tests.known_mistakes.mistake import Story

Batch = Sequence[Tensor]
NUM_SAMPLES = 24


class Mistake:
    """A task of one rank; a subclass changes a piece of it when it is `wrong`."""

    story: Story

    def __init__(self, rank: int, world: int, *, wrong: bool) -> None:
        self.rank, self.world, self.wrong = rank, world, wrong

    def task(self) -> Task:
        return Task(self.model(), self.data(), self.loss, optimizer=self.optimizer)

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), *self.between(), nn.Tanh(), nn.Linear(8, 3))

    def between(self) -> list[nn.Module]:
        return []

    def data(self) -> Sequence[Batch]:
        g = torch.Generator().manual_seed(4)
        return [(torch.randn(4, generator=g), torch.randint(3, (), generator=g)) for _ in range(NUM_SAMPLES)]

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class PenaltyOnRankZero(Mistake):
    story = Story(
        "a term of the loss exists on rank 0 only",
        "auxiliary losses under `if rank == 0`, for example next to a print",
        "the term is P times too weak, or the ranks wait for each other forever",
        "the gradient is a mean over all ranks' samples",
        "if rank == 0: loss = loss + penalty",
        "loss = loss + penalty",
    )

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        found = super().loss(model, batch)
        penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        there = self.rank == 0 or not self.wrong
        return Loss(found.total + 0.1 * penalty * there, found.count)


class SharesTwice(Mistake):
    story = Story(
        "the data is divided twice: by the user and by the loader",
        "Accelerate, Lightning and Ray with the user's own DistributedSampler",
        "an epoch covers 1/P of the data, or ranks read the same samples",
        "a library that divides samples received one rank's part as if it were all of them",
        "data = data[rank::world_size]; prepare(DataLoader(data))",
        "prepare(DataLoader(data))",
    )

    def data(self) -> Sequence[Batch]:
        whole = super().data()
        return (
            [whole[(i * self.world + self.rank) % len(whole)] for i in range(len(whole))]
            if self.wrong
            else whole
        )


class ShufflesItself(Mistake):
    story = Story(
        "the dataset shuffles itself differently on each rank",
        "random.shuffle(files) in a constructor; os.listdir, whose order depends on the file system",
        "some samples are used twice in an epoch, others never",
        "ranks agree on indices, but an index is another sample on every rank",
        "random.SystemRandom().shuffle(files)",
        "files.sort(); random.Random(seed).shuffle(files)",
    )

    def data(self) -> Sequence[Batch]:
        whole = list(super().data())
        (random.SystemRandom() if self.wrong else random.Random(0)).shuffle(whole)
        return whole


class AugmentsFromEntropy(Mistake):
    story = Story(
        "augmentation draws from an unseeded generator",
        "numpy.random.default_rng() in a dataset; conversely, equal NumPy seeds in all workers",
        "two runs with one seed differ; a bad batch cannot be reproduced",
        "a separate generator starts from the system's entropy, or is copied into the worker",
        "noise = numpy.random.default_rng().normal(size=4)",
        "noise = numpy.random.default_rng(index).normal(size=4)",
    )

    def data(self) -> Sequence[Batch]:
        return _Noisy(super().data(), self.wrong)


class _Noisy:
    def __init__(self, inner: Sequence[Batch], wrong: bool) -> None:
        self.inner, self.wrong = inner, wrong

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Batch:
        x, y = self.inner[index]
        draw = np.random.default_rng() if self.wrong else np.random.default_rng(index)
        return x + torch.from_numpy(draw.normal(size=4)).float(), y


class NormalisesInPlace(Mistake):
    story = Story(
        "a sample is modified in place each time it is read",
        "x -= mean in __getitem__; collate functions that pad in place; caches of samples",
        "the loss drifts from epoch to epoch",
        "the dataset returns the tensor that it stores",
        "x = self.images[i]; x *= 0.5; return x",
        "return self.images[i] * 0.5",
    )

    def data(self) -> Sequence[Batch]:
        return _Halved(super().data(), self.wrong)


class _Halved:
    def __init__(self, inner: Sequence[Batch], wrong: bool) -> None:
        self.inner, self.wrong = inner, wrong

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Batch:
        x, y = self.inner[index]
        if self.wrong:
            x *= 0.5
            return x, y
        return x * 0.5, y
