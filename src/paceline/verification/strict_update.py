"""Does one update change the parameters once? Asked of the user's optimizer alone.

One that makes the step of PyTorch's twice, by itself or by a hook, is the same on both sides of a
verification.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.verification.compare import Finding
from paceline.verification.diagnose import Diagnosis
from paceline.verification.oracle import Oracle
from paceline.verification.plain_norm import reals
from paceline.verification.preflight import Fault

_FITS = 1e-3  # of the change


def look_at_update(oracle: Oracle, world: int) -> Fault | None:
    """Whether the optimizer's step is made once."""
    before = _values(oracle)
    with _kept(oracle):
        sums = oracle.accumulate(oracle.work.micro_batches(0)[:1])
        oracle.set_gradients(sums.gradients, sums.count or 1.0)
        return _stepped_twice(oracle, before, world)


def _stepped_twice(oracle: Oracle, before: dict[str, Tensor], world: int) -> Fault | None:
    """Whether the change is that of two steps of the optimizer of PyTorch's that this one is made of."""
    optimizer = oracle.optimizer
    kind = next((k for k in type(optimizer).__mro__ if k.__module__.startswith("torch.optim.")), None)
    if kind in (None, torch.optim.Optimizer):
        return None
    grads = [(p, p.grad) for p in oracle.model.parameters()]
    ends = []
    for one, times in ((_without_hooks(kind, oracle), 1), (_without_hooks(kind, oracle), 2), (optimizer, 1)):
        for _ in range(times):
            for p, grad in grads:
                p.grad = None if grad is None else grad.clone()
            one.step()
        ends.append(_change(oracle, before))
        _restore(oracle, before)
    once, twice, seen = ends
    if _distance(seen, once) <= _FITS or _distance(seen, twice) > _FITS:
        return None
    text = (
        f"the update is that of two steps of {kind.__name__}: its step, or a hook around it, makes it again"
    )
    finding = Finding(-1, "update", "all parameters", (float((seen - once).abs().max()),) * world, 0.0)
    return finding, Diagnosis("stepped twice", text)


def _without_hooks(kind: Any, oracle: Oracle) -> torch.optim.Optimizer:
    """PyTorch's own optimizer over the same parameters, with copies of options and state."""
    made: torch.optim.Optimizer = object.__new__(kind)
    plain = {n: v for n, v in vars(oracle.optimizer).items() if "_hooks" not in n and n != "step"}
    made.__dict__.update(copy.deepcopy(plain, _parameters(oracle)))
    made.__dict__.update({n: OrderedDict() for n in vars(oracle.optimizer) if "_hooks" in n})
    return made


@contextmanager
def _kept(oracle: Oracle) -> Iterator[None]:
    """Model and optimizer are afterwards what they were."""
    values, buffers = _values(oracle), oracle.buffers()
    own = {n: v for n, v in vars(oracle.optimizer).items() if not n.startswith("_") and n != "step"}
    kept = copy.deepcopy(own, _parameters(oracle))
    yield
    vars(oracle.optimizer).update(kept)
    _restore(oracle, values)
    oracle.set_buffers(buffers)
    for p in oracle.model.parameters():
        p.grad = None


def _parameters(oracle: Oracle) -> dict[int, Any]:
    """What a copy shares."""
    return {id(p): p for p in oracle.model.parameters()}


def _values(oracle: Oracle) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in oracle.model.named_parameters()}


def _restore(oracle: Oracle, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in oracle.model.named_parameters():
            p.copy_(values[name])


def _change(oracle: Oracle, before: dict[str, Tensor]) -> Tensor:
    return torch.cat(
        [reals(p - before[n]).reshape(-1).double() for n, p in oracle.model.named_parameters()]
    ).detach()


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm()) / max(float(a.norm()), float(b.norm()), 1e-300)
