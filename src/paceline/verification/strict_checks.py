"""Is what autograd finds the derivative of the loss? Asked of the user's model alone, in float64.

A `detach` in the wrong place, a number taken out of a graph and put back, a block under `no_grad`: both sides
of a verification train such a model alike, and wrong. Each trained tensor is moved a little along one drawn
direction; the loss must change as its gradient says.
Not looked at: tensors with gradient hooks, which are there to change gradients, and models that do not run in
float64. A model that stops gradients on purpose (a target network, a straight-through estimator) is told too.

Does one update change the parameters once? Asked of the user's optimizer alone.

One that makes the step of PyTorch's twice, by itself or by a hook, is the same on both sides of a
verification.

What no comparison shows, since both sides run the user's loss: whether it keeps its own contract.

A `Loss` is a sum over items and their number. So on a sample twice both are doubled, and on two samples both
are the sums of those of each. Looked at in evaluation, without dropout and with the running statistics of
BatchNorm: a loss that couples the samples of a batch by intent (contrastive, ranking) is none of one sample,
and depends on how a batch is cut into shards.
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
from paceline.verification.oracle import Oracle, as_reals, collate, generators_seeded, read_samples
from paceline.verification.preflight import TaskFault, sha_of_batch

_MOST_TENSORS = 64
_STEPS = (2e-3, 1e-3)  # times the size of a tensor; where the two slopes differ there is a kink between
_SLOPE_TOLERANCE = 0.05  # of a slope
_FP32_ROUNDOFF = 2.0**-23  # losses are often float32, whatever the model is
_CLEAR_OF_ROUNDING = 20.0  # times what rounding leaves of a slope


def check_gradient(oracle: Oracle, world: int) -> TaskFault | None:
    """The first trained tensor whose gradient is not the derivative of the loss of one sample."""
    batch = oracle.load(MicroBatch(0, 0, np.array([0], dtype=np.int64), key=0))
    model = copy_model(oracle.model).eval()
    try:
        model, batch = model.double(), tree_map(_as_double, batch)
        right = _derivatives(oracle, model, batch)
    except (RuntimeError, TypeError, ValueError):  # it has layers of one type only
        return None
    for name, (wanted, found, noise) in right.items():
        if abs(wanted - found) > max(_SLOPE_TOLERANCE * max(abs(wanted), abs(found)), noise):
            text = (
                f"the loss moves by {wanted:.4g} where its gradient says {found:.4g}: a detach, a number"
                " taken out of the graph or a no_grad lies between them; if that is meant, leave out strict"
            )
            finding = TensorComparison(-1, "derivative", name, (abs(wanted - found),) * world, noise)
            return finding, ErrorDiagnosis("a gradient does not arrive", text)
    return None


def _derivatives(oracle: Oracle, model: nn.Module, batch: Any) -> Mapping[str, tuple[float, float, float]]:
    """By tensor: the slope of the loss along a direction, measured and by autograd; what is no difference."""
    trained = {
        n: p for n, p in model.named_parameters() if p.requires_grad and p.numel() and not _is_hooked(p)
    }
    names = list(trained)[:: max(1, -(-len(trained) // _MOST_TENSORS))]
    total = _loss_in_double(oracle, model, batch)
    grads = torch.autograd.grad(total, [trained[n] for n in names], allow_unused=True)
    rounded = _FP32_ROUNDOFF * max(abs(float(total.detach())), 1.0)
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, grad in zip(names, grads, strict=True):
        p = trained[name]
        way = torch.randn(p.shape, dtype=torch.float64, generator=generator).to(p.device, p.dtype)
        steps = [step * max(0.1, float(p.detach().abs().max())) for step in _STEPS]
        slopes = [_slope(oracle, model, batch, p, step * way) / step for step in steps]
        said = 0.0 if grad is None else float((grad.conj() * way).real.sum())
        if abs(slopes[0] - slopes[1]) <= _SLOPE_TOLERANCE / 2 * max(map(abs, slopes)) + rounded / steps[1]:
            found[name] = slopes[1], said, _CLEAR_OF_ROUNDING * rounded / steps[1]
    return found


def _slope(oracle: Oracle, model: nn.Module, batch: Any, p: nn.Parameter, by: Tensor) -> float:
    """Half of what the loss changes between one side and the other."""
    before, ends = p.detach().clone(), []
    for side in (by, -by):
        with torch.no_grad():
            p.copy_(before + side)
            ends.append(float(_loss_in_double(oracle, model, batch)))
            p.copy_(before)
    return (ends[0] - ends[1]) / 2


def _loss_in_double(oracle: Oracle, model: nn.Module, batch: Any) -> Tensor:
    """The same numbers are drawn, and the same buffers stand, every time."""
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


_CHANGE_TOLERANCE = 1e-3  # of the change


def check_single_update(oracle: Oracle, world: int) -> TaskFault | None:
    """Whether the optimizer's step is made once."""
    before = _parameter_values(oracle)
    with _restored_afterwards(oracle):
        sums = oracle.accumulate(oracle.work.micro_batches(0)[:1])
        oracle.set_gradients(sums.gradients, sums.count or 1.0)
        return _stepped_twice(oracle, before, world)


