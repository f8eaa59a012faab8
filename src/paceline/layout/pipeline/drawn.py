"""Where PyTorch's own generator stands, as it goes on from chunk to chunk once somebody has drawn from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import TaskError


def with_state(
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


def require_no_draws(stood: Tensor | None) -> None:
    """What is drawn for a part of a micro-batch is not what is drawn for that part of the whole.

    Args:
        stood: where the generator was before; None: nobody looks.
    Raises:
        TaskError: it has moved since.
    """
    if stood is not None and not torch.equal(torch.default_generator.get_state(), stood.cpu()):
        raise TaskError(
            "the forward draws from PyTorch's own generator, as nn.Dropout does, and a part of a micro-batch"
            " would draw other numbers than the whole",
            next_step="use paceline.models.KeyedDropout, or leave that stage's micro-batches whole (1)",
        )
