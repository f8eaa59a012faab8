"""Optimizer, learning rate and masks of the oracle, implemented independently of the session's.

The optimizer comes straight from `torch.optim`, the learning rate and the masks from the papers. A test
compares the first two with the session's, bit by bit, over every kind of schedule and optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import cos, exp, inf, pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from paceline.recipe.optimizer_recipe import OptimizerRecipe
from paceline.recipe.schedule_recipe import ScheduleRecipe
from paceline.recipe.sparsity_recipe import SparsityRecipe
from paceline.state.slot import ExtraState, TensorPiece, TensorSlot


@dataclass(frozen=True)
class PlainSchedule:
    """The learning rate of every update, as a factor of the base rate.

    Args:
        recipe: shape of the schedule.
        steps: number of updates of the whole run.
        batch_size: samples of one update.
    Source: Goyal et al. 2017, arXiv:1706.02677, section 2 (linear scaling, warm-up from the base rate);
        Krizhevsky 2014, arXiv:1404.5997 (square root); Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5;
        the documentation of OneCycleLR and ReduceLROnPlateau in PyTorch.
    """

    recipe: ScheduleRecipe
    steps: int
    batch_size: int

    def factor(self, update: int) -> float:
        """Return the factor of the base rate at `update` = 0, 1, ..."""
        warmup = self.recipe.warmup_steps
        if update >= warmup:
            return self._peak() * self._after_warmup(update - warmup)
        first = self.recipe.warmup_from if self.recipe.base_batch is None else min(1.0, self._peak())
        return first + (self._peak() - first) * update / warmup

    def multiplier(self, values: Sequence[float]) -> float:
        """Return the factor of all rates after evaluations with these values, in order; 1 without plateau."""
        recipe = self.recipe
        worst = inf if recipe.better == "lower" else -inf
        multiplier, best, bad, resting = 1.0, worst, 0, 0
        for value in values if recipe.decay == "plateau" else ():
            if recipe.better == "lower":
                limit = best * (1.0 - recipe.threshold) if recipe.threshold_mode == "rel" else None
                improved = value < (best - recipe.threshold if limit is None else limit)
            else:
                limit = best * (recipe.threshold + 1.0) if recipe.threshold_mode == "rel" else None
                improved = value > (best + recipe.threshold if limit is None else limit)
            best, bad = (value, 0) if improved else (best, bad + 1)
            if resting > 0:
                resting, bad = resting - 1, 0
            if bad > recipe.patience:
                multiplier = max(recipe.final, multiplier * recipe.factor)
                resting, bad = recipe.cooldown, 0
        return multiplier

    def _peak(self) -> float:
        if self.recipe.base_batch is None:
            return 1.0
        k = self.batch_size / self.recipe.base_batch
        return {"linear": k, "sqrt": sqrt(k)}[self.recipe.batch_scaling]

    def _after_warmup(self, t: int) -> float:
        recipe = self.recipe
        if recipe.decay in ("constant", "plateau"):
            return 1.0
        if recipe.decay == "one_cycle":
            return _one_cycle(t, self.steps, recipe)
        if recipe.decay == "exponential":
            return exp(min(709.0, -recipe.rate * t))  # beyond it float64 has no number
        start, length = 0, max(1, self.steps - recipe.warmup_steps)
        if recipe.cycle_steps is not None:
            start, length = _cycle(t, recipe.cycle_steps, recipe.cycle_factor)
        progress = min(1.0, (t - start) / length)
        if recipe.decay == "linear":
            return 1.0 + (recipe.final - 1.0) * progress
        if recipe.decay != "cosine":
            raise AssertionError(f"internal error: the oracle lacks the schedule '{recipe.decay}'")
        return recipe.final + 0.5 * (1.0 - recipe.final) * (1.0 + cos(pi * progress))


def _one_cycle(t: int, steps: int, recipe: ScheduleRecipe) -> float:
    """Return the factor in a cycle of two phases, each of which anneals from one rate to the next."""
    low = 1.0 / recipe.div_factor
    end_of_rise, end = max(0.0, recipe.pct_start * steps - 1), steps - 1
    if t >= end_of_rise:
        if end <= end_of_rise:
            return 1.0
        start, goal = 1.0, low / recipe.final_div_factor
        share = (min(t, end) - end_of_rise) / (end - end_of_rise)
    else:
        start, goal, share = low, 1.0, t / end_of_rise
    if recipe.anneal_strategy == "cos":
        return goal + (start - goal) / 2.0 * (1.0 + cos(pi * share))
    return start + (goal - start) * share


def _cycle(t: int, first_length: int, factor: int) -> tuple[int, int]:
    """Return start and length of the cycle that contains t, where T_i = T_0 * T_mult ** i."""
    start, number = 0, 0
    if factor == 1:
        return t - t % first_length, first_length
    while t >= start + first_length * factor**number:
        start += first_length * factor**number
        number += 1
    return start, first_length * factor**number


def plain_optimizer(model: nn.Module, recipe: OptimizerRecipe, fused_allowed: bool) -> torch.optim.Optimizer:
    """Build the optimizer that the recipe names, over all trained parameters of a model.

    Args:
        fused_allowed: as in the session, so that both run the same kernels.
    """
    r = recipe
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    fused = r.fused and fused_allowed and all(_can_be_fused(p) for _, p in trained)
    matrices = [(n, p) for n, p in trained if p.dim() > 1 or r.decay_on == "all"]
    others = [(n, p) for n, p in trained if not (p.dim() > 1 or r.decay_on == "all")]
    # PyTorch calls both of them weight_decay; only NAdam and RAdam have to be told which one it is.
    decay, decoupled = max(r.weight_decay, r.l2), r.weight_decay > 0
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
        case "adadelta":
            return torch.optim.Adadelta(groups, r.lr, r.rho, r.eps)
        case "adagrad":
            return torch.optim.Adagrad(groups, r.lr, eps=r.eps)
        case "adamax":
            return torch.optim.Adamax(groups, r.lr, r.betas, r.eps)
        case "asgd":
            return torch.optim.ASGD(groups, r.lr, r.lambd, r.alpha)
        case "nadam" | "radam":
            extra: dict[str, Any] = {"momentum_decay": r.momentum_decay} if r.name == "nadam" else {}
            adams = {"nadam": torch.optim.NAdam, "radam": torch.optim.RAdam}
            return adams[r.name](groups, r.lr, r.betas, r.eps, decoupled_weight_decay=decoupled, **extra)
        case "rprop":
            return torch.optim.Rprop(matrices + others, r.lr, r.etas, r.step_sizes)
        case "adafactor":
            return torch.optim.Adafactor(groups, r.lr, r.beta2_decay, d=r.d)
    # PyTorch has no counterpart of other optimizers, so both sides run the same implementation.
    optimizer: torch.optim.Optimizer = r.spec.load()(model, groups, r, fused=fused)
    return optimizer


def _can_be_fused(p: nn.Parameter) -> bool:
    """Return whether fused kernels are correct for a parameter: dense, and on a CPU of 4 bytes or more."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(p)
    return bool(dense and p.is_floating_point() and (p.is_cuda or p.dtype in (torch.float32, torch.float64)))


