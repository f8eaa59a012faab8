"""Hold tensors of every rank against those of the oracle on rank 0, each with a bound.

Bounds follow from what may differ between two right computations: the order in which V shard gradients
are added, and what a rounded multiplier (divide, clip) does to an update. u is the unit roundoff.
Source: Higham 2002, Accuracy and Stability of Numerical Algorithms, section 4.2 (error of summation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm import Net
from paceline.mesh import Group

Tensors = Mapping[str, Tensor]
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
_U = UNIT_ROUNDOFF["fp32"]
_KERNEL_SLACK = 8  # roundings of one kernel that may split its loop by the alignment of its input
_OTHER_KERNELS_SLACK = 64  # compiled or fused kernels round between other operations
NORM_ERROR = 1e-4  # of a float32 norm over millions of values
_SCALE_ERROR = 1e-6  # of one multiplier without a clip
_STEP_FACTOR = 8  # how much an optimizer may enlarge a relative error of the gradient


@dataclass(frozen=True)
class Finding:
    """The comparison of one tensor in one step.

    Args:
        quantity: "initial value", "loss", "gradient", "update" (norm and rate), "final gradient" or "state".
        errors: largest absolute difference from the oracle on each rank; infinite if one side has none.
        bound: what rounding alone may cause.
    """

    step: int
    quantity: str
    tensor: str
    errors: tuple[float, ...]
    bound: float

    @property
    def error(self) -> float:
        """The largest error over all ranks."""
        return max(self.errors)

    @property
    def ok(self) -> bool:
        """Whether rounding explains the error."""
        return self.error <= self.bound


@dataclass(frozen=True)
class Kernels:
    """Which arithmetic both sides run.

    Args:
        same: both sides run the same kernels on the same shapes, so that a shard has the same bits.
        compute: type of the arithmetic.
    """

    same: bool
    compute: str

    def gradient_bounds(self, magnitudes: Tensors, num_shards: int, count: float) -> dict[str, float]:
        """Largest error of each mean gradient: (2 V + slack) u max(sum |G_s|) / count."""
        inside = _KERNEL_SLACK * _U if self.same else _OTHER_KERNELS_SLACK * UNIT_ROUNDOFF[self.compute]
        relative = 2 * num_shards * _U + inside
        return {name: relative * _largest(m) / count for name, m in magnitudes.items()}


def relative_bounds(values: Tensors, multiplier_error: float) -> dict[str, float]:
    """Bounds of what is proportional to the gradient: final gradients and moments."""
    relative = _KERNEL_SLACK * _U + _STEP_FACTOR * multiplier_error
    return {name: relative * _largest(value) for name, value in values.items()}


def update_bounds(before: Tensors, after: Tensors, multiplier_error: float) -> dict[str, float]:
    """Bounds of parameters: rounding of the value, and of the change that one update made to it."""
    return {
        name: _KERNEL_SLACK * _U * _largest(value)
        + _STEP_FACTOR * multiplier_error * _largest(value - before[name])
        for name, value in after.items()
    }


def state_bounds(before: Tensors, after: Tensors, buffers: Tensors, error: float) -> dict[str, float]:
    """Parameters and buffers by what one update changed; optimizer state by its size."""
    running = {f"model/{name}" for name in buffers}
    model = {n: t for n, t in after.items() if n.startswith("model/") and n not in running}
    optimizer = {n: t for n, t in after.items() if n.startswith("optimizer/")}
    return (
        update_bounds(before, {n: after[n] for n in sorted(running & after.keys())}, multiplier_error(False))
        | update_bounds(before, model, error)
        | relative_bounds(optimizer, error)
    )


def multiplier_error(clipped: bool) -> float:
    """Relative error of the factor by which gradients are divided and clipped."""
    return NORM_ERROR if clipped else _SCALE_ERROR


def compare(
    step: int,
    quantity: str,
    mine: Tensors,
    reference: Tensors | None,
    bounds: Mapping[str, float] | None,
    like: Tensors,
    net: Net,
    group: Group,
    device: torch.device,
) -> list[Finding]:
    """Compare this rank's tensors with rank 0's reference; collective, equal result on every rank.

    Args:
        mine: this rank's tensors.
        reference, bounds: the oracle's, on rank 0; None on other ranks.
        like: every name that can occur, with a tensor of its shape; equal on every rank.
        device: where the values travel from.
    Wire: one broadcast of all values, one of presence and bounds, one all_gather of errors.
    """
    names = list(like)
    head = torch.zeros(2, len(names), dtype=torch.float64)
    if reference is not None and bounds is not None:
        head[0] = torch.tensor([float(n in reference) for n in names])
        head[1] = torch.tensor([bounds.get(n, 0.0) for n in names])
    head = net.broadcast(head.to(device), group).wait().cpu()
    present = [bool(x) for x in head[0]]
    flat = torch.cat([_value(reference, n, like[n], device) for n in names]) if names else torch.zeros(0)
    flat = net.broadcast(flat, group).wait()
    pieces = flat.split([like[n].numel() for n in names])
    errors = torch.tensor(
        [_error(mine.get(n), p, there) for n, p, there in zip(names, pieces, present, strict=True)],
        dtype=torch.float64,
        device=device,
    )
    table = torch.stack(net.all_gather(errors, group).wait()).T.tolist()
    return [
        Finding(step, quantity, n, tuple(row), bound)
        for n, row, bound in zip(names, table, head[1].tolist(), strict=True)
    ]


def first_failure(findings: Sequence[Finding]) -> Finding | None:
    """The first finding that rounding does not explain."""
    return next((f for f in findings if not f.ok), None)


def _value(reference: Tensors | None, name: str, like: Tensor, device: torch.device) -> Tensor:
    if reference is None or name not in reference:
        return torch.zeros(like.numel(), dtype=torch.float64, device=device)
    return reference[name].detach().reshape(-1).to(torch.float64)


def _error(mine: Tensor | None, reference: Tensor, present: bool) -> float:
    if (mine is not None) != present:
        return float("inf")
    if mine is None or not mine.numel():
        return 0.0
    difference = (mine.detach().reshape(-1).to(torch.float64) - reference).abs().max()
    return float("inf") if torch.isnan(difference) else float(difference)


def _largest(value: Tensor) -> float:
    return float(value.detach().abs().max()) if value.numel() else 0.0
