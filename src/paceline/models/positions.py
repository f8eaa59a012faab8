"""The positions of a sequence that a model gets: all of them, or under `context=N` those of one rank.

A model calls `positions` where it needs them. Under `context=N`, and in generation with a cache, a function
mode around the forward overrides it (`paceline.parallel.context`, `paceline.serving`), so there is no state
to set and to reset.
"""

from __future__ import annotations

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


def positions(x: Tensor, dim: int) -> Tensor | slice:
    """Return the positions in the whole sequence along a dimension, as an index into a table by position.

    Args:
        x: any tensor of the forward.
        dim: its dimension of positions.
    Returns:
        The first `x.size(dim)`; on a rank that runs a part of the sequence an int64 [x.size(dim)]; in
        generation an int64 [B, 1, ..., 1, x.size(dim)] with a dimension for each of `x` up to `dim`, where
        each sequence of the batch has its own positions. Rows of a table at this index broadcast with `x`.
    """
    if has_torch_function_unary(x):
        local: Tensor | slice = handle_torch_function(positions, (x,), x, dim)
        return local
    return slice(0, x.size(dim))
