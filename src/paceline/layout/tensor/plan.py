"""Tensor plans: which modules are cut how, by patterns of their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from paceline.comm import Collective
from paceline.errors import StrategyError, TaskError
from paceline.layout.placement import TensorPlan, even_span
from paceline.layout.tensor.linear import make_column, make_row
from paceline.models import KeyedDropout
from paceline.task import Task

_DIMS = {"column": {"weight": 0, "bias": 0}, "row": {"weight": 1}}
_WORDS = ("column", "row", "split")


@dataclass(frozen=True)
class PlanEntry:
    """What becomes of one module.

    Args:
        word: "column" or "row" of a linear layer, or "split": a dropout between the two, on a part of the
            features of the column before it.
    """

    name: str
    module: nn.Module
    word: str


def plan_of(task: Task, model: nn.Module) -> list[PlanEntry]:
    """The modules that the task's tensor plan names, in the order of the model.

    Raises:
        StrategyError: the task has no plan.
        TaskError: a pattern fits nothing, or a module that cannot be cut so.
    """
    if not task.tensor:
        raise StrategyError(
            f"tensor cuts large layers, and nothing says which of {type(model).__name__}'s",
            next_step='pass Task(tensor={"up": "column", "down": "row"}), or leave out tensor',
        )
    found = []
    for pattern, word in task.tensor.items():
        fitting = [(name, m) for name, m in model.named_modules() if fnmatchcase(name, pattern)]
        if word not in _WORDS or not fitting:
            reason = "fits no module" if not fitting else f"is none of {', '.join(_WORDS)}"
            raise TaskError(
                f"the tensor plan's '{pattern}' = '{word}' {reason}",
                next_step="name modules as model.named_modules() does; * stands for any part of a name",
            )
        for name, module in fitting:
            kind = KeyedDropout if word == "split" else nn.Linear
            if not isinstance(module, kind):
                raise TaskError(
                    f"the tensor plan calls '{name}' {word}, and it is a {type(module).__name__}",
                    next_step="column and row are for nn.Linear, split is for KeyedDropout",
                )
            found.append(PlanEntry(name, module, word))
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted(found, key=lambda entry: places[entry.name])


def dims_of(entries: list[PlanEntry], degree: int) -> TensorPlan:
    """The transform of a placement that a plan is."""
    dims: dict[str, int] = {}
    for entry in entries:
        own: Mapping[str, int] = _DIMS.get(entry.word, {})
        dims |= {f"{entry.name}.{key}": dim for key, dim in own.items()}
    return TensorPlan(dims, degree)


def apply_plan(entries: list[PlanEntry], collective: Collective) -> None:
    """Change the modules in place, after their tensors have been cut."""
    group, width = collective.group, 0
    for entry in entries:
        if isinstance(entry.module, nn.Linear):
            make = make_column if entry.word == "column" else make_row
            make(entry.module, collective, entry.name)
            width = entry.module.out_features if entry.word == "column" else 0
        elif isinstance(entry.module, KeyedDropout):
            entry.module.take_part(even_span(width, group.size, group.rank), width)
