"""The model of a run on other processes, in the process that has asked for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.training import Result


def with_model(result: Result, recipe: Any, task: Any, base_dir: Path | None) -> Result:
    """The result, with the whole trained model.

    Args:
        recipe, task, base_dir: of the call. A model that was given has the weights of the run afterwards, as
            if it had been trained here.
    """
    model = _given_model(task)
    if model is None and result.model is not None:
        return result
    weights = _weights(result)
    if weights is None:
        return result
    if model is None:
        model = _built(recipe, task, base_dir)
    model.load_state_dict(weights)
    return replace(result, model=model)


def _given_model(task: Any) -> nn.Module | None:
    """Of a task or a tuple; None: a function builds it."""
    if isinstance(task, tuple):
        return task[0]
    return None if callable(task) else getattr(task, "model", None)


def _weights(result: Result) -> dict[str, Tensor] | None:
    """From rank 0's model if it held all of it, else from the last checkpoint."""
    from paceline.checkpoint import Files, find_checkpoint, weights_of, with_tied_names

    if result.model is not None:
        return result.model.state_dict()
    if result.checkpoint is None:
        return None
    folder, _, name = result.checkpoint.rpartition("/")
    found = find_checkpoint(Files(folder), lambda text: None, name)
    return with_tied_names(weights_of(found), found)


def _built(recipe: Any, task: Any, base_dir: Path | None) -> nn.Module:
    from paceline.training.given import given_recipe
    from paceline.training.joining import obtain_task

    resolved, base_dir = given_recipe(recipe, task, base_dir)
    return obtain_task(resolved, task, base_dir).model
