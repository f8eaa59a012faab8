"""Checks that a partitioned model computes what the whole model computes, before the first step.

Sequences: a model may depend on other positions outside of attention (a convolution, a mean, its own
position index that starts at 0 on every rank), and a loss may compare neighbours; on parts of a sequence
both would silently train something else. So the ranks run the first sample whole and in parts, under their
layout, in evaluation and in the parameters' dtype; the outputs of the model are compared value by value,
and the sums of the loss as well.

Tensor plans: between a column and its row a rank has some of the features. A norm over them, a softmax, or
a split into halves computes something else there, silently. So the first sample runs through the whole
model; then each planned part (an attention, or the module around columns and their row) gets the same
inputs, partitioned, and its outputs are compared. A model without memory has no weights for this check;
`paceline verify` covers it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.comm.routes.native import NativeCollective
from paceline.data.loader import collate_samples
from paceline.errors import TaskError
from paceline.job.mesh import Mesh, RankGroup
from paceline.models.positions import positions
from paceline.parallel.context.context_attention import TrialBatch
from paceline.parallel.model_runner import EvaluationCall, ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.parallel.tensor.tensor_plan import (
    TensorPlanEntry,
    apply_tensor_cuts,
    plan_tensor_cuts,
    resolve_tensor_plan,
    tensor_plan_for,
)
from paceline.session.task_contract import probe_batch, restore_buffers
from paceline.state.slot import TensorSlot
from paceline.task import Loss, Task

_MIN_TOLERANCE = 1e-4
_MAX_ULPS = 32  # of the coarsest dtype, if that is more


class _ProbeResult(NamedTuple):
    """Outputs of the model on one rank, or the relative error of each; and the sums of its losses."""

    outputs: list[Any]
    sums: list[Tensor]


def check_sequences(task: Task, runner: ModelRunner, net: Net, mesh: Mesh) -> None:
    """Compare the first sample whole and split into sequence parts; collective.

    Raises:
        TaskError: they differ, or the model has buffers that a forward changes; the same error on every rank.
    Wire: the traffic of the layout for training on one sample and for two forwards, and a few numbers.
    """
    batch = collate_samples(task, [task.data[0]], runner.sharded_model.device)
    # The run must draw the same random numbers and start from the same buffers as without the check.
    with torch.random.fork_rng(), restore_buffers(runner.sharded_model.model):
        _raise_on_all_ranks(_compare_buffers(runner, batch), net, mesh.world)
        whole = _probe(task, runner, TrialBatch(batch, is_whole=True), [])
        parts = _probe(task, runner, TrialBatch(batch, is_whole=False), whole.outputs)
    _raise_on_all_ranks(_compare_values(whole, parts, net, mesh.axes["context"]), net, mesh.world)


def _raise_on_all_ranks(mistake: tuple[str, str] | None, net: Net, world: RankGroup) -> None:
    """Raise a TaskError with the mistake of the first rank that has found one, on every rank; collective."""
    texts = all_gather_texts(json.dumps(mistake) if mistake else "", world, net)
    first = next((text for text in texts if text), "")
    if first:
        what, next_step = json.loads(first)
        raise TaskError(what, next_step=next_step)


def rounding_tolerance(tensors: Sequence[Tensor]) -> float:
    """Return the error, relative to the largest value, that rounding explains in the coarsest dtype."""
    dtypes = {x.dtype for x in tensors if x.is_floating_point()}
    return max([_MIN_TOLERANCE, *(_MAX_ULPS * torch.finfo(dtype).eps for dtype in dtypes)])


def _probe(task: Task, runner: ModelRunner, batch: TrialBatch, whole: Sequence[Tensor]) -> _ProbeResult:
    """Run a forward; return the outputs of the model, or their errors if the whole outputs are known."""
    result = _ProbeResult([], [])

    def record_output(_: nn.Module, inputs: Any, output: Any) -> None:
        values = float_tensors(output)
        result.outputs.extend(map(_position_error, whole, values) if whole else values)

    runner.forward_only([probe_batch(batch)], partial(_probe_loss, task, record_output, result.sums))
    return result


def _probe_loss(task: Task, record_output: Any, sums: list[Tensor], model: nn.Module, batch: Any) -> None:
    hook = model.register_forward_hook(record_output)
    try:
        loss = task.loss(model, batch)
    finally:
        hook.remove()
    sums.append(_sums(loss))


def float_tensors(output: Any) -> list[Tensor]:
    """Return the floating-point tensors among the outputs of a module."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _sums(loss: Loss) -> Tensor:
    numbers = [loss.total, loss.count, *(loss.metrics[name] for name in sorted(loss.metrics))]
    device = loss.total.device
    return torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device).reshape(()) for x in numbers])


