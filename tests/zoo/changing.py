"""Kinds of models that draw random numbers, or whose forward changes buffers. Only torch is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.zoo.kind import CLASSES, NUM_SAMPLES, WIDTH, Kind, Made, chain, mlp


class Counters(nn.Module):
    """Buffers of every type, which training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("small", torch.zeros(2, dtype=torch.uint8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("exact", torch.zeros((), dtype=torch.float64))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("low", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen |= True
                self.steps += 1
                self.small += 2
                self.mean.lerp_(x.mean(0), 0.1)
                self.exact += x.double().mean()
                self.phase += 1j
                self.low *= 0.5
        return x * self.mask + 0.1 * self.mean.detach()


def buffers_of_every_type() -> Made:
    return mlp(Counters())


class CountsForwards(nn.Module):
    """Counts in evaluation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x * (1.0 + 0.1 * self.forwards)


def counts_forwards() -> Made:
    return mlp(CountsForwards())


class Recurrent(nn.Module):
    """A recurrent layer without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def _sequences() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, WIDTH), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]


def _recurrent(layer: Callable[..., nn.Module]) -> Made:
    """Two of them, so that a pipeline has one in each stage."""
    settings: dict[str, Any] = {"num_layers": 2, "dropout": 0.3, "batch_first": True}
    layers = [Recurrent(layer(WIDTH, 8, **settings)), Recurrent(layer(8, 8, **settings))]
    return chain(*layers, nn.Flatten(), nn.Linear(32, CLASSES), samples=_sequences())


def lstm_dropout() -> Made:
    return _recurrent(nn.LSTM)


def gru_dropout() -> Made:
    return _recurrent(nn.GRU)


class Attend(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


def attention_dropout() -> Made:
    return chain(Attend(), Attend(), nn.Flatten(), nn.Linear(4 * WIDTH, CLASSES), samples=_sequences())


class FunctionalDropout(nn.Module):
    """Dropout that is no module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


def functional_dropout() -> Made:
    links = [nn.Linear(WIDTH, 8), FunctionalDropout(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    return chain(*links, FunctionalDropout(), nn.Linear(8, CLASSES))


def dropout_module() -> Made:
    links = [nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    return chain(*links, nn.Dropout(0.3), nn.Linear(8, CLASSES))


def batch_norm() -> Made:
    """Of images: with two numbers a channel every difference would be one of rounding."""
    samples = [(torch.randn(3, 5, 5), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]
    links = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES)]
    return chain(*links, samples=samples)


class NotesSlopes(nn.Module):
    """A buffer that backward changes: the mean gradient of what went out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.slopes.clone()
        if y.requires_grad:
            y.register_hook(self.note)
        return y

    def note(self, slopes: Tensor) -> None:
        self.slopes.lerp_(slopes.mean(0), 0.1)


def buffer_of_backward() -> Made:
    return mlp(NotesSlopes(), nn.Linear(8, 8), NotesSlopes())


class Repeated(nn.Module):
    """Computes again in backward, and so counts twice, as PyTorch does."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(2, affine=False)  # eight numbers a channel: with two all would be rounding
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), norm, nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def norm_repeated() -> Made:
    return mlp(Repeated())


def spectral_norm() -> Made:
    """A weight that is computed, with a buffer that every forward changes."""
    layer = parametrizations.spectral_norm(nn.Linear(8, 8))
    return mlp(layer, nn.Tanh())


CHANGING: dict[str, Kind] = {
    "buffers-of-every-type": Kind(buffers_of_every_type),
    "counts-forwards": Kind(counts_forwards),
    "lstm-dropout": Kind(lstm_dropout),
    "gru-dropout": Kind(gru_dropout),
    "attention-dropout": Kind(attention_dropout),
    "functional-dropout": Kind(functional_dropout),
    "dropout-module": Kind(dropout_module),
    "batch-norm": Kind(batch_norm),
    "buffer-of-backward": Kind(buffer_of_backward),
    "norm-repeated": Kind(norm_repeated, tolerance=5e-6),
    "spectral-norm": Kind(spectral_norm),
}
