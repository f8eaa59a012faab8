"""A task's model, made ready to be placed: its weights, and the same on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.checkpoint import load_weights
from paceline.comm import Net
from paceline.comm.many import give_all
from paceline.layout.precision import compile_or_explain
from paceline.layout.recompute import recompute_blocks
from paceline.mesh import Group
from paceline.models import InitializeByName
from paceline.models.dropout import name_dropouts
from paceline.recipe import Recipe
from paceline.task import Task


def prepare_model(
    recipe: Recipe,
    task: Task,
    device: torch.device,
    *,
    whole: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> nn.Module:
    """The task's model on its device: weights from a file, or set by name where the task knows how.

    Args:
        whole: give memory to all parameters of a model that was built without; else they wait until it is
            known which of them this rank holds. Weights from a file are read whole, by every rank.
        warn: is told of files of which nobody says what their bytes should be.
    """
    waits = any(p.is_meta for p in task.model.parameters()) and recipe.init_from is None and not whole
    if task.initialize is not None and not waits:
        task.initialize(task.model, recipe.seed)
    if recipe.init_from is not None:
        taken = load_weights(task.model, recipe.init_from, vocabulary=task.vocabulary)
        doubt = taken.warning(recipe.init_from)
        if doubt:
            warn(doubt)
    name_dropouts(task.model)
    if not waits:
        return task.model.to(device)
    if isinstance(task.initialize, InitializeByName):
        set_small(task.model, recipe.seed, task.initialize)
    return task.model._apply(lambda t: t if t.is_meta else t.to(device))


def set_small(model: nn.Module, seed: int, initialize: InitializeByName) -> None:
    """Set the parameters of a model that have memory, though it was built without."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_meta:
                p.copy_(initialize.part(model, seed, name, tuple(slice(0, n) for n in p.shape)))


def make_equal(model: nn.Module, net: Net, group: Group) -> None:
    """Give every rank the parameters and buffers of rank 0; what has no memory is made alike on every rank.

    Wire: n bytes received by each rank but the first, in broadcasts of some megabytes.
    """
    tensors: list[Tensor] = [p.detach() for p in model.parameters()] + list(model.buffers())
    give_all([t for t in tensors if not t.is_meta], net, group)


def recompute_and_compile(
    recipe: Recipe, task: Task, model: nn.Module, device: torch.device, warn: Callable[[str], None]
) -> None:
    """Change the model in place as the recipe's memory and runtime sections say."""
    if recipe.memory.recomputes:
        recompute_blocks(model, task.blocks, recipe.memory.recompute)
    if recipe.runtime.compile:
        reason = compile_or_explain(model, device.type)
        if reason:
            warn(reason)
