"""A model that recomputes by `torch.utils.checkpoint` itself: under `context=N` that would go wrong.

What it repeats in backward runs outside of the mode in which attention, positions and dropout see the whole
sequence: each rank would go on with its part alone. `memory.recompute` repeats inside of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import unwrap
from types import FrameType

from torch.utils.checkpoint import CheckpointFunction, checkpoint

from paceline.errors import TaskError
from paceline.layout.repetition import is_repeated_in_modes
from paceline.layout.segments import Link

_REENTRANT = CheckpointFunction.forward.__code__
_OTHER = unwrap(checkpoint).__code__


def require_no_own_checkpoint(frame: FrameType | None) -> None:
    """Look at what has called a function that a mode answers.

    Raises:
        TaskError: a checkpoint of the model's own is among it.
    """
    if any(map(_is_own_checkpoint, _outwards(frame))):
        raise TaskError(
            "the model computes a part of itself again in backward by torch.utils.checkpoint, where a rank"
            " under context=N would see its own positions only",
            next_step='leave it out of the model and set memory.recompute = "blocks" (Task(blocks=...) names'
            " them), or choose a strategy without context",
        )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_own_checkpoint(frame: FrameType) -> bool:
    if frame.f_code is _REENTRANT:
        return True
    if frame.f_code is not _OTHER:
        return False
    given = frame.f_locals
    return not (is_repeated_in_modes(given["context_fn"]) or isinstance(given["function"], Link))
