"""Persistent buffers of a model, and how a step moves them, written apart from `paceline.layout.buffers`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.verification.plain_norm import reals

Tensors = dict[str, Tensor]


def buffers_of(model: nn.Module) -> Tensors:
    """Copies of a model's persistent buffers."""
    state = model.state_dict()
    return {n: b.detach().clone() for n, b in model.named_buffers() if n in state}


def moved(before: Tensors, change: Tensors) -> Tensors:
    """Buffers after a step: what no shard changed keeps its bits, counters are rounded."""
    return {name: _moved(base, change[name]) for name, base in before.items()}


def _moved(base: Tensor, change: Tensor) -> Tensor:
    start = reals(base)
    value = start.to(torch.float64) + change
    value = value if start.dtype.is_floating_point else value.round()
    after = torch.where(change == 0, start, value.to(start.dtype))
    return torch.view_as_complex(after) if base.is_complex() else after
