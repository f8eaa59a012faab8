"""Which positions of a sequence a model sees: all of them, or, under `context=N`, those of one rank.

A model asks where it needs to know; what runs it on a part answers in its place, for the duration of the
forward (`paceline.parallel.context`). Nothing is set, so nothing stays.
"""

from __future__ import annotations

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


def positions(x: Tensor, dim: int) -> Tensor | slice:
    """The places in the whole sequence of what lies along a dimension, as an index into a table by position.

    Args:
        x: any tensor of the forward.
        dim: its dimension of positions.
    Returns:
        The first `x.size(dim)`; on a rank that runs a part of the sequence an int64 [x.size(dim)].
    """
    if has_torch_function_unary(x):
        found: Tensor | slice = handle_torch_function(positions, (x,), x, dim)
        return found
    return slice(0, x.size(dim))
