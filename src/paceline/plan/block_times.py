"""Seconds that each block of a model takes to be computed again, measured on this machine.

A copy of a block runs forward on inputs of the shapes that it has in the model. Blocks that are alike are
measured once, so that their times are equal.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.layout import Precision
from paceline.models.dropout import set_micro_batch_key
from paceline.plan.places import Entry, Shape
from paceline.training.link_times import filled, with_memory

_REPEATS = 5


def block_seconds(
    blocks: Mapping[int, nn.Module], entries: Iterable[Entry], precision: Precision, device: torch.device
) -> dict[int, float]:
    """By block, the forwards of one micro-batch.

    Args:
        blocks: by number; they are not changed, and may have no memory.
        entries: calls of layers in a micro-batch; those of others are passed by.
    """
    known: dict[Hashable, float] = {}
    found = dict.fromkeys(blocks, 0.0)
    with torch.random.fork_rng():  # a run draws as if nothing had been measured
        for entry in (one for one in entries if one.layer in blocks):
            block = blocks[entry.layer]
            kind = _kind(block, entry)
            if kind not in known:
                known[kind] = _seconds(block, entry, precision, device)
            found[entry.layer] += known[kind]
    return found


def _kind(block: nn.Module, entry: Entry) -> Hashable:
    """What two blocks have in common that take the same time."""
    modules = tuple((name, str(type(m)), m.extra_repr()) for name, m in block.named_modules())
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())
    return modules, shapes, tuple(map(str, tree_leaves(entry.given)))


def _seconds(block: nn.Module, entry: Entry, precision: Precision, device: torch.device) -> float:
    """The shortest of some forwards of a copy, after one that is not counted."""
    twin, times = with_memory(block).to(device), []
    for _ in range(_REPEATS + 1):
        set_micro_batch_key(twin, 0)
        args, kwargs = tree_map(lambda one: _given(one, device), entry.given, is_leaf=_is_shape)
        began = time.perf_counter()
        with precision.autocast():
            twin(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _given(value: Any, device: torch.device) -> Any:
    return filled(value.sizes, value.dtype).to(device) if isinstance(value, Shape) else value


def _is_shape(value: Any) -> bool:
    return isinstance(value, Shape)
