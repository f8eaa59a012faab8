"""The recipe's optimizer, straight from `torch.optim`, written apart from `paceline.optim.build`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.recipe import OptimizerRecipe


def plain_optimizer(model: nn.Module, recipe: OptimizerRecipe, fused_allowed: bool) -> torch.optim.Optimizer:
    """The optimizer that the recipe names, over all trained parameters of a model.

    Args:
        fused_allowed: as the session has it, so that both run the same kernels.
    """
    r = recipe
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    fused = r.fused and fused_allowed and all(_may_be_fused(p) for _, p in trained)
    matrices = [(n, p) for n, p in trained if p.dim() > 1 or r.decay_on == "all"]
    others = [(n, p) for n, p in trained if not (p.dim() > 1 or r.decay_on == "all")]
    decay = getattr(r, r.spec.decays_by)
    groups: list[dict[str, Any]] = [
        {"params": members, "weight_decay": rate}
        for members, rate in ((matrices, decay), (others, 0.0))
        if members
    ]
    match r.name:
        case "sgd":
            sgd = torch.optim.SGD(groups, r.lr, momentum=r.momentum, nesterov=r.nesterov, fused=fused)
            if fused and r.momentum:
                sgd.register_step_post_hook(_fill_momenta)
            return sgd
        case "adam" | "adamw":
            kind = torch.optim.Adam if r.name == "adam" else torch.optim.AdamW
            return kind(groups, r.lr, betas=r.betas, eps=r.eps, fused=fused)
        case "rmsprop":
            return torch.optim.RMSprop(groups, r.lr, alpha=r.alpha, eps=r.eps, momentum=r.momentum)
    return _the_only_one(model, groups, r, fused)


def _the_only_one(
    model: nn.Module, groups: list[dict[str, Any]], recipe: OptimizerRecipe, fused: bool
) -> torch.optim.Optimizer:
    """As it is: PyTorch has none, so there is no second writing."""
    found: torch.optim.Optimizer = recipe.spec.load()(model, groups, recipe, fused=fused)
    return found


def _may_be_fused(p: nn.Parameter) -> bool:
    """Fused kernels are right on values without gaps, and on the processor not in types of two bytes."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(p)
    return bool(dense and p.is_floating_point() and (p.is_cuda or p.dtype in (torch.float32, torch.float64)))


def _fill_momenta(sgd: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Fused SGD takes momenta of all parameters or of none; zeros are what no gradient has left."""
    for p in (p for group in sgd.param_groups for p in group["params"]):
        if sgd.state[p].get("momentum_buffer") is None:
            sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
