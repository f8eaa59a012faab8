"""Backward from a loss that is multiplied with a number: the number is where backward begins, not a product.

A product would be one more node of the graph, and two more kernels in every micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)


def back_propagate(total: Tensor, scale: float) -> None:
    """Add the gradients of `total * scale` to the leaves.

    Args:
        total: a loss, with one value.
        scale: finite.
    Exactness: those of the product: both begin with `scale`, rounded once to the type of `total`.
    """
    if scale == 1.0:
        total.backward()
    elif total.dtype in _HALVES:  # which may not hold the number, and a product says so by an infinity
        (total * scale).backward()
    else:
        total.backward(torch.full_like(total, scale))
