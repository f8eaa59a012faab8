"""The gradients of each use of a tied parameter, which may cancel in their sum.

Two sides that add up uses and shards in other orders differ by rounding errors of the terms, not of their sum.
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
    """In the block every place of a tied parameter has a parameter of its own, of the same memory; by name."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    places: dict[int, list[tuple[nn.Module, str]]] = {number: [] for number in names}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None and id(p) in places:
                places[id(p)].append((module, key))
    tied = {number: found for number, found in places.items() if len(found) > 1}
    first = {number: found[0][0]._parameters[found[0][1]] for number, found in tied.items()}
    uses: dict[str, list[nn.Parameter]] = {}
    for number, found in tied.items():
        own = [nn.Parameter(module._parameters[key].detach()) for module, key in found]  # type: ignore[union-attr]
        uses[names[number]] = own
        for (module, key), p in zip(found, own, strict=True):
            module._parameters[key] = p
    try:
        yield uses
    finally:
        for number, found in tied.items():
            for module, key in found:
                module._parameters[key] = first[number]


def magnitudes(uses: Uses, scale: float) -> dict[str, Tensor]:
    """Sums of |gradient| over the uses, float64, without the scale of the loss."""
    found = {}
    for name, own in uses.items():
        grads = [p.grad.abs().to(torch.float64) / scale for p in own if p.grad is not None]
        if grads:
            found[name] = torch.stack(grads).sum(0)
    return found
