"""Checks of which optimizers a run supports, and the change of their parameters to those of a rank.

An optimizer must update from one gradient without a closure. If ranks update parts of tensors it must be
elementwise, and if they update some of the tensors it must treat each tensor by itself; unknown optimizers
are tried on tensors of the shapes, parts and groups that they have.

Invariant: an optimizer that would give another result under a strategy is refused before the first step.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import StrategyError, TaskError
from paceline.optim.slot_norms import SlotOptimizer
from paceline.optim.user_optimizer import member_optimizers
from paceline.state.slot import ModelShard


def require_one_gradient(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer if its step needs only gradients.

    Raises:
        TaskError: it recomputes the loss within a step (LBFGS), which would need every rank and shard
            each time; it takes only sparse gradients (SparseAdam); or its fused kernel is wrong for its
            parameters.
    """
    for member in member_optimizers(optimizer):
        if member is not optimizer:
            require_one_gradient(member)
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"{name} recomputes the loss within a step, but a step here is one update from one gradient",
            next_step="use an optimizer whose step() takes no closure, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TaskError(
            f"{name} takes only sparse gradients, but sums over shards and ranks are dense",
            next_step="use torch.optim.Adam, and nn.Embedding(sparse=False)",
        )
    return _require_right_kernels(optimizer)


