"""Optimizers by name, of `torch.optim` but for AdaBound, with parameters grouped by whether they decay.

Invariant: a parameter that does not require a gradient is in no group. This module writes no update rule;
an optimizer of the user's own is `UserOptimizer` or any `torch.optim.Optimizer`, given by the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from paceline.errors import TaskError
from paceline.optim.adabound import AdaBound
from paceline.recipe import OptimizerRecipe

NamedParameter = tuple[str, nn.Parameter]

_FUSED_OPTIMIZERS = ("adam", "adamw", "sgd")
_EXACT = (torch.float32, torch.float64)


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
    here = [(name, p) for name, p in trained if not p.is_meta]  # the others are updated by other ranks
    if recipe.name in _FUSED_OPTIMIZERS:
        settings["fused"] = recipe.fused and fused_allowed and fused_is_supported(recipe.name, here)
    groups = _group(trained, recipe.decay_on, settings.pop("weight_decay"))
    optimizer = _KINDS[recipe.name](groups, lr=recipe.lr, **settings)
    if recipe.name == "sgd" and settings["fused"] and settings["momentum"]:
        optimizer.register_step_post_hook(_give_all_a_momentum)
    return optimizer


def fused_is_supported(name: str, named_parameters: Iterable[NamedParameter]) -> bool:
    """Say whether torch has a fused kernel of this optimizer for all these tensors, and it is right.

    A kernel takes values, gradients and moments in the order in which they lie in memory, and not everybody
    who hands it gradients keeps the order of a parameter that is not contiguous. With bfloat16 and float16
    the fused SGD of the processor ends elsewhere (PyTorch 2.13: 0.1 off after four steps on 16 values or
    more, where 0.005 is rounding).
    """
    return name in _FUSED_OPTIMIZERS and all(_suits_kernels(p) for _, p in named_parameters)


def _suits_kernels(p: nn.Parameter) -> bool:
    on_device = p.device.type == "cuda" or (p.device.type == "cpu" and p.dtype in _EXACT)
    return p.is_floating_point() and p.is_contiguous() and on_device


def _give_all_a_momentum(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After the first step no parameter is without a momentum: from nothing a gradient adds up to the same.

    PyTorch's fused SGD takes momenta of all parameters or of none, so one whose first gradient comes later
    (an expert that nobody was sent to) would end the run.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


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


def _adabound(recipe: OptimizerRecipe) -> dict[str, Any]:
    return {**_adam(recipe), "final_lr": recipe.final_lr, "gamma": recipe.gamma}


_SETTINGS: dict[str, Callable[[OptimizerRecipe], dict[str, Any]]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "rmsprop": _rmsprop,
    "adabound": _adabound,
}
_KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adabound": AdaBound,
}
