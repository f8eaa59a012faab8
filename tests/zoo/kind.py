"""What a kind of model is: a small task of a user's. Only torch is imported: nothing here knows Paceline.

A kind is a function that builds model, samples and loss anew, with the same bits every time. Samples are in
the order in which they are trained, so a reference needs no order of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, SIZE = 4, 12
NUM_SAMPLES = STEPS * SIZE
WIDTH, CLASSES = 6, 3

LossOf = Callable[[nn.Module, Any], tuple[Tensor, float]]


@dataclass(frozen=True)
class Made:
    """What one call of a kind has made.

    Args:
        model: with its first weights.
        samples: in the order of training, `SIZE` a step.
        loss: (model, batch) to the sum of the losses and how many items it is over.
    """

    model: nn.Module
    samples: Sequence[Any]
    loss: LossOf


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Args:
        build: makes it, from PyTorch's generator.
        optimizer: "sgd" (with momentum), "adamw".
        tolerance: largest absolute difference that rounding explains, over `STEPS` steps.
        clip_norm: largest norm of the gradient.
        fused: the user's own optimizer has fused kernels, of SGD.
    """

    build: Callable[[], Made]
    optimizer: str = "sgd"
    tolerance: float = 2e-6
    clip_norm: float | None = 0.5
    fused: bool = False

    def make(self) -> Made:
        """The same weights and samples every time."""
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return self.build()


def points(width: int = WIDTH) -> list[tuple[Tensor, Tensor]]:
    """Samples: values, float32 [width], and a class."""
    return [(torch.randn(width), torch.randint(CLASSES, ())) for _ in range(NUM_SAMPLES)]


def classes(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """Cross-entropy, summed."""
    x, y = batch
    return F.cross_entropy(model(x).float(), y, reduction="sum"), len(y)


def chain(*links: nn.Module, samples: Sequence[Any] | None = None) -> Made:
    """A chain of modules with samples that suit it."""
    return Made(nn.Sequential(*links), samples or points(), classes)


def mlp(*between: nn.Module) -> Made:
    """Two layers, with something between them."""
    return chain(nn.Linear(WIDTH, 8), nn.Tanh(), *between, nn.Linear(8, CLASSES))
