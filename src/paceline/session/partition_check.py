"""Does a model on parts of a sequence compute what it does on the whole? Asked before the first step.

A model may look at positions elsewhere than in attention (a convolution, a mean, an index of its own that
begins at 0 on every rank), and a loss may compare neighbours: all of that would train something else in
silence. So the ranks run the first sample whole and in parts, as they are laid out (stages pass it on), in
evaluation and in the parameters' type. What the model returns is compared value by value, and what the loss
adds up to.

Does a model that is cut by a tensor plan compute what it does whole? Asked before the first step.

Between a column and its row a rank has some of the features. A norm over them, a softmax, or a split into two
halves computes something else there, in silence. So the first sample goes through the whole model, in
evaluation; then each planned part of it, an attention or what lies around columns and their row, is given the
same inputs cut as planned, and what comes out is compared. A model that is built without memory has no
weights to do that with: `paceline verify` looks at it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.comm.routes.native import NativeCollective
from paceline.data.loader import collate_samples
from paceline.data.work import LoadedBatch, MicroBatch
from paceline.errors import TaskError
from paceline.job.mesh import Mesh, RankGroup
from paceline.models.positions import positions
from paceline.parallel.context.context_attention import TrialBatch
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.parallel.tensor.tensor_plan import (
    TensorPlanEntry,
    apply_tensor_cuts,
    plan_tensor_cuts,
    resolve_tensor_plan,
    tensor_plan_for,
)
from paceline.session.task_contract import restore_buffers
from paceline.state.slot import TensorSlot
from paceline.task import Loss, Task

_CLOSE = 1e-4
_STEPS = 32  # of the coarsest type, where that is more


class _ProbeResult(NamedTuple):
    """What a rank has seen of the model's outputs: the tensors, or how far each is off; and of the losses."""

    outputs: list[Any]
    sums: list[Tensor]


def check_sequences(task: Task, runner: ModelRunner, net: Net, mesh: Mesh) -> None:
    """Compare the first sample whole and in parts; collective.

    Raises:
        TaskError: they differ, or the model has buffers that a forward changes; the same on every rank.
    Wire: what the layout sends for a training of one sample and two forwards, and a few numbers.
    """
    batch = collate_samples(task, [task.data[0]], runner.sharded_model.device)
    with torch.random.fork_rng(), restore_buffers(runner.sharded_model.model):
        _raise_on_all_ranks(_compare_buffers(runner, batch), net, mesh.world)
        whole = _probe(task, runner, TrialBatch(batch, is_whole=True), [])
        parts = _probe(task, runner, TrialBatch(batch, is_whole=False), whole.outputs)
    _raise_on_all_ranks(_compare_values(whole, parts, net, mesh.axes["context"]), net, mesh.world)


def _raise_on_all_ranks(mistake: tuple[str, str] | None, net: Net, world: RankGroup) -> None:
    """Raises: TaskError: a rank has found a mistake; that of the first, on every rank."""
    texts = all_gather_texts(json.dumps(mistake) if mistake else "", world, net)
    found = next((text for text in texts if text), "")
    if found:
        what, next_step = json.loads(found)
        raise TaskError(what, next_step=next_step)


def rounding_tolerance(tensors: Sequence[Tensor]) -> float:
    """How much of the largest value rounding may take, in their coarsest type."""
    types = {x.dtype for x in tensors if x.is_floating_point()}
    return max([_CLOSE, *(_STEPS * torch.finfo(one).eps for one in types)])


def _probe(task: Task, runner: ModelRunner, batch: TrialBatch, whole: Sequence[Tensor]) -> _ProbeResult:
    """Forward; what the model returns, or how far that is off the whole, where that is known."""
    looked = _ProbeResult([], [])

    def listen(_: nn.Module, inputs: Any, output: Any) -> None:
        values = float_tensors(output)
        looked.outputs.extend(map(_position_error, whole, values) if whole else values)

    runner.forward_only([_loaded(batch)], partial(_probe_loss, task, listen, looked.sums))
    return looked


def _probe_loss(task: Task, listen: Any, sums: list[Tensor], model: nn.Module, batch: Any) -> None:
    hook = model.register_forward_hook(listen)
    try:
        loss = task.loss(model, batch)
    finally:
        hook.remove()
    sums.append(_sums(loss))


def _loaded(batch: Any) -> LoadedBatch:
    return LoadedBatch(MicroBatch(step=0, shard=0, indices=np.zeros(1, dtype=np.int64), key=0), batch)


def float_tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in what a module returned."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _sums(loss: Loss) -> Tensor:
    numbers = [loss.total, loss.count, *(loss.metrics[name] for name in sorted(loss.metrics))]
    device = loss.total.device
    return torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device).reshape(()) for x in numbers])


def _position_error(whole: Tensor, part: Tensor) -> float:
    """How far a part is from the same positions of the whole, of the largest value; 0 without positions."""
    dims = [d for d in range(min(whole.dim(), part.dim())) if whole.shape[d] != part.shape[d]]
    if whole.dim() != part.dim() or len(dims) != 1:
        return 0.0
    there = positions(part, dims[0])
    assert isinstance(there, Tensor)
    same, largest = whole.index_select(dims[0], there), float(whole.abs().max())
    return float((same - part).abs().max()) / largest if largest else 0.0


