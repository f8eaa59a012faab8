"""Optimizers by name, with parameters grouped by whether they decay and adapt.

LBFGS, which evaluates the loss several times in a step, and SparseAdam have no name here.

Invariant: a parameter that does not require a gradient is in no group. This module writes no update rule;
an optimizer of the user's own is `UserOptimizer` or any `torch.optim.Optimizer`, given by the task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from paceline.errors import TaskError
from paceline.optim.adabound import AdaBound
from paceline.optim.adafactor import Adafactor
from paceline.optim.adam_to_sgd import AdamToSGD
from paceline.optim.kfac import KFac
from paceline.optim.lamb_lars import Lamb, Lars
from paceline.optim.muon import Muon
from paceline.optim.newton_cg import NewtonCG
from paceline.optim.user_optimizer import ByGroup
from paceline.recipe.optimizer_recipe import OptimizerRecipe
from paceline.recipe.registry import OptimizerSpec, known_specs

NamedParameter = tuple[str, nn.Parameter]
ParamGroups = list[dict[str, Any]]

_EXACT = (torch.float32, torch.float64)


def build_optimizer(model: nn.Module, recipe: OptimizerRecipe, fused_allowed: bool) -> torch.optim.Optimizer:
    """Build the optimizer that the recipe names.

    Args:
        model: its parameters that require a gradient are updated, each once, however many names it has.
        recipe: name, rate and the rest. `weight_decay` (decoupled: outside the moments; for SGD coupled, as
            in PyTorch) and `l2` (coupled: added to the gradient) act on what `decay_on` chooses.
        fused_allowed: False where the run needs bits that do not depend on where tensors are cut.
    Returns:
        The optimizer, with at most two groups for each update rule: decayed, then not decayed. Groups carry
        parameter names.
    Raises:
        TaskError: nothing is left to train, or a pattern of names matches none.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise TaskError(
            "the model has no parameter that requires a gradient",
            next_step="unfreeze some: parameter.requires_grad_(True) in the task's build function",
        )
    spec = recipe.spec
    fused = not reason_not_fused(model, recipe, fused_allowed)
    # PyTorch calls either of them weight_decay; a recipe sets one at most.
    groups = _group_by_decay(trained, recipe.decay_on, recipe.weight_decay or recipe.l2)
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


