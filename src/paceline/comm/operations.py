"""What can be done with the tensors of several ranks: here, and by the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from paceline.errors import CommunicationError

REDUCE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(0, dtype=parts.dtype),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0, dtype=parts.dtype),
}
"""Of tensors that are here, along the first dimension."""

_BY_BACKEND = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def by_backend(reduction: str, x: Tensor) -> Any:
    """What the backend is asked for.

    Raises:
        CommunicationError: complex numbers travel as pairs of real ones, of which only sums are right.
    """
    if x.is_complex() and reduction != "sum":
        raise CommunicationError(
            f"a {reduction} of complex numbers over ranks is not known",
            next_step="gather them, or reduce their absolute values",
        )
    return _BY_BACKEND[reduction]
