"""Optimizers by name, of `torch.optim` but for AdaBound, with parameters grouped by whether they decay.

Invariant: a parameter that does not require a gradient is in no group. This module writes no update rule;
an optimizer of the user's own is `UserOptimizer` or any `torch.optim.Optimizer`, given by the task.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline.errors import TaskError
from paceline.optim.adabound import AdaBound
from paceline.recipe.registry import OptimizerSpec, known_specs
from paceline.recipe.tables import OptimizerRecipe

NamedParameter = tuple[str, nn.Parameter]
ParamGroups = list[dict[str, Any]]

_EXACT = (torch.float32, torch.float64)


def build_optimizer(model: nn.Module, recipe: OptimizerRecipe, fused_allowed: bool) -> torch.optim.Optimizer:
    """Build the optimizer that the recipe names.

    Args:
        model: its parameters that require a gradient are updated, each once, however many names it has.
        recipe: name, rate and the rest. `weight_decay` (decoupled: outside the moments, AdamW) and `l2`
            (coupled: added to the gradient) act on the parameters that `decay_on` chooses.
        fused_allowed: False where the run needs bits that do not depend on where tensors are cut.
    Returns:
        The optimizer, with at most two groups: decayed, then not decayed. Groups carry parameter names.
    Raises:
        TaskError: nothing is left to train.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise TaskError(
            "the model has no parameter that requires a gradient",
            next_step="unfreeze some: parameter.requires_grad_(True) in the task's build function",
        )
    spec = recipe.spec
    fused = not reason_not_fused(model, recipe, fused_allowed)
    groups = _group_by_decay(trained, recipe.decay_on, getattr(recipe, spec.decays_by))
    optimizer: torch.optim.Optimizer = spec.load()(model, groups, recipe, fused=fused)
    return optimizer


def reason_not_fused(model: nn.Module, recipe: OptimizerRecipe, fused_allowed: bool) -> str:
    """Return why the update on this rank uses no fused kernel; empty if it uses one.

    Args:
        model, recipe, fused_allowed: as for `build_optimizer`.
    """
    if not recipe.fused:
        return "optimizer.fused = false"
    if not fused_allowed:
        return "reproducible = true: the rounding of fused kernels depends on where tensors are split"
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not p.is_meta]
    if fused_is_supported(recipe.spec.word, trained):
        return ""
    if not recipe.spec.has_kernel:
        return f"PyTorch has no fused kernel of {recipe.name}"
    name, p = next((name, p) for name, p in trained if not _supports_fused(p))
    kind = str(p.dtype).removeprefix("torch.") + ("" if p.is_contiguous() else ", not contiguous,")
    return f"no fused kernel is correct for '{name}' ({kind} on {p.device.type})"


def fused_is_supported(name: str, named_parameters: Iterable[NamedParameter]) -> bool:
    """Return whether PyTorch has a correct fused kernel of this optimizer for all these tensors.

    A kernel takes values, gradients and moments in memory order, and gradients need not have the order of a
    parameter that is not contiguous. With bfloat16 and float16 the fused SGD on CPUs is inaccurate (PyTorch
    2.13: 0.1 off after four steps on 16 values or more, where 0.005 is rounding).
    """
    return known_specs(OptimizerSpec)[name].has_kernel and all(
        _supports_fused(p) for _, p in named_parameters
    )


def _supports_fused(p: nn.Parameter) -> bool:
    on_device = p.device.type == "cuda" or (p.device.type == "cpu" and p.dtype in _EXACT)
    return p.is_floating_point() and p.is_contiguous() and on_device


def _fill_missing_momentum(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Give every parameter a momentum after the first step; a zero momentum leads to the same updates.

    PyTorch's fused SGD takes momenta of all parameters or of none, so a parameter whose first gradient comes
    later (an expert that received no token) would end the run.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def is_decayed(parameter: nn.Parameter, decay_on: str) -> bool:
    """Return whether a parameter decays: all do, or those with two dimensions or more.

    Biases and the scales of normalisations have fewer, whatever their names are.
    """
    return decay_on == "all" or parameter.dim() >= 2


def _group_by_decay(trained: list[NamedParameter], decay_on: str, decay: float) -> ParamGroups:
    decayed = [(name, p) for name, p in trained if is_decayed(p, decay_on)]
    plain = [(name, p) for name, p in trained if not is_decayed(p, decay_on)]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def sgd(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build SGD for `OptimizerSpec`."""
    optimizer = torch.optim.SGD(
        groups, recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=fused
    )
    if fused and recipe.momentum:
        optimizer.register_step_post_hook(_fill_missing_momentum)
    return optimizer


def adam(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build Adam for `OptimizerSpec`."""
    return torch.optim.Adam(groups, recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=fused)


def adamw(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build AdamW for `OptimizerSpec`."""
    return torch.optim.AdamW(groups, recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=fused)


def rmsprop(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build RMSprop for `OptimizerSpec`; PyTorch has no fused kernel of it."""
    return torch.optim.RMSprop(
        groups, recipe.lr, alpha=recipe.alpha, eps=recipe.eps, momentum=recipe.momentum
    )


def adabound(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build AdaBound for `OptimizerSpec`; there is no fused kernel of it."""
    return AdaBound(
        groups, recipe.lr, betas=recipe.betas, eps=recipe.eps, final_lr=recipe.final_lr, gamma=recipe.gamma
    )
