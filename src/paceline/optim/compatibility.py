"""Which optimizers the training step can drive: those that make a right update of one gradient.

Optimizers over parts: which may update a part of a tensor alone, and how one comes to do it.
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
    """Give the optimizer back if its step needs nothing but gradients, and is right.

    Raises:
        TaskError: it wants to compute the loss again, several times in a step (LBFGS): its line search would
            need every rank and every shard each time. Or it takes sparse gradients only (SparseAdam).
    """
    for member in member_optimizers(optimizer):
        if member is not optimizer:
            require_one_gradient(member)
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TaskError(
            f"{name} computes the loss again within a step, and a step here makes one update of one gradient",
            next_step="use an optimizer whose step() takes no closure, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TaskError(
            f"{name} takes sparse gradients only, and the sums over shards and ranks are dense",
            next_step="use torch.optim.Adam, and nn.Embedding(sparse=False)",
        )
    return _require_right_kernels(optimizer)


def _require_right_kernels(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give the optimizer back if its fused kernel is right for the types of its parameters.

    Raises:
        TaskError: PyTorch's fused SGD of the processor, over bfloat16 or float16: with momentum it ends 0.6
            away after six steps, where 0.02 is rounding (PyTorch 2.13; tests/unit/optim/test_fit.py).
    """
    half = (torch.bfloat16, torch.float16)
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        if group["fused"] and any(p.dtype in half and p.device.type == "cpu" for p in group["params"]):
            raise TaskError(
                f"{type(optimizer).__name__}(fused=True) of PyTorch ends elsewhere over parameters of two"
                " bytes on the processor",
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
    """Let an optimizer without state, made over a whole model, update this rank's parts only."""
    parts: Mapping[str, nn.Parameter] = {slot.name: p for slot, p in sharded_model.updates.items()}
    own = {p: parts.get(slot.name) for slot, p in sharded_model.computes.items()}
    for group in optimizer.param_groups:
        now = [None if p.is_meta else own.get(p, p) for p in group["params"]]
        if "param_names" in group:
            names = zip(group["param_names"], now, strict=True)
            group["param_names"] = [name for name, p in names if p is not None]
        group["params"] = [p for p in now if p is not None]
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    for p in [p for p in optimizer.state if p not in updated]:  # some make their state at once
        del optimizer.state[p]


def require_layout_support(optimizer: torch.optim.Optimizer, sharded_model: ModelShard) -> None:
    """Refuse an optimizer that looks at more than what a rank updates.

    Raises:
        StrategyError: as `require_elementwise` and `require_tensorwise` say.
    """
    require = require_elementwise if sharded_model.updates_partially else require_tensorwise
    if sharded_model.updates_partially or len(sharded_model.updates) < len(sharded_model.slots):
        _require_no_hooks(optimizer)
        for one in member_optimizers(optimizer):
            require(one)


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot update parts of tensors, for a rank that has only such.

    A class says what it is by `elementwise = True` or `False`; of PyTorch's own it is known; any other is
    tried on small tensors, whole and in two parts.

    Raises:
        StrategyError: a part of a tensor, updated alone, would end elsewhere; or it has hooks around its
            step, or does not update what is in its groups.
    """
    _require_no_hooks(optimizer)
    kind = type(optimizer)
    said = getattr(kind, "elementwise", None)
    if said is False or not (_is_known(kind, _KNOWN) or _matches_in_parts(optimizer, _HALVES)):
        raise StrategyError(
            f"{kind.__name__} looks at a whole tensor to update any value of it, and under this strategy a"
            " rank updates parts of tensors",
            next_step="choose an elementwise optimizer (SGD, Adam, ...), or a strategy without shard, tensor",
        )


def require_tensorwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that looks at several tensors to update one, for a rank that has some of them.

    Raises:
        StrategyError: a tensor, updated apart from the others, would end elsewhere; or as above.
    """
    _require_no_hooks(optimizer)
    kind = type(optimizer)
    if not (_is_known(kind) or _matches_in_parts(optimizer, _ONE_BY_ONE)):
        raise StrategyError(
            f"{kind.__name__} looks at all tensors to update any of them, and under this strategy a rank has"
            " those of its own stage",
            next_step="choose an optimizer that updates each tensor by itself, or leave out pipeline",
        )


def _require_no_hooks(optimizer: torch.optim.Optimizer) -> None:
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise StrategyError(
            f"{type(optimizer).__name__} has hooks around its step, and under this strategy they would see"
            " what one rank updates",
            next_step="leave them out (optimizer.clip_norm clips the whole gradient), or choose a strategy in"
            " which every rank updates all parameters",
        )


def _is_known(kind: type, names: Sequence[str] = ()) -> bool:
    """Whether it is PyTorch's own; all of those update each tensor by itself."""
    return kind.__module__.startswith("torch.optim") and (not names or kind.__name__ in names)


TensorParts = list[list[Tensor]]


@dataclass(frozen=True)
class _SplitMethod:
    """How tensors are taken apart, to be updated one part after the other, and put together."""

    apart: Callable[[Sequence[Tensor]], TensorParts]
    together: Callable[[TensorParts], list[Tensor]]


_HALVES = _SplitMethod(
    lambda tensors: [[t[:2] for t in tensors], [t[2:] for t in tensors]],
    lambda parts: [torch.cat(pair) for pair in zip(*parts, strict=True)],
)
_ONE_BY_ONE = _SplitMethod(lambda tensors: [[t] for t in tensors], lambda parts: [part[0] for part in parts])


def _matches_in_parts(optimizer: torch.optim.Optimizer, cut: _SplitMethod) -> bool:
    """Whether some steps come to the same in parts; its class may know better.

    Raises:
        StrategyError: it cannot be tried, or leaves what is in its groups as it was.
    """
    says_so = getattr(type(optimizer), "elementwise", None) is True
    found = _run_trial(_SHAPES, optimizer, cut)
    if isinstance(found, Exception):
        found = _run_trial(_SHAPES[:2], optimizer, cut)  # some take matrices only
    if isinstance(found, Exception):
        if says_so:
            return True
        raise StrategyError(
            f"{type(optimizer).__name__} cannot be tried on parts of tensors: {found}",
            next_step="say `elementwise = True` in its class if it updates each value by itself",
        ) from found
    starts, whole, joined = found
    if optimizer.param_groups[0].get("lr") != 0 and all(map(torch.equal, whole, starts)):
        raise StrategyError(
            f"{type(optimizer).__name__} does not update what is in its groups, but tensors that it knows"
            " otherwise, and under this strategy a rank updates other ones",
            next_step="let step() go through self.param_groups, or choose a strategy in which every rank"
            " updates all parameters",
        )
    near = _TOLERANCE * max(float(x.abs().max()) for x in starts)
    return says_so or all(float((a - b).abs().max()) <= near for a, b in zip(whole, joined, strict=True))


_TrialResult = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Of some tensors: where they start, where they end together, and where in parts."""


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
    except Exception as error:  # noqa: BLE001  a user's code may raise anything, and its words are told
        return error
    return starts, whole, cut.together(parts)


def _run_steps(
    optimizer: torch.optim.Optimizer, starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Where a copy of the optimizer, over other parameters, ends."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    twin = copy_for_parameters(optimizer, parameters)
    for step in grads:
        for p, grad in zip(parameters, step, strict=True):
            p.grad = grad.clone()
        twin.step()
    return [p.detach() for p in parameters]


def copy_for_parameters(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> Any:
    """A copy without state that updates other parameters, with the options of the first group."""
    twin = _copy_without_state(optimizer)
    options = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
    twin.param_groups = [{**copy.deepcopy(options), "params": [*parameters]}]
    return twin


def _copy_without_state(optimizer: torch.optim.Optimizer) -> Any:
    """A copy without state, with attributes of its own; the model's parameters in them have no gradient."""
    twin: Any = object.__new__(type(optimizer))
    known: dict[int, Any] = {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        known[id(p)], p.grad = p, None
    for name, value in vars(optimizer).items():
        if name not in ("state", "param_groups"):
            twin.__dict__[name] = _copy_value(value, known)
    twin.state = type(optimizer.state)(dict)
    return twin


def _copy_value(value: Any, known: dict[int, Any]) -> Any:
    """A deep copy, but of the model's parameters; what has no copy is shared."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    try:
        return copy.deepcopy(value, dict(known))
    except (TypeError, RuntimeError):
        return value
