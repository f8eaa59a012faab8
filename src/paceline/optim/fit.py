"""Which optimizers the training step can drive: those that make an update of the gradients that are there."""

from __future__ import annotations

import inspect

import torch

from paceline.errors import TaskError


def require_one_gradient(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give the optimizer back if its step needs nothing but gradients.

    Raises:
        TaskError: it wants to compute the loss again, several times in a step (LBFGS): its line search would
            need every rank and every shard each time. Or it takes sparse gradients only (SparseAdam).
    """
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"{name} computes the loss again within a step, and a step here makes one update of one gradient",
            next_step="use an optimizer whose step() takes no closure, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TaskError(
            f"{name} takes sparse gradients only, and the sums over shards and ranks are dense",
            next_step="use torch.optim.Adam, and nn.Embedding(sparse=False)",
        )
    return optimizer
