"""Which optimizers the training step can drive: those that make a right update of one gradient."""

from __future__ import annotations

import inspect

import torch

from paceline.errors import TaskError
from paceline.optim.by_group import members_of


def require_one_gradient(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give the optimizer back if its step needs nothing but gradients, and is right.

    Raises:
        TaskError: it wants to compute the loss again, several times in a step (LBFGS): its line search would
            need every rank and every shard each time. Or it takes sparse gradients only (SparseAdam).
    """
    for member in members_of(optimizer):
        if member is not optimizer:
            require_one_gradient(member)
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
    return _require_right_kernels(optimizer)


def _require_right_kernels(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give the optimizer back if its fused kernel is right for the types of its parameters.

    Raises:
        TaskError: PyTorch's fused SGD of the processor, over bfloat16 or float16: with momentum it ends 0.6
            away after six steps, where 0.02 is rounding (PyTorch 2.13; tests/unit/optim/test_fit.py).
    """
    half = (torch.bfloat16, torch.float16)
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        if group["fused"] and any(p.dtype in half and p.device.type == "cpu" for p in group["params"]):
            raise TaskError(
                f"{type(optimizer).__name__}(fused=True) of PyTorch ends elsewhere over parameters of two"
                " bytes on the processor",
                next_step="leave out fused, or keep the parameters in float32",
            )
    return optimizer
