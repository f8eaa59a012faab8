"""Checks of the user's loss, gradient and optimizer that no comparison of two sides can make.

Both sides of a verification run the same user code, so a mistake in it changes both alike.

Loss: a `Loss` is a sum over items and their number. On a sample twice both are doubled, on two samples both
are the sums of those of each. Checked in evaluation mode, without dropout and with running statistics. A loss
that couples samples by intent (contrastive, ranking) depends on how a batch is cut into shards, and fails
here unless it uses `paceline.gather`.

Gradient: each trained tensor is moved a little along one random direction, in float64, and the loss must
change as its gradient says. A misplaced `detach`, a number taken out of the graph or a `no_grad` block
changes that. Not checked: tensors with gradient hooks, which are there to change gradients, and models that
do not run in float64. A model that stops gradients on purpose (a target network, a straight-through
estimator) also fails.

Update: an optimizer that makes the step of one of PyTorch's twice, by itself or by a hook.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paceline.data.loader import to_device
from paceline.data.work import MicroBatch
from paceline.verification.diagnosis import ErrorDiagnosis
from paceline.verification.error_bounds import UNIT_ROUNDOFF, TensorComparison
from paceline.verification.model_copy import copy_model
from paceline.verification.oracle import (
    Oracle,
    as_reals,
    collate,
    copy_optimizer_attributes,
    generators_seeded,
    loss_without_gradients,
    read_samples,
)
from paceline.verification.preflight import TaskFault, sha_of_batch

_MOST_TENSORS = 64
# Relative to the size of a tensor; if the slopes differ, the loss has a kink.
_STEPS = (2e-3, 1e-3)
# Relative to a slope.
_SLOPE_TOLERANCE = 0.05
# Losses are often float32, whatever the model is.
_FP32_ROUNDOFF = 2.0**-23
# Factor of the rounding error of a slope.
_CLEAR_OF_ROUNDING = 20.0


def check_gradient(oracle: Oracle, world: int) -> TaskFault | None:
    """Return the first trained tensor whose gradient is not the derivative of the loss of one sample."""
    batch = oracle.load(MicroBatch(0, 0, np.array([0], dtype=np.int64), key=0))
    model = copy_model(oracle.model).eval()
    try:
        model, batch = model.double(), tree_map(_as_double, batch)
        slopes = _derivatives(oracle, model, batch)
    # Layers that work in one dtype only cannot be checked in float64.
    except (RuntimeError, TypeError, ValueError):
        return None
    for name, (measured, computed, noise) in slopes.items():
        difference = abs(measured - computed)
        if difference > max(_SLOPE_TOLERANCE * max(abs(measured), abs(computed)), noise):
            text = (
                f"the loss changes by {measured:.4g} where its gradient says {computed:.4g}: look for a"
                " detach, a number taken out of the graph or a no_grad; if it is intended, leave out strict"
            )
            comparison = TensorComparison(-1, "derivative", name, (difference,) * world, noise)
            return comparison, ErrorDiagnosis("a gradient does not arrive", text)
    return None


def _derivatives(oracle: Oracle, model: nn.Module, batch: Any) -> Mapping[str, tuple[float, float, float]]:
    """Return measured slope, slope by autograd and noise of each tensor, along a random direction."""
    trained = {
        n: p for n, p in model.named_parameters() if p.requires_grad and p.numel() and not _is_hooked(p)
    }
    # Evenly spread over the model, so that large models stay cheap and every depth is tested.
    names = list(trained)[:: max(1, -(-len(trained) // _MOST_TENSORS))]
    total = _loss_in_double(oracle, model, batch)
    grads = torch.autograd.grad(total, [trained[n] for n in names], allow_unused=True)
    rounding = _FP32_ROUNDOFF * max(abs(float(total.detach())), 1.0)
    generator = torch.Generator().manual_seed(0)
    derivatives = {}
    for name, grad in zip(names, grads, strict=True):
        p = trained[name]
        direction = torch.randn(p.shape, dtype=torch.float64, generator=generator).to(p.device, p.dtype)
        steps = [step * max(0.1, float(p.detach().abs().max())) for step in _STEPS]
        slopes = [_slope(oracle, model, batch, p, step * direction) / step for step in steps]
        computed = 0.0 if grad is None else float((grad.conj() * direction).real.sum())
        # Near a kink (ReLU, max) finite differences are no derivative: such tensors are left out.
        if abs(slopes[0] - slopes[1]) <= _SLOPE_TOLERANCE / 2 * max(map(abs, slopes)) + rounding / steps[1]:
            derivatives[name] = slopes[1], computed, _CLEAR_OF_ROUNDING * rounding / steps[1]
    return derivatives


def _slope(oracle: Oracle, model: nn.Module, batch: Any, p: nn.Parameter, by: Tensor) -> float:
    """Return half of the change of the loss from p - by to p + by."""
    before, ends = p.detach().clone(), []
    for side in (by, -by):
        with torch.no_grad():
            p.copy_(before + side)
            with torch.enable_grad():  # a loss may take gradients itself
                ends.append(float(_loss_in_double(oracle, model, batch)))
            p.copy_(before)
    return (ends[0] - ends[1]) / 2


def _loss_in_double(oracle: Oracle, model: nn.Module, batch: Any) -> Tensor:
    """Return the total loss, with the same random numbers and buffers in every call."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    with generators_seeded(0):
        total: Tensor = oracle.task.loss(model, batch).total
    with torch.no_grad():
        for b, value in buffers:
            b.copy_(value)
    return total


