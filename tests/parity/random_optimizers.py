"""Optimizers of random programs: those that a recipe names, and those of a task, with rules by group.

`build` makes an optimizer of a whole model from PyTorch alone, for the plain loop; `OF_TASK` says what a task
gives Paceline. Denominators have a large epsilon: a gradient that is zero up to rounding stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.optim import ByGroup

_EPS = 1e-2
BY_NAME: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"name": "sgd"},
    "sgd-momentum": {"name": "sgd", "momentum": 0.9, "l2": 0.01},
    "nesterov": {"name": "sgd", "momentum": 0.8, "nesterov": True},
    "adamw": {"name": "adamw", "eps": _EPS, "weight_decay": 0.1},
    "adam": {"name": "adam", "eps": _EPS, "l2": 0.05, "decay_on": "all"},
    "rmsprop": {"name": "rmsprop", "eps": _EPS, "momentum": 0.5},
}
"""What the recipe says, by word."""


def build_named(word: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Build the optimizer that a recipe names as PyTorch's documentation defines it."""
    options = dict(BY_NAME[word])
    name, decay = options.pop("name"), options.pop("weight_decay", options.pop("l2", 0.0))
    decays_all = options.pop("decay_on", "matrices") == "all"
    matrices, others = _matrices(model)
    groups = [
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": decay if decays_all else 0.0},
    ]
    kinds = {
        "sgd": torch.optim.SGD,
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "rmsprop": torch.optim.RMSprop,
    }
    return kinds[name]([group for group in groups if group["params"]], lr=lr, **options)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters of two dimensions or more, and the others."""
    trained = _trained(model)
    return [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]


class Ruled(torch.optim.Optimizer):
    """Optimizer whose groups have rules of their own, as in Muon with an auxiliary Adam.

    Args:
        groups: each with "rule": a word of `_RULES`.
    """

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "rule": "soft-sign", "decay": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 - group["decay"])
                    p.add_(_RULES[group["rule"]](mean), alpha=-group["lr"])


def _soft_sign(mean: Tensor) -> Tensor:
    return mean / (mean.abs() + _EPS)


def _by_row(mean: Tensor) -> Tensor:
    return mean / (mean.norm(dim=-1, keepdim=True) + _EPS) if mean.dim() else mean


def _centralised(mean: Tensor) -> Tensor:
    return mean - mean.mean(-1, keepdim=True) if mean.dim() > 1 else mean


def _factored_if_large(mean: Tensor) -> Tensor:
    """Divide by means of rows and columns, as Adafactor, above 64 values, and else by each value's own."""
    squares = mean.square()
    if mean.dim() < 2 or mean.numel() <= 64:
        return mean / (squares.sqrt() + _EPS)
    rows, columns = squares.mean(-1, keepdim=True), squares.mean(-2, keepdim=True)
    return mean / ((rows * columns / (rows.mean(-2, keepdim=True) + _EPS**2)).sqrt() + _EPS)


_RULES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "soft-sign": _soft_sign,
    "by-row": _by_row,
    "centralised": _centralised,
    "factored": _factored_if_large,
}


def _groups(model: nn.Module, of_matrices: dict[str, Any], of_others: dict[str, Any]) -> list[dict[str, Any]]:
    matrices, others = _matrices(model)
    groups = [{"params": others, **of_others}, {"params": matrices, **of_matrices}]
    return [group for group in groups if group["params"]]


def _adamw_groups(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    of_matrices = {"lr": 0.5 * lr, "betas": (0.8, 0.9), "weight_decay": 0.1}
    return torch.optim.AdamW(_groups(model, of_matrices, {"weight_decay": 0.0}), lr=lr, eps=_EPS)


def _members(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    matrices, others = _matrices(model)
    members: list[torch.optim.Optimizer] = []
    if matrices:
        members.append(torch.optim.AdamW(matrices, lr=lr, eps=_EPS))
    if others:
        members.append(torch.optim.SGD(others, lr=2 * lr, momentum=0.9))
    return members


def _ruled(of_matrices: str) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
    def build(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return Ruled(_groups(model, {"rule": of_matrices}, {"rule": "soft-sign", "decay": 0.7}), lr)

    return build


OF_TASK: Mapping[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "adamw-groups": _adamw_groups,
    "by-group": lambda model, lr: ByGroup(*_members(model, lr)),
    "soft-sign": _ruled("soft-sign"),
    "by-row": _ruled("by-row"),
    "centralised": _ruled("centralised"),
    "factored": _ruled("factored"),
}
"""What the task brings, by word."""
PARTITIONED_APART = ("by-row", "centralised", "factored")
"""Optimizers that need a whole tensor to update any value of it."""


def build_plain(word: str, model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the plain loop, all of which step once in a step."""
    if word == "by-group":
        return _members(model, lr)
    return [build_named(word, model, lr) if word in BY_NAME else OF_TASK[word](model, lr)]
