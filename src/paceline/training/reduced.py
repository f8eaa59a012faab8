"""Values of all replicas as one value, for a user's own loop: a number of samples, a score.

Sums are taken in the order of ranks, of what every rank has heard, so all have the same bits. There is no
mean: that of ranks with other numbers of samples is none of the samples. Add up a sum and a count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from paceline.errors import TaskError

_HOWS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}
)


def require_how(how: str) -> None:
    """Raises: TaskError: values cannot come together so."""
    if how not in _HOWS:
        raise TaskError(
            f"loop.reduce(..., '{how}'): values of replicas come together by {', '.join(_HOWS)}",
            next_step="for a mean, reduce the sum and the count, and divide",
        )


def reduced(values: Sequence[Tensor], how: str) -> Tensor:
    """The values as one, in their type.

    Args:
        values: of the replicas, in their order, of one shape.
        how: "sum", "max" or "min".
    Raises:
        TaskError: shapes differ.
    """
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise TaskError(f"loop.reduce of values of several shapes: {sorted(shapes)}")
    stacked = torch.stack(list(values))
    return _HOWS[how](stacked).to(stacked.dtype)


def as_bytes(value: Tensor) -> bytes:
    """A tensor with its type and shape."""
    head = json.dumps([str(value.dtype).removeprefix("torch."), list(value.shape)]).encode()
    own = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return head + b"\n" + bytes(own.numpy().tobytes())


def from_bytes(data: bytes) -> Tensor:
    """The inverse of `as_bytes`."""
    head, _, values = data.partition(b"\n")
    kind, shape = json.loads(head)
    flat = torch.frombuffer(bytearray(values), dtype=torch.uint8) if values else torch.empty(0).byte()
    return flat.view(getattr(torch, kind)).reshape(shape)
