"""The gradients of each use of a tied parameter, which may cancel in their sum.

Two sides that add up uses and shards in other orders differ by rounding errors of the terms, not of the
sum.
Not seen apart: uses of one module in several places of a forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Uses = Mapping[str, Sequence[nn.Parameter]]


@contextmanager
def apart(model: nn.Module) -> Iterator[Uses]:
    """In the block every place of a tied parameter has one of its own, of the same memory; by name."""
    tied = _tied(model)
    uses: dict[str, list[nn.Parameter]] = {}
    for name, p, places in tied:
        uses[name] = [nn.Parameter(p.detach()) for _ in places]
        for (table, key), own in zip(places, uses[name], strict=True):
            table[key] = own
    try:
        yield uses
    finally:
        for _, p, places in tied:
            for table, key in places:
                table[key] = p


def has_tied(model: nn.Module) -> bool:
    """Whether a trained parameter is in several modules."""
    return bool(_tied(model))


_Place = tuple[dict[str, nn.Parameter | None], str]


def _tied(model: nn.Module) -> list[tuple[str, nn.Parameter, list[_Place]]]:
    """Trained parameters that are in several modules, and where."""
    places: dict[int, list[_Place]] = {}
    for module in model.modules():
        for key, p in module._parameters.items():
            places.setdefault(id(p), []).append((module._parameters, key))
    named = [(name, p, places[id(p)]) for name, p in model.named_parameters() if p.requires_grad]
    return [found for found in named if len(found[2]) > 1]


def magnitudes(uses: Uses, scale: float) -> dict[str, Tensor]:
    """Sums of |gradient| over the uses, float64, without the scale of the loss."""
    found = {}
    for name, own in uses.items():
        grads = [p.grad.abs().to(torch.float64) / scale for p in own if p.grad is not None]
        if grads:
            found[name] = torch.stack(grads).sum(0)
    return found