def _is_hooked(p: nn.Parameter) -> bool:
    return bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))


def _as_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


# Relative to the change of the parameters.
_CHANGE_TOLERANCE = 1e-3


def check_single_update(oracle: Oracle, world: int) -> TaskFault | None:
    """Return a fault if the optimizer takes its step twice."""
    before = _parameter_values(oracle)
    with _restored_afterwards(oracle):
        sums = oracle.accumulate(oracle.work.micro_batches(0)[:1])
        oracle.set_gradients(sums.gradients, sums.count or 1.0)
        return _stepped_twice(oracle, before, world)


def _stepped_twice(oracle: Oracle, before: dict[str, Tensor], world: int) -> TaskFault | None:
    """Return a fault if the change is that of two steps of the PyTorch optimizer that this one extends."""
    optimizer = oracle.optimizer
    kind = next((k for k in type(optimizer).__mro__ if k.__module__.startswith("torch.optim.")), None)
    if kind in (None, torch.optim.Optimizer):
        return None
    grads = [(p, p.grad) for p in oracle.model.parameters()]
    ends = []
    plain = _without_hooks(kind, oracle), _without_hooks(kind, oracle)
    for stepped, num_steps in ((plain[0], 1), (plain[1], 2), (optimizer, 1)):
        for _ in range(num_steps):
            for p, grad in grads:
                p.grad = None if grad is None else grad.clone()
            stepped.step()
        ends.append(_change(oracle, before))
        _restore(oracle, before)
    once, twice, observed = ends
    if _distance(observed, once) <= _CHANGE_TOLERANCE or _distance(observed, twice) > _CHANGE_TOLERANCE:
        return None
    text = f"the update is that of two steps of {kind.__name__}: its step, or a hook of it, takes another one"
    comparison = TensorComparison(
        -1, "update", "all parameters", (float((observed - once).abs().max()),) * world, 0.0
    )
    return comparison, ErrorDiagnosis("stepped twice", text)