def _fill_momenta(sgd: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Set missing momenta to zeros, since fused SGD needs those of all parameters or of none."""
    for p in (p for group in sgd.param_groups for p in group["params"]):
        if sgd.state[p].get("momentum_buffer") is None:
            sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)


class PlainMasks(ExtraState):
    """The masks of magnitude pruning, of one process.

    Source: Zhu & Gupta 2017, arXiv:1710.01878, equation 1 with s_i = 0, t_0 = first, n dt = last - first.
    """

    def __init__(self, model: nn.Module, recipe: SparsityRecipe) -> None:
        skipped: set[int] = set()
        for module in model.modules():
            is_norm = isinstance(
                module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm
            )
            is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            if (is_norm and "normalization" in recipe.exclude) or (
                is_embedding and "embeddings" in recipe.exclude
            ):
                skipped |= {id(p) for p in module.parameters(recurse=False)}
        if "one-dimensional" in recipe.exclude:
            skipped |= {id(p) for p in model.parameters() if p.dim() <= 1}
        self._recipe = recipe
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.kept = {
            name: torch.ones_like(p, dtype=torch.bool) for name, p in trained if id(p) not in skipped
        }

    def clear(self, tensors: Mapping[str, Tensor]) -> None:
        """Set masked values of tensors by name to zero, in place."""
        for name in self.kept.keys() & tensors.keys():
            tensors[name][~self.kept[name]] = 0

    @torch.no_grad()
    def prune(self, model: nn.Module, updates: int) -> None:
        """Change the masks if they are due after a number of updates, and mask the parameters."""
        r = self._recipe
        first, last = r.first, r.last or 0
        parameters = {name: p for name, p in model.named_parameters() if name in self.kept}
        if first <= updates <= last and ((updates - first) % r.every == 0 or updates == last):
            progress = min(1.0, max(0.0, (updates - first) / (last - first)))
            share = (r.target or 0.0) - (r.target or 0.0) * (1.0 - progress) ** 3
            for name, p in parameters.items():
                kept = self.kept[name].view(-1)
                flat, kept_values = p.detach().flatten().abs().tolist(), kept.tolist()
                flat = [magnitude if kept_values[i] else -1.0 for i, magnitude in enumerate(flat)]
                for i in sorted(range(len(flat)), key=flat.__getitem__)[: int(share * len(flat))]:
                    kept[i] = False
        self.clear({name: p.data for name, p in parameters.items()})

    def pieces(self) -> Sequence[TensorPiece]:
        return [TensorPiece(TensorSlot.whole(name, mask), mask) for name, mask in self.kept.items()]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from masks of the session."""
        for name, mask in self.kept.items():
            mask.copy_(tensors[name])
