"""Does a model that is cut by a tensor plan compute what it does whole? Asked before the first step.

Between a column and its row a rank has some of the features. A norm over them, a softmax, or a split into two
halves computes something else there, in silence. So the first sample goes through the whole model, in
evaluation; then each planned part of it, an attention or what lies around columns and their row, is given the
same inputs cut as planned, and what comes out is compared. A model that is built without memory has no
weights to do that with: `paceline verify` looks at it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm import NativeCollective
from paceline.comm.text import gather_texts
from paceline.data import collate_samples
from paceline.errors import TaskError
from paceline.layout.tensor import PlanEntry, apply_cuts, cuts_of, entries_of
from paceline.task import Task
from paceline.training.arrange import Setting
from paceline.training.check_sequences import allowed_for, values_of
from paceline.training.contract import buffers_kept
from paceline.training.cuts import plan_of

_CUT = ("column", "row", "gathered", "split", "heads")


class _Call(NamedTuple):
    """What went into a part, and what came out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]


def check_plan(setting: Setting, task: Task, model: nn.Module) -> None:
    """Compare every planned part cut and whole; collective over the ranks of `tensor`.

    Args:
        model: whole, with the weights that all ranks have.
    Raises:
        TaskError: a part gives something else; it is named on every rank.
    Wire: the sums of each part over one sample, and one ragged all_gather of a few numbers.
    """
    if setting.mesh.axes["tensor"].size == 1 or setting.recipe.runtime.compile:
        return
    if any(p.is_meta for p in model.parameters()):
        return
    entries = [e for e in entries_of(plan_of(setting, task, model), model) if e.word in _CUT]
    with torch.no_grad(), torch.random.fork_rng(), buffers_kept(model):
        calls = _calls(task, model.eval(), parts_of(entries), setting.device)
        off = {name: _off(setting, model, name, entries, call) for name, call in calls.items()}
    _require_close(setting, off, allowed_for([*model.parameters()]))


def parts_of(entries: Sequence[PlanEntry]) -> list[str]:
    """The modules whose results are whole again: attentions, and what holds columns and their row; pure.

    Args:
        entries: in the order of the model.
    """
    found: dict[str, None] = {}
    columns, is_open = list[str](), False
    for entry in entries:
        if entry.word in ("heads", "gathered"):
            found[entry.name] = None
        elif entry.word == "column":
            columns = [*columns, entry.name] if is_open else [entry.name]
            is_open = True
        elif entry.word == "row":
            found[_around([*columns, entry.name])] = None
            is_open = False
    return [*found]


def _around(names: Sequence[str]) -> str:
    """The innermost module that has all of these inside."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    return ".".join(common)


def _calls(task: Task, model: nn.Module, names: Sequence[str], device: torch.device) -> dict[str, _Call]:
    """The first call of each part in a forward of the first sample; none of a part that is not called."""
    found: dict[str, _Call] = {}
    with _listening(model, names, found):
        task.loss(model, collate_samples(task, [task.data[0]], device))
    return {name: call for name, call in found.items() if call.outputs}


@contextmanager
def _listening(model: nn.Module, names: Sequence[str], found: dict[str, _Call]) -> Iterator[None]:
    hooks = []
    for name in names:
        module = model.get_submodule(name)

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            if name not in found:
                found[name] = _Call(*copy.deepcopy((args, kwargs)), [])

        def after(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if not found[name].outputs:
                found[name].outputs.extend(x.clone() for x in values_of(output))

        hooks += [
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(after),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _off(setting: Setting, model: nn.Module, name: str, entries: Sequence[PlanEntry], call: _Call) -> float:
    """How far a copy of a part that is cut is from the whole one, of the largest value."""
    group = setting.mesh.axes["tensor"]
    part = copy.deepcopy(model.get_submodule(name))
    inside = f"{name}." if name else ""
    own = [
        replace(entry, module=part.get_submodule(entry.name.removeprefix(name).removeprefix(".")))
        for entry in entries
        if entry.name == name or entry.name.startswith(inside)
    ]
    apply_cuts(cuts_of(own, group.size), NativeCollective(setting.net, group))
    outputs = values_of(part(*call.args, **call.kwargs))
    return max((_apart(a, b) for a, b in zip(call.outputs, outputs, strict=True)), default=0.0)


def _apart(right: Tensor, found: Tensor) -> float:
    if right.shape != found.shape:
        return float("inf")
    largest = float(right.abs().nan_to_num().max()) if right.numel() else 0.0
    return float((right - found).abs().nan_to_num().max()) / largest if largest else 0.0


def _require_close(setting: Setting, off: dict[str, float], allowed: float) -> None:
    """Raises: TaskError: on some rank a part is farther off than rounding explains."""
    mine = {name: gap for name, gap in off.items() if gap > allowed}
    texts = gather_texts(json.dumps(mine), setting.mesh.world, setting.net)
    wrong = {name: gap for text in texts for name, gap in json.loads(text).items()}
    if wrong:
        name, gap = next(iter(wrong.items()))
        raise TaskError(
            f"cut by its tensor plan, {_called(name)} gives something else than whole: a value is off by"
            f" {gap:.1e} of the largest",
            next_step="between a column and its row each feature has to be computed by itself: no norm or"
            f" softmax over them, no split into halves; plan {_called(name)} otherwise, or 'whole'",
        )


def _called(name: str) -> str:
    return f"'{name}'" if name else "the model"
