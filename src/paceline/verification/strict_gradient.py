"""Is what autograd finds the derivative of the loss? Asked of the user's model alone, in float64.

A `detach` in the wrong place, a number taken out of a graph and put back, a block under `no_grad`: both sides
of a verification train such a model alike, and wrong. Each trained tensor is moved a little along one drawn
direction; the loss must change as its gradient says.
Not looked at: tensors with gradient hooks, which are there to change gradients, and models that do not run in
float64. A model that stops gradients on purpose (a target network, a straight-through estimator) is told too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.data import MicroBatch
from paceline.verification.compare import Finding
from paceline.verification.diagnose import Diagnosis
from paceline.verification.oracle import Oracle
from paceline.verification.plain_micro_batches import drawn_from
from paceline.verification.preflight import Fault
from paceline.verification.twin import twin

_MOST_TENSORS = 64
_STEPS = (2e-3, 1e-3)  # times the size of a tensor; where the two slopes differ there is a kink between
_NEAR = 0.05  # of a slope
_ROUNDED = 2.0**-23  # losses are often float32, whatever the model is
_CLEAR = 20.0  # times what rounding leaves of a slope


def look_at_gradient(oracle: Oracle, world: int) -> Fault | None:
    """The first trained tensor whose gradient is not the derivative of the loss of one sample."""
    batch = oracle.load(MicroBatch(0, 0, np.array([0], dtype=np.int64), key=0))
    model = twin(oracle.model).eval()
    try:
        model, batch = model.double(), tree_map(_as_double, batch)
        right = _derivatives(oracle, model, batch)
    except (RuntimeError, TypeError, ValueError):  # it has layers of one type only
        return None
    for name, (wanted, found, noise) in right.items():
        if abs(wanted - found) > max(_NEAR * max(abs(wanted), abs(found)), noise):
            text = (
                f"the loss moves by {wanted:.4g} where its gradient says {found:.4g}: a detach, a number"
                " taken out of the graph or a no_grad lies between them; if that is meant, leave out strict"
            )
            finding = Finding(-1, "derivative", name, (abs(wanted - found),) * world, noise)
            return finding, Diagnosis("a gradient does not arrive", text)
    return None


def _derivatives(oracle: Oracle, model: nn.Module, batch: Any) -> Mapping[str, tuple[float, float, float]]:
    """By tensor: the slope of the loss along a direction, measured and by autograd; what is no difference."""
    trained = {
        n: p for n, p in model.named_parameters() if p.requires_grad and p.numel() and not _is_hooked(p)
    }
    names = list(trained)[:: max(1, -(-len(trained) // _MOST_TENSORS))]
    total = _loss(oracle, model, batch)
    grads = torch.autograd.grad(total, [trained[n] for n in names], allow_unused=True)
    rounded = _ROUNDED * max(abs(float(total.detach())), 1.0)
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, grad in zip(names, grads, strict=True):
        p = trained[name]
        way = torch.randn(p.shape, dtype=torch.float64, generator=generator).to(p.device, p.dtype)
        steps = [step * max(0.1, float(p.detach().abs().max())) for step in _STEPS]
        slopes = [_slope(oracle, model, batch, p, step * way) / step for step in steps]
        said = 0.0 if grad is None else float((grad.conj() * way).real.sum())
        if abs(slopes[0] - slopes[1]) <= _NEAR / 2 * max(map(abs, slopes)) + rounded / steps[1]:
            found[name] = slopes[1], said, _CLEAR * rounded / steps[1]
    return found


def _slope(oracle: Oracle, model: nn.Module, batch: Any, p: nn.Parameter, by: Tensor) -> float:
    """Half of what the loss changes between one side and the other."""
    before, ends = p.detach().clone(), []
    for side in (by, -by):
        with torch.no_grad():
            p.copy_(before + side)
            ends.append(float(_loss(oracle, model, batch)))
            p.copy_(before)
    return (ends[0] - ends[1]) / 2


def _loss(oracle: Oracle, model: nn.Module, batch: Any) -> Tensor:
    """The same numbers are drawn, and the same buffers stand, every time."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    with drawn_from(0):
        total: Tensor = oracle.task.loss(model, batch).total
    with torch.no_grad():
        for b, value in buffers:
            b.copy_(value)
    return total


def _is_hooked(p: nn.Parameter) -> bool:
    return bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))


def _as_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
