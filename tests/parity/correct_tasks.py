"""Right code of users that verification once took for wrong, one task each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.task import Loss, Task

Samples = list[tuple[Tensor, Tensor]]


def samples(width: int = 6, classes: int = 3, num: int = 48) -> Samples:
    """Points and labels, drawn from one seed."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num, width, generator=generator)
    return list(zip(x, torch.randint(classes, (num,), generator=generator), strict=True))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """Cross entropy, summed."""
    x, y = batch
    return Loss(F.cross_entropy(model(x).float(), y, reduction="sum"), len(y))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A model of one seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return build()


def small() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Augmented:
    """Draws from `random`, `numpy.random` and torch at every read."""

    def __init__(self) -> None:
        self.samples = samples()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.samples[index]
        return x * (1 + random.random()) + float(np.random.normal()) + torch.randn(6), y


class ReadTogether(Augmented):
    """Draws once for all samples that are read together."""

    def __getitems__(self, indices: list[int]) -> Samples:
        shift = random.random()
        return [(x + shift, y) for x, y in (self[i] for i in indices)]


def random_data() -> Task:
    """A data set that augments."""
    return Task(seeded(small), Augmented(), loss)


def random_data_read_together() -> Task:
    """One that augments a batch."""
    return Task(seeded(small), ReadTogether(), loss)


def random_collate() -> Task:
    """A collate function that mixes samples."""

    def mix(found: Samples) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(part) for part in zip(*found, strict=True))
        share = np.random.beta(0.4, 0.4)
        return share * x + (1 - share) * x[torch.randperm(len(x))] + random.gauss(0, 0.1), y

    return Task(seeded(small), samples(), loss, collate=mix)


def gradient_hooks() -> Task:
    """A masked row, a gradient that is cut off, and a hook that only looks."""
    model = seeded(small)
    mask = torch.ones(8, 6)
    mask[2] = 0
    model[0].weight.register_hook(lambda g: g * mask)
    model[2].bias.register_hook(lambda g: g.clamp(-0.1, 0.1))
    looked: list[bool] = []
    model[2].weight.register_post_accumulate_grad_hook(lambda p: looked.append(p.grad is not None))
    return Task(model, samples(), loss)


def attributes_on_parameters() -> Task:
    """The loss looks at what is written on the parameters."""
    model = seeded(small)
    for p in model.parameters():
        p.penalty = 0.1 if p.dim() > 1 else 0.0

    def with_penalty(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        found = loss(m, batch)
        extra = sum(getattr(p, "penalty", 0.0) * p.square().sum() for p in m.parameters())
        return Loss(found.total + extra * found.count, found.count)

    return Task(model, samples(), with_penalty)


class Counting(nn.Module):
    """Counts its forwards, in evaluation too, and remembers whether it has seen one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.seen[:2] = True
        self.phase = self.phase + 1j * x.mean()
        return self.inner(x) / (1.0 + self.forwards.float() / 100)


def counting_buffers() -> Task:
    """Buffers of an integer, a bool and a complex type."""
    return Task(seeded(Counting), samples(), loss)


class Gates(nn.Module):
    """24 parameters of one number each, whose gradients change sign."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(24)])
        self.bias = nn.Parameter(torch.zeros(1))
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x) + self.bias
        for number, gate in enumerate(self.gates):
            found = found + gate * torch.sin(x[:, number % 6] * (1 + number // 6))[:, None] * found.detach()
        return found


def scalar_gates() -> Task:
    """Parameters of one number."""
    return Task(seeded(Gates), samples(), loss)


class Half(nn.Module):
    """Parameters of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(torch.bfloat16)).float()


def bf16_parameters() -> Task:
    """Everything of two bytes."""
    return Task(seeded(Half), samples(), loss)


class Cancelling(nn.Module):
    """One matrix, used with both signs: nearly nothing is left of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(100 * self.first(x) - 100 * self.second(x + 1e-5 * x.roll(1, 1)))


def cancelling() -> Task:
    """Tied weights whose gradients cancel."""
    return Task(seeded(Cancelling), samples(), loss, stages=lambda m: [_Left(m), _Right(m)])


class _Left(nn.Module):
    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.first = whole.first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return 100 * self.first(x), x


class _Right(nn.Module):
    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.second, self.out = whole.second, whole.out

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return self.out(y - 100 * self.second(x + 1e-5 * x.roll(1, 1)))


def plain() -> Task:
    """Nothing special."""
    return Task(seeded(small), samples(), loss)


class Turning(nn.Module):
    """Complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(torch.complex64) @ self.turn
        return self.out(torch.cat([z.real, z.imag], 1))


def complex_parameters() -> Task:
    """A matrix of complex numbers."""
    return Task(seeded(Turning), samples(), loss)


def channels_last() -> Task:
    """A convolution whose weights lie in another order."""

    def build() -> nn.Module:
        made = nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 3)
        )
        return made.to(memory_format=torch.channels_last)

    return Task(seeded(build), samples(), loss)


def recurrent() -> Task:
    """An LSTM with dropout inside."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.out = nn.LSTM(2, 5, 2, dropout=0.3, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.cells(x.reshape(len(x), 3, 2))[0][:, -1])

    return Task(seeded(Last), samples(), loss)


def attention() -> Task:
    """An encoder layer with dropout of its own."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.TransformerEncoderLayer(2, 1, 8, 0.2, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(x.reshape(len(x), 3, 2)).flatten(1))

    return Task(seeded(Encoder), samples(), loss)


def rarely_used() -> Task:
    """Experts of which a shard may use none, and a frozen layer."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(6))
            self.frozen = nn.Linear(6, 6).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            which = int(x.sum().abs() * 10) % 6
            return self.experts[which](self.frozen(x)) + self.experts[0](x)

    return Task(seeded(Experts), samples(), loss)


CORRECT_TASKS: dict[str, tuple[Callable[[], Task], dict[str, Any]]] = {
    "plain": (plain, {}),
    "random-data": (random_data, {}),
    "random-data-read-together": (random_data_read_together, {}),
    "random-collate": (random_collate, {}),
    "gradient-hooks": (gradient_hooks, {}),
    "attributes": (attributes_on_parameters, {}),
    "counting-buffers": (counting_buffers, {}),
    "scalar-gates": (scalar_gates, {"optimizer": {"name": "adamw", "lr": 0.03, "fused": False}}),
    "bf16-parameters": (bf16_parameters, {"optimizer": {"name": "adamw", "lr": 0.01, "clip_norm": 0.3}}),
    "bf16-parameters-sgd": (bf16_parameters, {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}),
    "tiny-clip": (plain, {"optimizer": {"name": "adamw", "lr": 0.01, "clip_norm": 1e-9}}),
    "tinier-clip": (plain, {"optimizer": {"name": "sgd", "lr": 0.01, "clip_norm": 1e-36, "momentum": 0.9}}),
    "cancelling": (cancelling, {"optimizer": {"name": "sgd", "lr": 1e-5}}),
    "cancelling-adamw": (cancelling, {"optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0}}),
    "complex": (complex_parameters, {"optimizer": {"name": "sgd", "lr": 0.05, "clip_norm": 0.4}}),
    "channels-last": (channels_last, {}),
    "recurrent": (recurrent, {}),
    "attention": (attention, {}),
    "rarely-used": (rarely_used, {}),
}
