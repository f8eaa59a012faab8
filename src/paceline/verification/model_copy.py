"""A deep copy of the user's model for the oracle: it shares code with the model and no tensor."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from paceline.models.module_copy import deep_copy


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy with the gradient hooks and attributes of parameters, which `deepcopy` drops.

    Hooks are shared functions: a hook whose closure holds the model still holds the original.
    """
    copied = deep_copy(model)
    for first, second in zip(model.parameters(), copied.parameters(), strict=True):
        _copy_attributes(first, second)
        for hook in _hooks(first, "_backward_hooks"):
            second.register_hook(hook)
        for hook in _hooks(first, "_post_accumulate_grad_hooks"):
            second.register_post_accumulate_grad_hook(hook)
    return copied


def _hooks(p: nn.Parameter, name: str) -> list[Any]:
    return list((getattr(p, name, None) or {}).values())


def _copy_attributes(first: nn.Parameter, second: nn.Parameter) -> None:
    for name, value in getattr(first, "__dict__", {}).items():
        if name not in second.__dict__:
            # A tensor attribute can be another parameter; a copy of it would no longer be that parameter.
            second.__dict__[name] = value if isinstance(value, torch.Tensor) else copy.deepcopy(value)
