"""Where an optimizer's tensors lie: moments are cut as their parameter is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.slot import Index, Slot
from paceline.spans import selected


def moment_slot(name: str, value: Tensor, of: Slot) -> Slot:
    """The place of a moment of the part `of`: that part, on each dimension on which it is as long.

    One that is whole still has the axes of the part: ranks that hold nothing of it have to be told.
    """
    if value.dim() != len(of.shape) or not value.dim():
        return whole_moment(name, value, of)
    fits = [size == held for size, held in zip(value.shape, of.sizes, strict=True)]
    shape = tuple(whole if fit else n for fit, whole, n in zip(fits, of.shape, value.shape, strict=True))
    part = tuple(span if fit else (0, n) for fit, span, n in zip(fits, of.part, value.shape, strict=True))
    return Slot(name, shape, part, of.axes)


def whole_moment(name: str, value: Tensor, of: Slot) -> Slot:
    """The place of a tensor that is whole, whatever its shape."""
    return replace(Slot.whole(name, value), axes=of.axes)


def moment_part(shape: tuple[int, ...], of: Slot) -> Index:
    """The part of a whole moment; what has fewer dimensions is whole on every rank."""
    if len(shape) != len(of.shape) or not shape:
        return ()
    sizes = zip(shape, of.shape, of.part, strict=True)
    return tuple(selected(span) if n == whole else slice(None) for n, whole, span in sizes)


def suits(shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Moments have the parameter's shape, or one that broadcasts to it (factored moments, counters)."""
    pairs = zip(reversed(shape), reversed(of), strict=False)
    return len(shape) <= len(of) and all(n in (1, whole) for n, whole in pairs)


def suits_part(shape: tuple[int, ...], of: Slot) -> bool:
    """Whether each rank can keep its own part of such a moment: no value is of several parts at a time."""
    if of.is_whole or all(n == 1 for n in shape):
        return suits(shape, of.sizes)
    if len(shape) != len(of.shape):
        return False
    return all(
        n == held or (n == 1 and held == whole)
        for n, held, whole in zip(shape, of.sizes, of.shape, strict=True)
    )


def placed_with(value: Any, p: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """Moments live with their parameter; so do counters of fused optimizers, the others stay on the host."""
    if not isinstance(value, Tensor):
        return value
    with_parameter = value.dim() > 0 or group.get("fused") or group.get("capturable")
    if value.shape == p.shape:  # its values must lie as those of the parameter do
        return torch.empty_like(p, dtype=value.dtype).copy_(value).detach()
    return value.to(p.device, copy=True) if with_parameter else value.clone()
