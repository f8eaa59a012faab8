"""Everything random in a micro-batch follows from its key."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import torch

from paceline.models import KeyedDropout


def seed_micro_batch(
    key: int, device: torch.device | None, dropouts: Iterable[KeyedDropout], *, everything: bool = False
) -> None:
    """Seed PyTorch's own generators (not without a device), and give keyed dropout its key.

    Args:
        everything: Python's and NumPy's generators too, which the model or its loss may draw from; it takes
            some 20 microseconds.
    """
    if device is not None:
        torch.default_generator.manual_seed(key)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(key)
    if everything:
        random.seed(key)
        np.random.seed(key % 2**32)
    for dropout in dropouts:
        dropout.take_key(key)
