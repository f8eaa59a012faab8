"""Everything random in a micro-batch follows from its key.

Where PyTorch's own generator stands, as it goes on from chunk to chunk once somebody has drawn from it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.errors import TaskError
from paceline.models.dropout import KeyedDropout


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


def append_rng_state(
    found: Sequence[Tensor], fresh: Tensor | None, device: torch.device
) -> tuple[Sequence[Tensor], float]:
    """What a chunk sends on, and 1.0 if the state of the generator is behind it, since it has moved.

    Args:
        fresh: where it stood; None: nobody looks.
    """
    now = torch.default_generator.get_state() if fresh is not None else None
    if now is None or fresh is None or torch.equal(now, fresh):
        return found, 0.0
    return [*found, now.to(device)], 1.0


def require_unchanged_rng(earlier_state: Tensor | None) -> None:
    """What is drawn for a part of a micro-batch is not what is drawn for that part of the whole.

    Args:
        earlier_state: where the generator was before; None: nobody looks.
    Raises:
        TaskError: it has moved since.
    """
    if earlier_state is not None and not torch.equal(
        torch.default_generator.get_state(), earlier_state.cpu()
    ):
        raise TaskError(
            "the forward draws from PyTorch's own generator, as nn.Dropout does, and a part of a micro-batch"
            " would draw other numbers than the whole",
            next_step="use paceline.models.KeyedDropout, or leave that stage's micro-batches whole (1)",
        )
