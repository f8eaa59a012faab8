"""Optimizers over parts: which may update a part of a tensor alone, and how one comes to do it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.errors import StrategyError

if TYPE_CHECKING:
    from paceline.layout import Holding

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


def adopt(optimizer: torch.optim.Optimizer, holding: Holding) -> None:
    """Let an optimizer without state, made over a whole model, update this rank's parts only."""
    parts: Mapping[str, nn.Parameter] = {slot.name: p for slot, p in holding.updates.items()}
    own = {p: parts.get(slot.name) for slot, p in holding.computes.items()}
    for group in optimizer.param_groups:
        now = [None if p.is_meta else own.get(p, p) for p in group["params"]]
        if "param_names" in group:
            names = zip(group["param_names"], now, strict=True)
            group["param_names"] = [name for name, p in names if p is not None]
        group["params"] = [p for p in now if p is not None]


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of a value depends on other values of its tensor.

    A class says what it is by `elementwise = True` or `False`; of PyTorch's own it is known; any other is
    tried on small tensors, whole and in two parts.

    Raises:
        StrategyError: a part of a tensor, updated alone, would end elsewhere.
    """
    kind = type(optimizer)
    said = getattr(kind, "elementwise", None)
    own = kind.__module__.startswith("torch.optim") and kind.__name__ in _KNOWN
    if said is True or own or (said is None and _ends_where_its_parts_end(optimizer)):
        return
    raise StrategyError(
        f"{kind.__name__} looks at a whole tensor to update any value of it, and under this strategy a rank"
        " updates parts of tensors",
        next_step="choose an elementwise optimizer (SGD, Adam, ...), or a strategy without shard and tensor",
    )


def _ends_where_its_parts_end(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some steps on two matrices and a vector come to the same by halves."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in ((4, 6), (6, 2), (4,))]
    grads = [[torch.randn(s.shape, generator=generator) for s in starts] for _ in range(_STEPS)]
    try:
        whole = _steps(optimizer, starts, grads)
        halves = [
            _steps(optimizer, [s[part] for s in starts], [[g[part] for g in step] for step in grads])
            for part in (slice(0, 2), slice(2, None))
        ]
    except Exception as error:
        raise StrategyError(
            f"{type(optimizer).__name__} cannot be tried on parts of tensors: {error}",
            next_step="say `elementwise = True` in its class if it updates each value by itself",
        ) from error
    joined = [torch.cat(pair) for pair in zip(*halves, strict=True)]
    scale = max(float(x.abs().max()) for x in starts)
    return all(float((a - b).abs().max()) <= _TOLERANCE * scale for a, b in zip(whole, joined, strict=True))


def _steps(
    optimizer: torch.optim.Optimizer, starts: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Where a copy of the optimizer, over other parameters, ends."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    twin: Any = copy.copy(optimizer)
    twin.state = type(optimizer.state)(dict)
    options = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "param_names")}
    twin.param_groups = [{**copy.deepcopy(options), "params": parameters}]
    for step in grads:
        for p, grad in zip(parameters, step, strict=True):
            p.grad = grad.clone()
        twin.step()
    return [p.detach() for p in parameters]
