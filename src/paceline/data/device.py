"""Moves a batch to the device of the model, whatever containers it is made of."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

_SEQUENCES = (list, tuple)


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy the tensors of a batch to `device`; what is already there, and what is no tensor, stays as it is.

    To a GPU the copy does not wait: from pinned memory it overlaps with work that was queued before it.

    Args:
        batch: a tensor, or mappings, lists, tuples and named tuples of such, nested; also anything with its
            own `to(device)` (a PackedSequence, a tokenizer's BatchEncoding).
        device: where the model is.
    """
    if isinstance(batch, Tensor):
        there = type(batch) is Tensor and batch.device == device
        return batch if there else batch.to(device, non_blocking=device.type == "cuda")
    if isinstance(batch, _SEQUENCES) and not hasattr(batch, "to"):
        moved = [to_device(part, device) for part in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return _move_mapping(batch, device)
    move = getattr(batch, "to", None)
    return move(device) if callable(move) else batch


def _move_mapping(batch: Mapping[Any, Any], device: torch.device) -> Mapping[Any, Any]:
    moved = {name: to_device(part, device) for name, part in batch.items()}
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return moved
    clone = copy.copy(batch)  # a subclass may carry more than its items
    clone.update(moved)
    return clone