def _without_hooks(kind: Any, oracle: Oracle) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer over the same parameters, with copies of options and state."""
    # Without __init__, whose arguments are unknown.
    optimizer: torch.optim.Optimizer = object.__new__(kind)
    plain = {n: v for n, v in vars(oracle.optimizer).items() if "_hooks" not in n and n != "step"}
    optimizer.__dict__.update(copy.deepcopy(plain, {id(p): p for p in oracle.model.parameters()}))
    optimizer.__dict__.update({n: OrderedDict() for n in vars(oracle.optimizer) if "_hooks" in n})
    return optimizer


@contextmanager
def _restored_afterwards(oracle: Oracle) -> Iterator[None]:
    """Restore model and optimizer after the block."""
    values, buffers = _parameter_values(oracle), oracle.buffers()
    attributes = copy_optimizer_attributes(oracle.optimizer, "step")
    yield
    vars(oracle.optimizer).update(attributes)
    _restore(oracle, values)
    oracle.set_buffers(buffers)
    for p in oracle.model.parameters():
        p.grad = None


def _parameter_values(oracle: Oracle) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in oracle.model.named_parameters()}


def _restore(oracle: Oracle, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in oracle.model.named_parameters():
            p.copy_(values[name])


def _change(oracle: Oracle, before: dict[str, Tensor]) -> Tensor:
    return torch.cat(
        [as_reals(p - before[n]).reshape(-1).double() for n, p in oracle.model.named_parameters()]
    ).detach()


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm()) / max(float(a.norm()), float(b.norm()), 1e-300)


# Roundings of a forward whose kernels depend on the batch size.
_BATCH_SIZE_SLACK = 1e4


def check_user_code(oracle: Oracle, compute: str, world: int) -> TaskFault | None:
    """Return the first fault of the loss, of its gradient, or of an update.

    Args:
        compute: number format of the arithmetic.
        world: number of ranks, all of which compute the same.
    """
    return (
        check_loss_sums(oracle, compute, world)
        or check_gradient(oracle, world)
        or check_single_update(oracle, world)
    )


def check_loss_sums(oracle: Oracle, compute: str, world: int) -> TaskFault | None:
    """Return a fault if totals or counts of the loss do not add up over samples; arguments as above."""
    # A loss over the whole batch does not add up, and need not.
    if len(oracle.task.data) < 2 or oracle.gathers():
        return None
    with generators_seeded(0):
        # Only once: augmented data differs in every read.
        sample, other_sample = read_samples(oracle.task, [0, 1])
    if _collate_draws(oracle, [sample, other_sample]):
        return None
    first, second, twice, both = (
        _loss_of_samples(oracle, samples)
        for samples in ([sample], [other_sample], [sample, sample], [sample, other_sample])
    )
    near = min(0.3, _BATCH_SIZE_SLACK * UNIT_ROUNDOFF[compute])
    for name, loss, expected in (
        ("a sample twice", twice, (2 * first[0], 2 * first[1])),
        ("two samples", both, (first[0] + second[0], first[1] + second[1])),
    ):
        for index, quantity in ((1, "count"), (0, "total")):
            floor = abs(first[0]) if quantity == "total" else 0.0
            bound = near * max(abs(loss[index]), abs(expected[index]), floor)
            error = abs(loss[index] - expected[index])
            if error > bound:
                actual, right = f"{loss[index]:.6g}", f"{expected[index]:.6g}"
                text = f"the {quantity} of {name} is {actual}, and the sum over single samples is {right}"
                comparison = TensorComparison(-1, "loss", f"{quantity} of {name}", (error,) * world, bound)
                return comparison, _diagnose_loss(text, first, loss)
    return None


def _diagnose_loss(text: str, single: Sequence[float], pair: Sequence[float]) -> ErrorDiagnosis:
    """Name the cause from (total, count) of one sample and of two."""
    if pair[1] == single[1]:
        advice = "return Loss(sum, number of items), or Loss.mean(mean, number of items)"
        return ErrorDiagnosis("the loss counts a batch as one item", f"{text}: {advice}")
    if abs(pair[0]) < 1.5 * abs(single[0]):
        advice = "it is a mean instead of a sum; return Loss.mean(value, count)"
        return ErrorDiagnosis("the loss is a mean", f"{text}: {advice}")
    return ErrorDiagnosis("the loss does not add up", text)


def _collate_draws(oracle: Oracle, samples: list[Any]) -> bool:
    """Return whether the collate function is random, so that its batches differ by intent (as mixup)."""
    hashes = set()
    for seed in range(3):
        with generators_seeded(seed):
            hashes.add(sha_of_batch(collate(oracle.task, samples)))
    return len(hashes) > 1


def _loss_of_samples(oracle: Oracle, samples: list[Any]) -> tuple[float, float]:
    """Return total and count of samples, in evaluation mode."""
    batch: Any = to_device(collate(oracle.task, samples), oracle.device)
    before = oracle.buffers()
    oracle.model.eval()
    with oracle.autocast():
        loss = loss_without_gradients(oracle.task, oracle.model, batch)
    oracle.set_buffers(before)
    return float(loss.total), float(loss.count)
