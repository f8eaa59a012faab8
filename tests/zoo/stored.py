"""Kinds of models by how their tensors are stored: memory formats, types, sizes. Only torch is imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kind import CLASSES, NUM_SAMPLES, WIDTH, Kind, Made, chain, mlp


def channels_last() -> Made:
    samples = [(torch.randn(3, 5, 5), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]
    links = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2), nn.Flatten(), nn.Linear(20, CLASSES)]
    made = chain(*links, samples=samples)
    made.model.to(memory_format=torch.channels_last)
    return made


class Transposed(nn.Module):
    """A matrix that is stored the other way round."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(fan_in, fan_out) / 3).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def transposed() -> Made:
    return chain(Transposed(WIDTH, 8), nn.Tanh(), Transposed(8, CLASSES))


class Rotate(nn.Module):
    """Complex parameters between real values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex64) @ self.weight
        return y.real + 3.0 * y.imag


def complex_parameter() -> Made:
    return mlp(Rotate())


class Phase(nn.Module):
    """A complex number for each value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y.real + 5.0 * y.imag


def complex_vector() -> Made:
    return mlp(Phase())


class Scale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def scalar_parameter() -> Made:
    return mlp(Scale())


class Prompt(nn.Module):
    """A parameter of no rows, as of a prompt of length 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


def empty_parameter() -> Made:
    return mlp(Prompt())


def one_row() -> Made:
    """Fewer rows than ranks, and nothing else."""
    samples = [(torch.randn(5), torch.randn(1)) for _ in range(NUM_SAMPLES)]
    model = nn.Linear(5, 1)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, y = batch
        return (model(x) - y).square().sum(), len(y)

    return Made(model, samples, loss)


class Cast(nn.Module):
    """From one type to another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def mixed_types() -> Made:
    """float32, then bfloat16, then float64."""
    links = [nn.Linear(WIDTH, 8), Cast(torch.bfloat16), nn.Linear(8, 8).bfloat16(), nn.Tanh()]
    return chain(*links, Cast(torch.float64), nn.Linear(8, CLASSES).double())


def half_weights() -> Made:
    """bfloat16 alone."""
    links = [nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    made = chain(Cast(torch.bfloat16), *links)
    made.model.bfloat16()
    return made


def sparse_embedding() -> Made:
    samples = [(torch.randint(20, (3,)), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]
    links = [nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(12, CLASSES)]
    return chain(*links, samples=samples)


def double() -> Made:
    made = mlp()
    made.model.double()
    samples = [(x.double(), y) for x, y in made.samples]

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    return Made(made.model, samples, loss)


STORED: dict[str, Kind] = {
    "plain": Kind(mlp),
    "channels-last": Kind(channels_last),
    "channels-last-adamw": Kind(channels_last, optimizer="adamw", tolerance=2e-5),
    "channels-last-fused": Kind(channels_last, fused=True),
    "transposed": Kind(transposed),
    "complex-parameter": Kind(complex_parameter),
    "complex-vector": Kind(complex_vector),
    "scalar-parameter": Kind(scalar_parameter),
    "empty-parameter": Kind(empty_parameter),
    "one-row": Kind(one_row),
    "mixed-types": Kind(mixed_types, tolerance=2e-2),
    "half-weights": Kind(half_weights, tolerance=2e-2),
    "sparse-embedding": Kind(sparse_embedding),
    "double": Kind(double, tolerance=1e-12),
}
