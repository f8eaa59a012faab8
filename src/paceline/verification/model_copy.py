"""A copy of the user's model that shares nothing with it but code."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy that keeps what PyTorch's drops from parameters: gradient hooks and attributes.

    A hook is the same function: if it holds the model in a closure, it holds the first one.
    """
    made: nn.Module = copy.deepcopy(model)
    for first, second in zip(model.parameters(), made.parameters(), strict=True):
        _copy_attributes(first, second)
        for hook in _hooks(first, "_backward_hooks"):
            second.register_hook(hook)
        for hook in _hooks(first, "_post_accumulate_grad_hooks"):
            second.register_post_accumulate_grad_hook(hook)
    return made


def _hooks(p: nn.Parameter, name: str) -> list[Any]:
    return list((getattr(p, name, None) or {}).values())


def _copy_attributes(first: nn.Parameter, second: nn.Parameter) -> None:
    own = getattr(first, "__dict__", {})
    for name, value in own.items():
        if name not in second.__dict__:
            second.__dict__[name] = value if isinstance(value, torch.Tensor) else copy.deepcopy(value)
