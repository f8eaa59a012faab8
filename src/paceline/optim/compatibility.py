"""Checks of which optimizers a run supports, and the change of their parameters to those of a rank.

An optimizer must update from one gradient without a closure. If ranks update parts of tensors it must be
elementwise, and if they update some of the tensors it must treat each tensor by itself; unknown optimizers
are tried on small tensors, whole and in parts.

Invariant: an optimizer that would give another result under a strategy is refused before the first step.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import StrategyError, TaskError
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
            away after six steps, where 0.02 is rounding (PyTorch 2.13; tests/unit/optim/test_compatibility.py).
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
_TOLERANCE = 1e-5
_STEPS = 3
_SHAPES = ((4, 6), (6, 2), (4,))


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
            require(member)


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot update parts of tensors.

    A class can declare `elementwise = True` or `False`; PyTorch's optimizers are known; any other is tried on
    small tensors, whole and in two parts.

    Raises:
        StrategyError: a part that is updated alone gives another result; or the optimizer has step hooks, or
            does not update the parameters in its groups.
    """
    _require_no_hooks(optimizer)
    kind = type(optimizer)
    declared = getattr(kind, "elementwise", None)
    if declared is False or not (_is_known(kind, _KNOWN) or _matches_in_parts(optimizer, _HALVES)):
        raise StrategyError(
            f"{kind.__name__} needs a whole tensor to update any value of it, but with this strategy a rank"
            " updates parts of tensors",
            next_step="choose an elementwise optimizer (SGD, Adam, ...), or a strategy without shard, tensor",
        )


def require_tensorwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that needs several tensors to update one, for a rank that has only some of them.

    Raises:
        StrategyError: a tensor that is updated alone gives another result; or as from `require_elementwise`.
    """
    _require_no_hooks(optimizer)
    kind = type(optimizer)
    if not (_is_known(kind) or _matches_in_parts(optimizer, _ONE_BY_ONE)):
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


TensorParts = list[list[Tensor]]


@dataclass(frozen=True)
class _SplitMethod:
    """A way to split tensors into parts that are updated one after another, and to join them."""

    apart: Callable[[Sequence[Tensor]], TensorParts]
    together: Callable[[TensorParts], list[Tensor]]


_HALVES = _SplitMethod(
    lambda tensors: [[t[:2] for t in tensors], [t[2:] for t in tensors]],
    lambda parts: [torch.cat(pair) for pair in zip(*parts, strict=True)],
)
_ONE_BY_ONE = _SplitMethod(lambda tensors: [[t] for t in tensors], lambda parts: [part[0] for part in parts])


def _matches_in_parts(optimizer: torch.optim.Optimizer, cut: _SplitMethod) -> bool:
    """Return whether updates in parts give the same values, unless the class declares it.

    Raises:
        StrategyError: the optimizer cannot be tried, or does not update the parameters in its groups.
    """
    is_declared = getattr(type(optimizer), "elementwise", None) is True
    result = _run_trial(_SHAPES, optimizer, cut)
    if isinstance(result, Exception):
        result = _run_trial(_SHAPES[:2], optimizer, cut)  # some take matrices only
    if isinstance(result, Exception):
        if is_declared:
            return True
        raise StrategyError(
            f"{type(optimizer).__name__} cannot be tried on parts of tensors: {result}",
            next_step="say `elementwise = True` in its class if it updates each value by itself",
        ) from result
    starts, whole, joined = result
    # With a rate of 0 nothing moves, so a trial shows nothing.
    if optimizer.param_groups[0].get("lr") != 0 and all(map(torch.equal, whole, starts)):
        raise StrategyError(
            f"{type(optimizer).__name__} does not update what is in its groups, but tensors that it knows"
            " otherwise, and under this strategy a rank updates other ones",
            next_step="let step() go through self.param_groups, or choose a strategy in which every rank"
            " updates all parameters",
        )
    # Kernels round differently for other shapes, so equal bits are not required.
    near = _TOLERANCE * max(float(x.abs().max()) for x in starts)
    return is_declared or all(float((a - b).abs().max()) <= near for a, b in zip(whole, joined, strict=True))


_TrialResult = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""The initial tensors, their values after joint updates, and their values after updates in parts."""


def _run_trial(
    shapes: Sequence[tuple[int, ...]], optimizer: torch.optim.Optimizer, cut: _SplitMethod
) -> _TrialResult | Exception:
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(_STEPS)]
    pairs = zip(cut.apart(starts), zip(*(cut.apart(step) for step in grads), strict=True), strict=True)
    whole, parts = list[Tensor](), TensorParts()
    try:
        parts = [_run_steps(optimizer, part, steps) for part, steps in pairs]
        whole = _run_steps(optimizer, starts, grads)
    except Exception as error:  # noqa: BLE001  user code may raise anything; the message is reported
        return error
    return starts, whole, cut.together(parts)


def _run_steps(
    optimizer: torch.optim.Optimizer, starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return the parameters after steps of a copy of the optimizer."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    twin = copy_for_parameters(optimizer, parameters)
    for step in grads:
        for p, grad in zip(parameters, step, strict=True):
            p.grad = grad.clone()
        twin.step()
    return [p.detach() for p in parameters]


def copy_for_parameters(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Any:
    """Return a copy without state over other parameters, with the options of the first group."""
    twin = _copy_without_state(optimizer)
    options = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
    twin.param_groups = [{**copy.deepcopy(options), "params": [*parameters]}]
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
