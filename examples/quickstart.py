"""Ten lines of your own code: `paceline train examples/quickstart.toml -n 2`."""

import torch
from torch import nn
from torch.nn import functional as F

from paceline import Loss


def build(width: int = 64):
    x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    data = list(zip(x, (x.sum(dim=1) > 0).long(), strict=True))
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 2))

    def loss(model, batch):
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    return model, data, loss
