"""What belongs to one update of a user's own loop: losses of a micro-batch, and the gradients of a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch
from torch import nn

from paceline.comm import Tally
from paceline.errors import TaskError
from paceline.slot import Slot
from paceline.task import Loss

_PART, _SAYERS = "_part", "_sayers"  # metrics; names that begin so are not reported


def keep_only(computes: Mapping[Slot, nn.Parameter], part: str) -> None:
    """Leave a gradient to the parameters of one submodule.

    Raises:
        TaskError: no parameter is in it.
    """
    own = [p for slot, p in computes.items() if slot.name.startswith(f"{part}.")]
    if not own:
        names = sorted({slot.name.partition(".")[0] for slot in computes})
        raise TaskError(f"the model has no part '{part}' that is trained, but {', '.join(names)}")
    kept = {id(p) for p in own}
    for p in computes.values():
        if id(p) not in kept:
            p.grad = None


def added(losses: Sequence[Loss], part: str) -> Loss:
    """Losses of one micro-batch over the same items; ranks that update a part say which."""
    total = torch.stack([loss.total.detach().reshape(()) for loss in losses]).sum()
    metrics = {name: value for loss in losses for name, value in loss.metrics.items()}
    said = {_PART: _number_of(part), _SAYERS: 1.0} if part else {}
    return Loss(total, losses[0].count, {**metrics, **said})


def _number_of(part: str) -> float:
    return 1.0 + crc32(part.encode()) % 2**20


def require_same_part(part: str, tally: Tally) -> None:
    """Raises: TaskError: ranks update different parts, each with what the others have of its gradient."""
    if part and tally.metrics[_PART] != _number_of(part) * tally.metrics[_SAYERS]:
        raise TaskError(
            f"this rank updates '{part}', and another rank another part",
            next_step="decide which part is updated by loop.step_number, which is equal on all ranks",
        )
