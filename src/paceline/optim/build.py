"""Optimizers by name, through `torch.optim`, with parameters grouped by whether they decay.

Invariant: a parameter that does not require a gradient is in no group. This module writes no update rule;
an optimizer of the user's own is `UserOptimizer` or any `torch.optim.Optimizer`, given by the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from paceline.errors import TaskError
from paceline.recipe import OptimizerRecipe

NamedParameter = tuple[str, nn.Parameter]

_FUSED_OPTIMIZERS = ("adam", "adamw", "sgd")


def build_optimizer(
    named_parameters: Iterable[NamedParameter], recipe: OptimizerRecipe, fused_allowed: bool
) -> torch.optim.Optimizer:
    """Make the optimizer that the recipe names.

    Args:
        named_parameters: as `model.named_parameters()` gives them: each tensor once, however many names
            it has. Those that do not require a gradient are left out.
        recipe: name, rate and the rest. `weight_decay` (decoupled: outside the moments, AdamW) and `l2`
            (coupled: added to the gradient) act on the parameters that `decay_on` chooses.
        fused_allowed: False where the run needs bits that do not depend on where tensors are cut.
    Returns:
        The optimizer, with at most two groups: decayed, then not decayed. Groups carry parameter names.
    Raises:
        TaskError: nothing is left to train.
    """
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    if not trained:
        raise TaskError(
            "the model has no parameter that requires a gradient",
            next_step="unfreeze some: parameter.requires_grad_(True) in the task's build function",
        )
    settings = _SETTINGS[recipe.name](recipe)
    if recipe.name in _FUSED_OPTIMIZERS:
        settings["fused"] = recipe.fused and fused_allowed and fused_is_supported(recipe.name, trained)
    groups = _group(trained, recipe.decay_on, settings.pop("weight_decay"))
    return _KINDS[recipe.name](groups, lr=recipe.lr, **settings)


def fused_is_supported(name: str, named_parameters: Iterable[NamedParameter]) -> bool:
    """Say whether torch has a fused kernel of this optimizer for those of these tensors that are here.

    On the processor not for types of two bytes: there fused SGD of torch 2.13 leaves the parameters as they are.
    """
    return name in _FUSED_OPTIMIZERS and all(_has_kernel(p) for _, p in named_parameters)


def _has_kernel(p: nn.Parameter) -> bool:
    wide = p.dtype in (torch.float32, torch.float64)
    return p.is_floating_point() and (p.device.type == "cuda" or wide and (p.is_meta or p.is_cpu))


def decays(parameter: nn.Parameter, decay_on: str) -> bool:
    """Say whether a parameter decays: all do, or those with two dimensions or more.

    Biases and the scales of normalisations have fewer, whatever their names are.
    """
    return decay_on == "all" or parameter.dim() >= 2


def _group(trained: list[NamedParameter], decay_on: str, decay: float) -> list[dict[str, Any]]:
    decayed = [(name, p) for name, p in trained if decays(p, decay_on)]
    plain = [(name, p) for name, p in trained if not decays(p, decay_on)]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _sgd(recipe: OptimizerRecipe) -> dict[str, Any]:
    return {"momentum": recipe.momentum, "nesterov": recipe.nesterov, "weight_decay": recipe.l2}


def _adam(recipe: OptimizerRecipe) -> dict[str, Any]:
    return {"betas": recipe.betas, "eps": recipe.eps, "weight_decay": recipe.l2}


def _adamw(recipe: OptimizerRecipe) -> dict[str, Any]:
    return {"betas": recipe.betas, "eps": recipe.eps, "weight_decay": recipe.weight_decay}


def _rmsprop(recipe: OptimizerRecipe) -> dict[str, Any]:
    return {
        "alpha": recipe.alpha,
        "eps": recipe.eps,
        "momentum": recipe.momentum,
        "weight_decay": recipe.l2,
    }


_SETTINGS: dict[str, Callable[[OptimizerRecipe], dict[str, Any]]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "rmsprop": _rmsprop,
}
_KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}
