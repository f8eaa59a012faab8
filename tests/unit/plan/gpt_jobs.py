"""A small GPT without memory, and recipes that train it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import Loss, Task
from paceline.models import GPT, GPTConfig, gpt_chain
from paceline.recipe import Recipe, Strategy

SMALL = GPTConfig(vocab=257, context=32, layers=4, heads=4, width=64)


def gpt(config: GPTConfig = SMALL) -> Task:
    """A GPT none of whose tensors has memory."""
    with torch.device("meta"):
        model = GPT(config)

    def loss(model: nn.Module, tokens: Tensor) -> Loss:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        return Loss(F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), tokens.numel())

    return Task(model, list(torch.zeros(16, config.context + 1, dtype=torch.int64)), loss, stages=gpt_chain)


def recipe(strategy: str, size: int = 16, shards: int = 4, **more: object) -> Recipe:
    values = {
        "task": "sum",
        "steps": 1,
        "batch": {"size": size, "shards": shards},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "precision": {"compute": "fp32"},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe.model_validate(values | more)