def adam_to_sgd(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build Adam that becomes SGD for `OptimizerSpec`; there is no fused kernel of it."""
    return AdamToSGD(
        groups, recipe.lr, betas=recipe.betas, eps=recipe.eps, switch_update=recipe.switch_update
    )


def adadelta(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build Adadelta for `OptimizerSpec`; PyTorch has no fused kernel of it."""
    return torch.optim.Adadelta(groups, recipe.lr, rho=recipe.rho, eps=recipe.eps)


def adagrad(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build Adagrad for `OptimizerSpec`, without the fused kernel that PyTorch has on some devices."""
    return torch.optim.Adagrad(groups, recipe.lr, eps=recipe.eps)


def adamax(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build Adamax for `OptimizerSpec`; PyTorch has no fused kernel of it."""
    return torch.optim.Adamax(groups, recipe.lr, betas=recipe.betas, eps=recipe.eps)


def asgd(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build ASGD for `OptimizerSpec`; its average of the weights is never read, so it has no t0."""
    return torch.optim.ASGD(groups, recipe.lr, lambd=recipe.lambd, alpha=recipe.alpha)


def nadam(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build NAdam for `OptimizerSpec`; PyTorch has no fused kernel of it."""
    return torch.optim.NAdam(
        groups,
        recipe.lr,
        betas=recipe.betas,
        eps=recipe.eps,
        momentum_decay=recipe.momentum_decay,
        decoupled_weight_decay=recipe.weight_decay > 0,
    )


def radam(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build RAdam for `OptimizerSpec`; PyTorch has no fused kernel of it."""
    return torch.optim.RAdam(
        groups,
        recipe.lr,
        betas=recipe.betas,
        eps=recipe.eps,
        decoupled_weight_decay=recipe.weight_decay > 0,
    )


def rprop(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build Rprop for `OptimizerSpec`; it decays no weights."""
    parameters = [named for group in groups for named in group["params"]]
    return torch.optim.Rprop(parameters, recipe.lr, etas=recipe.etas, step_sizes=recipe.step_sizes)


def lamb(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build LAMB for `OptimizerSpec`."""
    groups = _without_excluded(model, groups, recipe.exclude)
    return Lamb(groups, recipe.lr, betas=recipe.betas, eps=recipe.eps)


def lars(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build LARS for `OptimizerSpec`."""
    groups = _without_excluded(model, groups, recipe.exclude)
    return Lars(groups, recipe.lr, momentum=recipe.momentum, trust_coefficient=recipe.trust_coefficient)


def _without_excluded(model: nn.Module, groups: ParamGroups, exclude: Collection[str]) -> ParamGroups:
    """Return the groups without parameters of some kinds, and these in one group that is neither scaled nor
    decayed.
    """
    excluded = {id(p) for kind in exclude for p in _EXCLUDED_KINDS[kind](model)}
    kept = [
        group | {"params": [(n, p) for n, p in group["params"] if id(p) not in excluded]} for group in groups
    ]
    others = [(n, p) for group in groups for n, p in group["params"] if id(p) in excluded]
    kept.append({"params": others, "weight_decay": 0.0, "adapt": False})
    return [group for group in kept if group["params"]]


def _of_modules(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[nn.Parameter]:
    modules = (module for module in model.modules() if isinstance(module, kinds))
    return [p for module in modules for p in module.parameters(recurse=False)]


_NORMALIZATIONS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
_EXCLUDED_KINDS: Mapping[str, Callable[[nn.Module], list[nn.Parameter]]] = {
    "one-dimensional": lambda model: [p for p in model.parameters() if p.dim() < 2],
    "normalization": lambda model: _of_modules(model, _NORMALIZATIONS),
    "embeddings": lambda model: _of_modules(model, (nn.Embedding, nn.EmbeddingBag)),
}
"""Parameters of a kind, by their shape or by the type of their module; names say nothing."""


def kfac(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build K-FAC for `OptimizerSpec`."""
    return KFac(
        model,
        groups,
        recipe.lr,
        momentum=recipe.momentum,
        damping=recipe.damping,
        factor_decay=recipe.factor_decay,
        factor_interval=recipe.factor_interval,
        inverse_interval=recipe.inverse_interval,
        kl_clip=recipe.kl_clip,
    )


def newton_cg(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build Newton-CG for `OptimizerSpec`."""
    return NewtonCG(groups, recipe.lr, damping=recipe.damping, max_cg_steps=recipe.max_cg_steps)


def names_of_kinds(model: nn.Module, kinds: Collection[str]) -> set[str]:
    """Return the first names of the parameters of some kinds: "one-dimensional", "normalization" or
    "embeddings".
    """
    chosen = {id(p) for kind in kinds for p in _EXCLUDED_KINDS[kind](model)}
    return {name for name, p in model.named_parameters() if id(p) in chosen}


def adafactor(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build Adafactor for `OptimizerSpec`."""
    return Adafactor(groups, recipe.lr, beta2_decay=recipe.beta2_decay, d=recipe.d)


def muon(
    model: nn.Module, groups: ParamGroups, recipe: OptimizerRecipe, *, fused: bool
) -> torch.optim.Optimizer:
    """Build Muon for the matrices of hidden layers, and AdamW for all other parameters.

    Raises:
        TaskError: a pattern of `adamw_on` matches no parameter.
    Source: Jordan et al. 2024, Muon, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, Muon is
        Scalable for LLM Training, arXiv:2502.16982 (the rate of a matrix).
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for pattern in recipe.adamw_on:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise TaskError(
                f"the pattern '{pattern}' in optimizer.adamw_on matches no parameter of the model",
                next_step=f"the model has these parameters: {', '.join(names[:5])}, ...",
            )
    excluded = {id(p) for p in _EXCLUDED_KINDS["embeddings"](model)} | {
        id(p)
        for name, p in model.named_parameters(remove_duplicate=False)
        if any(fnmatchcase(name, pattern) for pattern in recipe.adamw_on)
    }

    def is_updated_by_muon(p: nn.Parameter) -> bool:
        return p.dim() == 2 and not p.is_complex() and id(p) not in excluded

    def select(by_muon: bool) -> ParamGroups:
        selected = [
            group | {"params": [(n, p) for n, p in group["params"] if is_updated_by_muon(p) == by_muon]}
            for group in groups
        ]
        return [group for group in selected if group["params"]]

    optimizers: list[torch.optim.Optimizer] = []
    if matrices := select(True):
        optimizers.append(
            Muon(
                matrices,
                recipe.lr,
                momentum=recipe.momentum,
                nesterov=recipe.nesterov,
                adjust_lr_fn=recipe.adjust_lr_fn,
            )
        )
    if others := select(False):
        optimizers.append(torch.optim.AdamW(others, recipe.lr, betas=recipe.betas, eps=recipe.eps))
    return ByGroup(*optimizers)
