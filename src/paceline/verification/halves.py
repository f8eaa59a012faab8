"""The tree of additions of a reproducible run, implemented independently of `comm.reduction.tree`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def halves(leaves: Mapping[int, Tensor]) -> Tensor:
    """The sum over shards: of the sums of both halves of the shards, and so on; -0.0 becomes 0.0.

    Args:
        leaves: by shard; a shard that is not there counts as nothing.
    """
    found = _half(leaves, 0, 1 << max(leaves).bit_length())
    assert found is not None
    return found + 0.0


def _half(leaves: Mapping[int, Tensor], first: int, width: int) -> Tensor | None:
    if width == 1:
        return leaves.get(first)
    left = _half(leaves, first, width // 2)
    right = _half(leaves, first + width // 2, width // 2)
    if left is None or right is None:
        return right if left is None else left
    return left + right
