"""Errors of a forward that name the samples: a label out of range, a sample of another width.

Invariant: an error keeps its type and its traceback, or is the cause of a DataError; nothing is run again
unless a forward has failed. Looking for the sample calls the loss for one sample after another, so it is done
only where a rank has the whole model and no forward communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from paceline.data.work import MicroBatch
from paceline.errors import DataError, PacelineError

_MAX_NAMED = 8


RunAlone = Callable[[Any], object]
"""Function that runs a forward on a part of a batch."""


FORWARD_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(RuntimeError, TypeError, ValueError),
)
"""Errors of the user's code; those of Paceline say by themselves what is wrong."""


def explain_forward_error(
    error: Exception,
    micro_batch: MicroBatch,
    batch: Any,
    runs_alone: Callable[[], RunAlone | None] = lambda: None,
) -> None:
    """Add to an error of the user's code which samples it ran on.

    Args:
        micro_batch: the samples.
        batch: the same, collated.
        runs_alone: returns the function that runs the forward on a part of the batch; None: it cannot be
            repeated on this rank alone.
    Raises:
        DataError: some of the samples fail alone with the same type of error, and others do not.
    """
    indices, place = micro_batch.indices.tolist(), f"step {micro_batch.step}"
    run_alone = None if _is_of_machine(error) else runs_alone()
    failing = [] if run_alone is None else _failing(error, batch, indices, run_alone)
    if not failing:
        error.add_note(f"in {place}, with the samples {_shown(indices)}: {describe_batch(batch)}")
        return
    others = f" (so do the samples {_shown(failing[1:])})" if len(failing) > 1 else ""
    raise DataError(
        f"the loss fails for sample {failing[0]}: {type(error).__name__}: {error}",
        where=f"{place}, samples {_shown(indices)}: {describe_batch(batch)}",
        next_step="look at this sample: a label out of range, a value that the model does not expect;"
        f" repair it or leave it out{others}",
    ) from error


def describe_batch(batch: Any) -> str:
    """Return dtypes and shapes of a batch, with the range of whole numbers, as of labels and tokens."""
    return ", ".join(_describe_leaf(leaf) for leaf in tree_flatten(batch)[0][:_MAX_NAMED])


def _describe_leaf(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    text = f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    whole = not (leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype != torch.bool
    if not whole or not leaf.numel() or leaf.device.type != "cpu":
        return text
    return f"{text} from {int(leaf.min())} to {int(leaf.max())}"


def _is_of_machine(error: Exception) -> bool:
    """Return whether an error is about memory or a device, and would come again, or worse."""
    return isinstance(error, MemoryError | OSError) or any(
        word in str(error) for word in ("memory", "CUDA", "device-side")
    )


def _failing(error: Exception, batch: Any, indices: list[int], run_alone: RunAlone) -> list[int]:
    """Return the samples that fail alone, if others do not."""
    if len(indices) == 1:
        return []
    failing = []
    for place, index in enumerate(indices):
        try:
            run_alone(_one_sample(batch, place, len(indices)))
        except (*FORWARD_ERRORS, PacelineError) as alone:
            # Another error says nothing about this one: the loss may need gradients, or more samples.
            if type(alone) is not type(error):
                return []
            failing.append(index)
    return failing if len(failing) < len(indices) else []


def _one_sample(batch: Any, place: int, num_samples: int) -> Any:
    def row(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == num_samples
        return value[place : place + 1] if has_rows else value

    return tree_map(row, batch)


def _shown(indices: list[int]) -> str:
    more = f" and {len(indices) - _MAX_NAMED} more" if len(indices) > _MAX_NAMED else ""
    return ", ".join(map(str, indices[:_MAX_NAMED])) + more