def _position_error(whole: Tensor, part: Tensor) -> float:
    """Return the error of a part at its positions, relative to the largest value; 0 without positions."""
    dims = [d for d in range(min(whole.dim(), part.dim())) if whole.shape[d] != part.shape[d]]
    if whole.dim() != part.dim() or len(dims) != 1:
        return 0.0
    indices = positions(part, dims[0])
    assert isinstance(indices, Tensor)
    expected, largest = whole.index_select(dims[0], indices), float(whole.abs().max())
    return float((expected - part).abs().max()) / largest if largest else 0.0


def _compare_values(
    whole: _ProbeResult, parts: _ProbeResult, net: Net, group: RankGroup
) -> tuple[str, str] | None:
    """Return a mistake and its next step; None if there is none or another stage has the outputs."""
    if not whole.sums:
        return None
    device, allowed = whole.sums[0].device, rounding_tolerance(whole.outputs)
    farthest = torch.tensor([max(parts.outputs, default=0.0)], dtype=torch.float64, device=device)
    farthest = net.all_reduce(farthest, group, "max").wait()
    together = net.all_reduce(parts.sums[0], group).wait()
    if float(farthest) > allowed:
        return (
            "the model returns other values on parts of a sequence than on the whole sequence: one is off by"
            f" {float(farthest):.1e} of the largest value",
            "take positions from paceline.models.positions, or split position ids in Task.sequence;"
            " only scaled_dot_product_attention may depend on other positions",
        )
    for name, a, b in zip(("total", "count"), whole.sums[0].tolist(), together.tolist(), strict=False):
        if abs(a - b) > allowed * abs(a):
            return (
                f"the {name} of the loss of the first sample is {a:.9g}, but that of its parts adds up to"
                f" {b:.9g}",
                "the loss must be a sum over positions; pair the values that it compares in Task.sequence",
            )
    return None


class _NullGradientSink:
    """Gradient sink that ignores gradients."""

    by_micro_batch = False

    def micro_batch(self, shards: range, is_last: bool) -> None:
        pass

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        pass


def _compare_buffers(runner: ModelRunner, batch: Any) -> tuple[str, str] | None:
    """Return a mistake if a forward in training changes buffers, as running statistics do; collective."""
    if not runner.buffers.names:
        return None
    runner.run([probe_batch(batch)], 1, _NullGradientSink(), 1.0)
    changed = runner.buffers.changed
    if not changed:
        return None
    return (
        f"a forward changes the buffer '{changed[0]}', but with context a rank sees only some positions",
        "use a norm without running statistics, or a strategy without context",
    )


_PARTITIONING_WORDS = ("column", "row", "gathered", "split", "heads")


