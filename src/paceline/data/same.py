"""Is a sample the same? By value, on any process."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

_PLAIN = (str, bytes, int, float, bool, type(None))


def digest(sample: Any) -> str:
    """A hash of the numbers, words and tensors of a sample; of what else there is, of its type only."""
    leaves, shape = tree_flatten(sample)
    found = blake2b(str(shape).encode(), digest_size=16)
    for leaf in leaves:
        found.update(_bytes_of(leaf))
    return found.hexdigest()


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor):
        kept = leaf.detach().cpu().contiguous()
        return (
            f"{kept.dtype}{tuple(kept.shape)}".encode() + kept.reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes()
    return (repr(leaf) if type(leaf) in _PLAIN else type(leaf).__name__).encode()