def _require_right_kernels(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer if its fused kernel is correct for the types of its parameters.

    Raises:
        TaskError: PyTorch's fused SGD on CPUs, over bfloat16 or float16: with momentum it ends 0.6
            away after six steps, where 0.02 is rounding (PyTorch 2.13;
            tests/unit/optim/test_compatibility.py).
    """
    half = (torch.bfloat16, torch.float16)
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        if group["fused"] and any(p.dtype in half and p.device.type == "cpu" for p in group["params"]):
            raise TaskError(
                f"{type(optimizer).__name__}(fused=True) of PyTorch is inaccurate for bfloat16 and float16"
                " parameters on CPUs",
                next_step="leave out fused, or keep the parameters in float32",
            )
    return optimizer


def require_whole_passes(session: Any, name: str, *, allows_shards: bool) -> None:
    """Refuse a strategy in which a rank does not run whole layers on whole samples of the global step.

    Args:
        session: of any rank; it has been built.
        name: of the optimizer, for the message.
        allows_shards: ranks may share the state of a replica by ZeRO.
    Raises:
        StrategyError: with the reason.
    """
    strategy, axes = session.recipe.strategy, session.mesh.axes
    reasons = {
        "tensor: a rank has parts of the layers": axes["tensor"].size > 1,
        "pipeline: a rank has some of the layers": axes["pipeline"].size > 1,
        "context: a rank runs some positions of each sequence": axes["context"].size > 1,
        "shard: a rank updates parts of the parameters": axes["shard"].size > 1 and not allows_shards,
        "servers: they update what workers run": strategy.servers > 0,
        "lanes: threads run micro-batches side by side": strategy.lanes > 1,
        "sync: replicas do not update together in every step": len(strategy.sync_words) > 1
        or bool(strategy.sync_choices)
        or not strategy.sync_spec.exact,
        "runtime.compile: compiled layers call no hooks": session.recipe.runtime.compile,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        places = "replicas=N, also with shard=M" if allows_shards else "replicas=N"
        raise StrategyError(
            f"{name} needs whole layers and whole samples on a rank, which '{strategy}' does not give it:"
            f" {reason}",
            next_step=f"use {places}, or choose an optimizer that needs only gradients",
        )
    if session.recipe.reproducible:
        raise StrategyError(
            f"reproducible = true, but the sums of {name} over ranks have no fixed order",
            next_step="leave out reproducible, or choose an optimizer that needs only gradients",
        )


_KNOWN = (
    "SGD",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
)
_TOLERANCE = 1e-3  # of the largest update
_MAX_ULPS = 8
_STEPS = 3
_START_SCALE = 0.02  # small, so that a low rate shows beside the rounding of the values
_TRIAL_RATE = 1e-2
_LEAST_GROWTH = 0.25  # of the first slice of a dimension, relative to the last
_MAX_TRIAL_VALUES = 1 << 20  # of one tensor


def rebind_parameters(optimizer: torch.optim.Optimizer, sharded_model: ModelShard) -> None:
    """Make an optimizer of the whole model, which has no state yet, update this rank's parts only."""
    updated_by_name: Mapping[str, nn.Parameter] = {slot.name: p for slot, p in sharded_model.updates.items()}
    part_of = {p: updated_by_name.get(slot.name) for slot, p in sharded_model.computes.items()}
    for group in optimizer.param_groups:
        params = [None if p.is_meta else part_of.get(p, p) for p in group["params"]]
        if "param_names" in group:
            names = zip(group["param_names"], params, strict=True)
            group["param_names"] = [name for name, p in names if p is not None]
        group["params"] = [p for p in params if p is not None]
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    # Some optimizers create state in their constructor.
    for p in [p for p in optimizer.state if p not in updated]:
        del optimizer.state[p]


def require_layout_support(optimizer: torch.optim.Optimizer, sharded_model: ModelShard) -> None:
    """Refuse an optimizer that needs more than the parts that a rank updates.

    Raises:
        StrategyError: as from `require_elementwise` or `require_tensorwise`.
    """
    require = require_elementwise if sharded_model.updates_partially else require_tensorwise
    if sharded_model.updates_partially or len(sharded_model.updates) < len(sharded_model.slots):
        _require_no_hooks(optimizer)
        for member in member_optimizers(optimizer):
            if isinstance(member, SlotOptimizer):
                _require_one_server(member, sharded_model)
            else:
                require(member, sharded_model)


def _require_one_server(optimizer: SlotOptimizer, sharded_model: ModelShard) -> None:
    if sharded_model.is_on_servers:
        raise StrategyError(
            f"{type(optimizer).__name__} needs norms or sums of whole tensors, and each of several servers"
            " updates its part at a time of its own",
            next_step="set servers=1, or choose an elementwise optimizer (SGD, Adam, ...)",
        )


def require_elementwise(optimizer: torch.optim.Optimizer, sharded_model: ModelShard | None = None) -> None:
    """Refuse an optimizer that cannot update parts of tensors.

    A class can declare `elementwise = True` or `False`; PyTorch's optimizers are known; any other is tried on
    tensors of the shapes and groups that it has, whole and in the parts of this rank.

    Args:
        sharded_model: what this rank updates; None: the first half of every tensor.
    Raises:
        StrategyError: a part that is updated alone gives another result; or the optimizer has step hooks, or
            does not update the parameters in its groups.
    """
    _require_no_hooks(optimizer)
    kind = type(optimizer)
    if getattr(kind, "elementwise", None) is False or not (
        _is_known(kind, _KNOWN) or _matches_in_parts(optimizer, sharded_model)
    ):
        raise StrategyError(
            f"{kind.__name__} needs a whole tensor to update any value of it, but with this strategy a rank"
            " updates parts of tensors",
            next_step="choose an elementwise optimizer (SGD, Adam, ...), or a strategy without shard, tensor",
        )


def require_tensorwise(optimizer: torch.optim.Optimizer, sharded_model: ModelShard | None = None) -> None:
    """Refuse an optimizer that needs several tensors to update one, for a rank that has only some of them.

    Args:
        sharded_model: what this rank updates; None: the first half of every tensor.
    Raises:
        StrategyError: a tensor that is updated alone gives another result; or as from `require_elementwise`.
    """
    _require_no_hooks(optimizer)
    kind = type(optimizer)
    if not (_is_known(kind) or _matches_in_parts(optimizer, sharded_model)):
        raise StrategyError(
            f"{kind.__name__} needs all tensors to update any of them, but with this strategy a rank has only"
            " those of its own stage",
            next_step="choose an optimizer that updates each tensor by itself, or leave out pipeline",
        )


def _require_no_hooks(optimizer: torch.optim.Optimizer) -> None:
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise StrategyError(
            f"{type(optimizer).__name__} has step hooks, but with this strategy they would see only what one"
            " rank updates",
            next_step="leave them out (optimizer.clip_norm clips the whole gradient), or choose a strategy in"
            " which every rank updates all parameters",
        )


def _is_known(kind: type, names: Sequence[str] = ()) -> bool:
    """Return whether a class is one of PyTorch's, all of which update each tensor by itself."""
    return kind.__module__.startswith("torch.optim") and (not names or kind.__name__ in names)


class _TrialTensor(NamedTuple):
    """One tensor on which an optimizer is tried.

    Args:
        group: index of its parameter group.
        part: index of the part that this rank updates; None: nothing of it.
    """

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: tuple[Any, ...] | None


def _trial_tensors(optimizer: torch.optim.Optimizer, shard: ModelShard | None) -> list[_TrialTensor]:
    """Return a tensor for each shape, part and group that the optimizer has.

    Optimizers treat large matrices differently from small ones, rows differently from columns, and groups by
    rules of their own, so nothing else shows what they do here.
    """
    slots = {id(p): slot for slot, p in shard.computes.items()} if shard else {}
    parts = {slot.name: slot for slot in shard.updates} if shard else {}
    tensors: dict[str, _TrialTensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            shape: tuple[int, ...] = tuple(p.shape)
            part: tuple[Any, ...] | None = None
            if shard is None:
                part = (slice(0, (shape[0] + 1) // 2),) if shape else ()
            elif id(p) in slots:
                slot = slots[id(p)]
                shape, updated = slot.shape, parts.get(slot.name)
                part = None if updated is None else updated.index
            dtype = p.dtype if p.is_floating_point() else torch.float32
            tensor = _TrialTensor(number, shape, dtype, part)
            tensors[str(tensor)] = _limit_size(tensor)
    return [*tensors.values()]


def _limit_size(tensor: _TrialTensor) -> _TrialTensor:
    """Return a tensor of at most `_MAX_TRIAL_VALUES` values with the same proportions."""
    numel = math.prod(tensor.shape)
    if numel <= _MAX_TRIAL_VALUES:
        return tensor
    factor = (_MAX_TRIAL_VALUES / numel) ** (1 / len(tensor.shape))
    shape = tuple(max(1, math.ceil(size * factor)) for size in tensor.shape)
    part = tensor.part
    if part is not None:
        part = tuple(
            _scale_index(entry, old, new) for entry, old, new in zip(part, tensor.shape, shape, strict=False)
        )
    return tensor._replace(shape=shape, part=part)


def _scale_index(entry: slice | list[int], old: int, new: int) -> slice:
    """Return the slice of a smaller dimension that corresponds to a part of a larger one."""
    start, stop = (entry.indices(old)[:2]) if isinstance(entry, slice) else (entry[0], entry[-1] + 1)
    first = start * new // old
    return slice(first, max(first + 1, stop * new // old))


def _matches_in_parts(optimizer: torch.optim.Optimizer, shard: ModelShard | None) -> bool:
    """Return whether updates of this rank's parts give the values of whole updates, or the class says so.

    Raises:
        StrategyError: the optimizer cannot be tried, or does not update the parameters in its groups.
    """
    is_declared = getattr(type(optimizer), "elementwise", None) is True
    tensors = _trial_tensors(optimizer, shard)
    if all(tensor.part is None for tensor in tensors):
        return True  # a rank that updates nothing
    result = _run_trial(optimizer, tensors)
    if isinstance(result, Exception):
        if is_declared:
            return True
        raise StrategyError(
            f"{type(optimizer).__name__} cannot be tried on parts of tensors: {result}",
            next_step="say `elementwise = True` in its class if it updates each value by itself",
        ) from result
    updates = [float((after - before).abs().max()) for before, after, _ in result if before.numel()]
    # With a rate of 0 nothing moves, so a trial shows nothing.
    if optimizer.param_groups[0].get("lr") != 0 and not any(updates):
        raise StrategyError(
            f"{type(optimizer).__name__} does not update what is in its groups, but tensors that it knows"
            " otherwise, and under this strategy a rank updates other ones",
            next_step="let step() go through self.param_groups, or choose a strategy in which every rank"
            " updates all parameters",
        )
    return is_declared or all(_is_close(*triple) for triple in result)


def _is_close(before: Tensor, whole: Tensor, part: Tensor) -> bool:
    """Return whether a part is that of the whole update, up to the rounding of kernels for other shapes."""
    if not before.numel():
        return True
    largest_update, largest = float((whole - before).abs().max()), float(before.abs().max())
    # Relative to the update, which is small against the parameters where the rate is low.
    allowed = _TOLERANCE * largest_update + _MAX_ULPS * torch.finfo(before.dtype).eps * largest
    return float((whole - part).abs().max()) <= allowed


_PartUpdate = tuple[Tensor, Tensor, Tensor]
"""A part of a tensor: before the updates, after updates of the whole, and after updates of parts alone."""


def _run_trial(
    optimizer: torch.optim.Optimizer, tensors: Sequence[_TrialTensor]
) -> list[_PartUpdate] | Exception:
    generator = torch.Generator().manual_seed(0)

    def draw(tensor: _TrialTensor, scale: float) -> Tensor:
        values = torch.randn(tensor.shape, generator=generator) * scale
        # Parts of one distribution have nearly the same norm, so values grow along every dimension.
        for dim, size in enumerate(tensor.shape):
            growth = torch.linspace(_LEAST_GROWTH, 1.0, size)
            values *= growth.view([-1 if i == dim else 1 for i in range(len(tensor.shape))])
        return values.to(tensor.dtype)

    starts = [draw(tensor, _START_SCALE) for tensor in tensors]
    grads = [[draw(tensor, 1.0) for tensor in tensors] for _ in range(_STEPS)]
    owned = [i for i, tensor in enumerate(tensors) if tensor.part is not None]
    groups = [tensor.group for tensor in tensors]
    try:
        parts = _run_steps(
            optimizer,
            [starts[i][tensors[i].part] for i in owned],
            [[step[i][tensors[i].part] for i in owned] for step in grads],
            [groups[i] for i in owned],
        )
        whole = _run_steps(optimizer, starts, grads, groups)
    except Exception as error:  # noqa: BLE001  user code may raise anything; the message is reported
        return error
    return [
        (starts[i][tensors[i].part], whole[i][tensors[i].part], part)
        for i, part in zip(owned, parts, strict=True)
    ]


def _run_steps(
    optimizer: torch.optim.Optimizer,
    starts: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    groups: Sequence[int],
) -> list[Tensor]:
    """Return the parameters after steps of a copy of the optimizer, each in the group of its number."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    twin = _copy_without_state(optimizer)
    twin.param_groups = [
        _group_options(group)
        | {"params": [p for p, k in zip(parameters, groups, strict=True) if k == number]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    for step in grads:
        for p, grad in zip(parameters, step, strict=True):
            p.grad = grad.clone()
        twin.step()
    return [p.detach() for p in parameters]


def _group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options of a group, with a rate at which something moves."""
    options = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
    # A warm-up can begin with a rate of 0.
    return options | {"lr": _TRIAL_RATE} if options.get("lr") == 0 else options


def copy_for_parameters(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Any:
    """Return a copy without state over other parameters, with the options of the first group."""
    twin = _copy_without_state(optimizer)
    options = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
    twin.param_groups = [copy.deepcopy(options) | {"params": [*parameters]}]
    return twin


def _copy_without_state(optimizer: torch.optim.Optimizer) -> Any:
    """Return a copy without state and with copied attributes, in which parameters have no gradient."""
    # Without `__init__`, because the arguments of a foreign class are unknown.
    twin: Any = object.__new__(type(optimizer))
    known: dict[int, Any] = {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        # The memo of `deepcopy`: parameters are shared and not copied.
        known[id(p)], p.grad = p, None
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups"):
            twin.__dict__[name] = _copy_value(value, known)
    twin.state = type(optimizer.state)(dict)
    return twin


def _copy_value(value: Any, known: dict[int, Any]) -> Any:
    """Return a deep copy, except for the model's parameters; what cannot be copied is shared."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    try:
        return copy.deepcopy(value, dict(known))
    except (TypeError, RuntimeError):
        return value
