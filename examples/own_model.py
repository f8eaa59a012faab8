"""Your own model, data and loss: `paceline train examples/own_model.toml -n 2`."""

import torch
from torch import nn
from torch.nn import functional as F

from paceline import Loss, Task


def build(width: int = 32) -> Task:
    """A network that learns to tell two rings apart. The recipe's [options] are the arguments."""
    generator = torch.Generator().manual_seed(0)
    angle, noise = torch.rand(2, 4096, generator=generator)
    inner = torch.arange(4096) % 2
    radius = 1.0 + inner + 0.3 * noise
    points = torch.stack([radius * torch.cos(6.2832 * angle), radius * torch.sin(6.2832 * angle)], dim=1)
    data = list(zip(points, inner, strict=True))
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
        x, y = batch
        out = model(x)
        right = (out.argmax(-1) == y).sum()
        return Loss(F.cross_entropy(out, y, reduction="sum"), len(y), {"accuracy": right})

    return Task(model, data=data[:3584], loss=loss, held_out=data[3584:])