def _stepped_twice(oracle: Oracle, before: dict[str, Tensor], world: int) -> TaskFault | None:
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
    if _distance(seen, once) <= _CHANGE_TOLERANCE or _distance(seen, twice) > _CHANGE_TOLERANCE:
        return None
    text = (
        f"the update is that of two steps of {kind.__name__}: its step, or a hook around it, makes it again"
    )
    finding = TensorComparison(
        -1, "update", "all parameters", (float((seen - once).abs().max()),) * world, 0.0
    )
    return finding, ErrorDiagnosis("stepped twice", text)


def _without_hooks(kind: Any, oracle: Oracle) -> torch.optim.Optimizer:
    """PyTorch's own optimizer over the same parameters, with copies of options and state."""
    made: torch.optim.Optimizer = object.__new__(kind)
    plain = {n: v for n, v in vars(oracle.optimizer).items() if "_hooks" not in n and n != "step"}
    made.__dict__.update(copy.deepcopy(plain, _shared_parameters(oracle)))
    made.__dict__.update({n: OrderedDict() for n in vars(oracle.optimizer) if "_hooks" in n})
    return made


@contextmanager
def _restored_afterwards(oracle: Oracle) -> Iterator[None]:
    """Model and optimizer are afterwards what they were."""
    values, buffers = _parameter_values(oracle), oracle.buffers()
    own = {n: v for n, v in vars(oracle.optimizer).items() if not n.startswith("_") and n != "step"}
    kept = copy.deepcopy(own, _shared_parameters(oracle))
    yield
    vars(oracle.optimizer).update(kept)
    _restore(oracle, values)
    oracle.set_buffers(buffers)
    for p in oracle.model.parameters():
        p.grad = None


def _shared_parameters(oracle: Oracle) -> dict[int, Any]:
    """What a copy shares."""
    return {id(p): p for p in oracle.model.parameters()}


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


_BATCH_SIZE_SLACK = 1e4  # roundings of a forward that takes other kernels for another batch size


def check_user_code(oracle: Oracle, compute: str, world: int) -> TaskFault | None:
    """The first fault of the loss, of its gradient, or of one update."""
    return (
        check_loss_sums(oracle, compute, world)
        or check_gradient(oracle, world)
        or check_single_update(oracle, world)
    )


def check_loss_sums(oracle: Oracle, compute: str, world: int) -> TaskFault | None:
    """Whether totals and counts add up over samples.

    Args:
        compute: type of the arithmetic.
        world: number of ranks, all of which find the same.
    """
    if len(oracle.task.data) < 2:
        return None
    with generators_seeded(0):
        one, other = read_samples(oracle.task, [0, 1])  # once: data that augments gives others every time
    if _collate_draws(oracle, [one, other]):
        return None
    first, second, twice, both = (
        _loss_of_samples(oracle, samples) for samples in ([one], [other], [one, one], [one, other])
    )
    near = min(0.3, _BATCH_SIZE_SLACK * UNIT_ROUNDOFF[compute])
    for name, found, right in (
        ("a sample twice", twice, (2 * first[0], 2 * first[1])),
        ("two samples", both, (first[0] + second[0], first[1] + second[1])),
    ):
        for place, quantity in enumerate(("count", "total")):
            seen, wanted = found[1 - place], right[1 - place]
            size = max(abs(seen), abs(wanted), abs(first[0]) * place)
            if abs(seen - wanted) > near * size:
                return _loss_fault(f"{quantity} of {name}", seen, wanted, near * size, world, first, found)
    return None


def _loss_fault(
    name: str,
    seen: float,
    wanted: float,
    bound: float,
    world: int,
    one: Sequence[float],
    two: Sequence[float],
) -> TaskFault:
    text = f"the loss's {name} is {seen:.6g}; from one sample alone it would be {wanted:.6g}"
    cause = "the loss does not add up"
    if two[1] == one[1]:
        cause = "the loss counts a batch as one item"
        text += ": return Loss(sum, number of items), or Loss.mean(mean, number of items)"
    elif abs(two[0]) < 1.5 * abs(one[0]):
        cause = "the loss is a mean"
        text += ": it is a mean where a sum belongs; return Loss.mean(value, count)"
    finding = TensorComparison(-1, "loss", name, (abs(seen - wanted),) * world, bound)
    return finding, ErrorDiagnosis(cause, text)


def _collate_draws(oracle: Oracle, samples: list[Any]) -> bool:
    """Whether the collate function draws: what it makes of two samples is not theirs by intent."""
    found = set()
    for seed in range(3):
        with generators_seeded(seed):
            found.add(sha_of_batch(collate(oracle.task, samples)))
    return len(found) > 1


def _loss_of_samples(oracle: Oracle, samples: list[Any]) -> tuple[float, float]:
    """Total and count of some samples, in evaluation."""
    batch: Any = to_device(collate(oracle.task, samples), oracle.device)
    before = oracle.buffers()
    oracle.model.eval()
    with torch.no_grad(), oracle.autocast():
        loss = oracle.task.loss(oracle.model, batch)
    oracle.set_buffers(before)
    return float(loss.total), float(loss.count)