def _compare_values(
    whole: _ProbeResult, parts: _ProbeResult, net: Net, group: RankGroup
) -> tuple[str, str] | None:
    """What is wrong with what came out, and what to do; None also where another stage has it. Collective."""
    if not whole.sums:
        return None
    device, allowed = whole.sums[0].device, rounding_tolerance(whole.outputs)
    farthest = torch.tensor([max(parts.outputs, default=0.0)], dtype=torch.float64, device=device)
    farthest = net.all_reduce(farthest, group, "max").wait()
    together = net.all_reduce(parts.sums[0], group).wait()
    if float(farthest) > allowed:
        return (
            "on parts of a sequence the model returns something else than on the whole: a value is off by"
            f" {float(farthest):.1e} of the largest",
            "take positions from paceline.models.positions, or cut position ids in Task.sequence;"
            " across positions only scaled_dot_product_attention may look",
        )
    for name, a, b in zip(("total", "count"), whole.sums[0].tolist(), together.tolist(), strict=False):
        if abs(a - b) > allowed * abs(a):
            return (
                f"the {name} of the loss of the first sample is {a:.9g}, and of its parts together {b:.9g}",
                "the loss has to be a sum over positions; pair what it compares in Task.sequence",
            )
    return None


class _NullGradientSink:
    """Takes gradients, and does nothing with them."""

    by_micro_batch = False

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """See `GradientSink`."""

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """See `GradientSink`."""


def _compare_buffers(runner: ModelRunner, batch: Any) -> tuple[str, str] | None:
    """Whether a forward in training changes what the model keeps, statistics over positions; collective."""
    if not runner.buffers.names:
        return None
    runner.run([_loaded(batch)], 1, _NullGradientSink(), 1.0)
    changed = runner.buffers.changed
    if not changed:
        return None
    return (
        f"a forward changes the buffer '{changed[0]}', and under context a rank sees some positions only",
        "use a norm without running statistics, or choose a strategy without context",
    )


_CUT = ("column", "row", "gathered", "split", "heads")


class _ModuleCall(NamedTuple):
    """What went into a part, and what came out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]


def check_tensor_plan(context: SessionContext, task: Task, model: nn.Module) -> None:
    """Compare every planned part cut and whole; collective over the ranks of `tensor`.

    Args:
        model: whole, with the weights that all ranks have.
    Raises:
        TaskError: a part gives something else; it is named on every rank.
    Wire: the sums of each part over one sample, and one ragged all_gather of a few numbers.
    """
    if any(p.is_meta for p in model.parameters()):
        return
    entries = [e for e in resolve_tensor_plan(tensor_plan_for(context, task, model), model) if e.word in _CUT]
    with torch.no_grad(), torch.random.fork_rng(), restore_buffers(model):
        calls = _record_calls(task, model.eval(), modules_to_compare(entries), context.device)
        off = {name: _split_error(context, model, name, entries, call) for name, call in calls.items()}
    _require_close(context, off, rounding_tolerance([*model.parameters()]))


def modules_to_compare(entries: Sequence[TensorPlanEntry]) -> list[str]:
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
            found[_common_parent([*columns, entry.name])] = None
            is_open = False
    return [*found]


def _common_parent(names: Sequence[str]) -> str:
    """The innermost module that has all of these inside."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    return ".".join(common)


def _record_calls(
    task: Task, model: nn.Module, names: Sequence[str], device: torch.device
) -> dict[str, _ModuleCall]:
    """The first call of each part in a forward of the first sample; none of a part that is not called."""
    found: dict[str, _ModuleCall] = {}
    with _recording_hooks(model, names, found):
        task.loss(model, collate_samples(task, [task.data[0]], device))
    return {name: call for name, call in found.items() if call.outputs}


@contextmanager
def _recording_hooks(model: nn.Module, names: Sequence[str], found: dict[str, _ModuleCall]) -> Iterator[None]:
    hooks = []
    for name in names:
        module = model.get_submodule(name)

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            if name not in found:
                found[name] = _ModuleCall(*copy.deepcopy((args, kwargs)), [])

        def after(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if not found[name].outputs:
                found[name].outputs.extend(x.clone() for x in float_tensors(output))

        hooks += [
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(after),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _split_error(
    context: SessionContext,
    model: nn.Module,
    name: str,
    entries: Sequence[TensorPlanEntry],
    call: _ModuleCall,
) -> float:
    """How far a copy of a part that is cut is from the whole one, of the largest value."""
    group = context.mesh.axes["tensor"]
    part = copy.deepcopy(model.get_submodule(name))
    inside = f"{name}." if name else ""
    own = [
        replace(entry, module=part.get_submodule(entry.name.removeprefix(name).removeprefix(".")))
        for entry in entries
        if entry.name == name or entry.name.startswith(inside)
    ]
    apply_tensor_cuts(plan_tensor_cuts(own, group.size), NativeCollective(context.net, group))
    outputs = float_tensors(part(*call.args, **call.kwargs))
    return max((_max_relative_error(a, b) for a, b in zip(call.outputs, outputs, strict=True)), default=0.0)


def _max_relative_error(right: Tensor, found: Tensor) -> float:
    if right.shape != found.shape:
        return float("inf")
    largest = float(right.abs().nan_to_num().max()) if right.numel() else 0.0
    return float((right - found).abs().nan_to_num().max()) / largest if largest else 0.0


def _require_close(context: SessionContext, off: dict[str, float], allowed: float) -> None:
    """Raises: TaskError: on some rank a part is farther off than rounding explains."""
    mine = {name: gap for name, gap in off.items() if gap > allowed}
    texts = all_gather_texts(json.dumps(mine), context.mesh.world, context.net)
    wrong = {name: gap for text in texts for name, gap in json.loads(text).items()}
    if wrong:
        name, gap = next(iter(wrong.items()))
        raise TaskError(
            f"cut by its tensor plan, {_spell_module(name)} gives something else than whole: a value is off by"
            f" {gap:.1e} of the largest",
            next_step="between a column and its row each feature has to be computed by itself: no norm or"
            f" softmax over them, no split into halves; plan {_spell_module(name)} otherwise, or 'whole'",
        )


def _spell_module(name: str) -> str:
    return f"'{name}'" if name else "the model"
