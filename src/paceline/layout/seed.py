"""Everything random in a unit follows from its key."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.models import KeyedDropout


def seed_unit(key: int, device: torch.device | None, dropouts: Iterable[KeyedDropout]) -> None:
    """Seed PyTorch's own generators (not without a device), and give keyed dropout its key."""
    if device is not None:
        torch.default_generator.manual_seed(key)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(key)
    for dropout in dropouts:
        dropout.take_key(key)