class _ModuleCall(NamedTuple):
    """Inputs and outputs of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]


def check_tensor_plan(context: SessionContext, task: Task, model: nn.Module) -> None:
    """Compare every planned part, partitioned and whole; collective over the ranks of `tensor`.

    Args:
        model: whole, with equal weights on all ranks.
    Raises:
        TaskError: a part computes something else; every rank names it.
    Wire: the all_reduces of each part over one sample, and one ragged all_gather of a few numbers.
    """
    if any(p.is_meta for p in model.parameters()):
        return
    entries = [
        e
        for e in resolve_tensor_plan(tensor_plan_for(context, task, model), model)
        if e.word in _PARTITIONING_WORDS
    ]
    with torch.no_grad(), torch.random.fork_rng(), restore_buffers(model):
        # In evaluation, because dropout draws other masks for a part than for the whole.
        calls = _record_calls(task, model.eval(), modules_to_compare(entries), context.device)
        errors = {name: _split_error(context, model, name, entries, call) for name, call in calls.items()}
    _require_close(context, errors, rounding_tolerance([*model.parameters()]))


def modules_to_compare(entries: Sequence[TensorPlanEntry]) -> list[str]:
    """Return the modules with whole outputs: attentions, and modules around columns and their row; pure.

    Args:
        entries: in the order of the model.
    """
    names: dict[str, None] = {}
    columns, is_open = list[str](), False
    for entry in entries:
        if entry.word in ("heads", "gathered"):
            names[entry.name] = None
        elif entry.word == "column":
            columns = [*columns, entry.name] if is_open else [entry.name]
            is_open = True
        elif entry.word == "row":
            names[_common_parent([*columns, entry.name])] = None
            is_open = False
    return [*names]


def _common_parent(names: Sequence[str]) -> str:
    """Return the name of the innermost module that contains all of these."""
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
    """Return the first call of each named module in a forward of the first sample, if it is called."""
    recorded: dict[str, _ModuleCall] = {}
    with _recording_hooks(model, names, recorded):
        # A loss with a gradient penalty needs a graph here, too.
        EvaluationCall()(task.loss, model, collate_samples(task, [task.data[0]], device))
    return {name: call for name, call in recorded.items() if call.outputs}


@contextmanager
def _recording_hooks(model: nn.Module, names: Sequence[str], calls: dict[str, _ModuleCall]) -> Iterator[None]:
    hooks = []
    for name in names:
        module = model.get_submodule(name)

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            if name not in calls:  # copied, since the module may change its inputs in place
                calls[name] = _ModuleCall(*copy.deepcopy((args, kwargs)), [])

        def after(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            if not calls[name].outputs:
                calls[name].outputs.extend(x.clone() for x in float_tensors(output))

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
    """Return the error of a partitioned copy of a module, relative to the largest value; collective."""
    group = context.mesh.axes["tensor"]
    part = copy.deepcopy(model.get_submodule(name))
    prefix = f"{name}." if name else ""
    part_entries = [
        replace(entry, module=part.get_submodule(entry.name.removeprefix(name).removeprefix(".")))
        for entry in entries
        if entry.name == name or entry.name.startswith(prefix)
    ]
    apply_tensor_cuts(plan_tensor_cuts(part_entries, group.size), NativeCollective(context.net, group))
    try:
        outputs = float_tensors(part(*call.args, **call.kwargs))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise TaskError(
            f"partitioned by its tensor plan, {_spell_module(name)} fails: {reason}",
            next_step=_next_step(name),
        ) from error
    return max((_max_relative_error(a, b) for a, b in zip(call.outputs, outputs, strict=True)), default=0.0)


def _max_relative_error(expected: Tensor, actual: Tensor) -> float:
    if expected.shape != actual.shape:
        return float("inf")
    largest = float(expected.abs().nan_to_num().max()) if expected.numel() else 0.0
    return float((expected - actual).abs().nan_to_num().max()) / largest if largest else 0.0


def _require_close(context: SessionContext, errors: dict[str, float], allowed: float) -> None:
    """Raise a TaskError if on some rank a part has a larger error than rounding explains; collective."""
    local = {name: error for name, error in errors.items() if error > allowed}
    texts = all_gather_texts(json.dumps(local), context.mesh.world, context.net)
    wrong = {name: error for text in texts for name, error in json.loads(text).items()}
    if wrong:
        name, error = next(iter(wrong.items()))
        raise TaskError(
            f"partitioned by its tensor plan, {_spell_module(name)} computes other values than whole: one is"
            f" off by {error:.1e} of the largest value",
            next_step=_next_step(name),
        )


def _next_step(name: str) -> str:
    return (
        "between a column and its row each feature must be computed by itself: no norm or softmax over them,"
        " no split into halves, no parameter with a value for each feature; change the plan of"
        f" {_spell_module(name)}, or set it to 'whole'"
    )


def _spell_module(name: str) -> str:
    return f"'{name}'" if name else "the model"
