"""Comparisons of every rank's tensors with those of the oracle on rank 0, and the bounds of their errors.

A bound is what rounding can cause between two correct computations. u is the unit roundoff of a tensor's
dtype, but at least that of float32; V is the number of virtual shards of a step.

Gradients. Two sums of the same V terms in different orders differ by at most 2 (V - 1) u times the sum of the
magnitudes of the terms (Higham 2002, section 4.2), also where terms cancel. A term has the same bits on both
sides if both run the same kernels; otherwise its own rounding errors are added. If several ranks compute a
term together, the error of cancellation inside it is measured (`oracle_update.measure_rounding_noise`).

Norm. A float32 sum of n squares has an error of about sqrt(n) u, and with very high probability at most 8
times that (Higham & Mary 2019, A new approach to probabilistic rounding error analysis); its root has half.

Final gradients. One side divides and clips in one multiplication, the other in two: a few u. If the gradient
is clipped, the multiplier has the error of the norm. Below the smallest normal number errors are absolute.

Update. Both sides run the same optimizer on inputs that differ by a relative e. The effect is measured
(`oracle_update.UpdateConditioning`): the oracle repeats the update with gradients and state changed by a
relative d, once in the same and once in opposite directions, which also shows cancellation in a moment. The
larger change times e / d is the first order of the error, and a factor of 8 covers the higher orders. Each
value is rounded once more when it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.job.mesh import RankGroup
from paceline.verification.oracle import as_reals

NamedTensors = Mapping[str, Tensor]
UNIT_ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
_U = UNIT_ROUNDOFF["fp32"]
# Roundings of a kernel that splits its loop by the alignment of its input.
_KERNEL_SLACK = 8
# Compiled kernels and partial sums round between different operations.
_OTHER_KERNELS_SLACK = 64
# Roundings of a division, a clip and a store.
_MULTIPLIER_SLACK = 16
# Standard deviations of a sum of rounding errors.
_PROBABLE = 8
# Factor for the higher orders of the error of an update.
_FIRST_ORDER = 8
# Below this float32 is subnormal and has fewer digits.
_TINY = 2.0**-126


@dataclass(frozen=True)
class TensorComparison:
    """The comparison of one tensor in one step.

    Args:
        quantity: "initial value", "loss", "gradient", "update" (norm and rate), "final gradient", "state" or
            "evaluation".
        errors: largest absolute difference from the oracle on each rank; infinite if only one side has the
            tensor.
        bound: the largest error that rounding can cause.
        part: submodule whose update was compared; empty: one update for the whole model.
    """

    step: int
    quantity: str
    tensor: str
    errors: tuple[float, ...]
    bound: float
    part: str = ""

    @property
    def error(self) -> float:
        """Return the largest error over all ranks."""
        return max(self.errors)

    @property
    def ok(self) -> bool:
        """Return whether rounding explains the error."""
        return self.error <= self.bound


@dataclass(frozen=True)
class KernelAgreement:
    """Agreement of both sides about the arithmetic of a shard.

    Args:
        same: both sides run the same kernels on the same shapes, so a shard has the same bits.
        compute: number format of the arithmetic.
        in_parts: several ranks compute a shard together.
    """

    same: bool
    compute: str
    in_parts: bool = False

    def gradient_bounds(
        self,
        magnitudes: NamedTensors,
        roundoffs: Mapping[str, float],
        num_shards: int,
        count: float,
        noise: Mapping[str, float],
    ) -> dict[str, float]:
        """Return the bound of each mean gradient: (2 V u + roundings inside a term) max(sum |G_s|) / count.

        Args:
            magnitudes: sums of |G_s|, by name.
            roundoffs: unit roundoff of each gradient.
            count: items of the step, by which gradients are divided.
            noise: measured change of each gradient under other roundings, if ranks share a shard.
        """
        bounds = {}
        for name, magnitude in magnitudes.items():
            u = roundoffs[name]
            inside = (_OTHER_KERNELS_SLACK if self.in_parts else _KERNEL_SLACK) * u
            if not self.same:
                inside = _OTHER_KERNELS_SLACK * max(u, UNIT_ROUNDOFF[self.compute])
            cancellation = _PROBABLE * noise.get(name, 0.0)
            total = (2 * num_shards * u + inside) * largest_magnitude(magnitude) + cancellation
            bounds[name] = total / count + _TINY
        return bounds


def unit_roundoff(t: Tensor) -> float:
    """Return the unit roundoff of a tensor's dtype, but at least that of float32; integers have float32's."""
    inexact = t.dtype.is_floating_point or t.dtype.is_complex
    return max(_U, torch.finfo(t.dtype).eps / 2) if inexact else _U


def norm_error(gradients: NamedTensors) -> float:
    """Return the relative error of the joint norm of gradients."""
    n = sum(g.numel() for g in gradients.values())
    return _PROBABLE * math.sqrt(n) * _U + _MULTIPLIER_SLACK * _coarsest(gradients)


def multiplier_error(gradients: NamedTensors, clipped: bool) -> float:
    """Return the relative error of gradients after division and clipping."""
    return _MULTIPLIER_SLACK * _coarsest(gradients) + (norm_error(gradients) if clipped else 0.0)


def final_bounds(final: NamedTensors, error: float) -> dict[str, float]:
    """Return the bounds of gradients after division and clipping."""
    return {name: error * largest_magnitude(g) + _TINY for name, g in final.items()}


def state_bounds(after: NamedTensors, changes: Mapping[str, float], error: float) -> dict[str, float]:
    """Return the bounds of parameters, optimizer state and buffers.

    Args:
        after: all of them after the update.
        changes: change of each tensor per relative error of the gradients (first order), by name.
        error: relative error of the gradients.
    """
    return {
        name: _KERNEL_SLACK * unit_roundoff(value) * largest_magnitude(value)
        + _FIRST_ORDER * error * changes.get(name, 0.0)
        + _TINY
        for name, value in after.items()
    }


def largest_magnitude(value: Tensor) -> float:
    """Return the largest magnitude; 0 for an empty tensor."""
    return float(as_reals(value).to(torch.float64).abs().max()) if value.numel() else 0.0


def _coarsest(tensors: NamedTensors) -> float:
    return max((unit_roundoff(t) for t in tensors.values()), default=_U)


def compare_tensors(
    step: int,
    quantity: str,
    mine: NamedTensors,
    reference: NamedTensors | None,
    bounds: Mapping[str, float] | None,
    like: NamedTensors,
    net: Net,
    group: RankGroup,
    device: torch.device,
) -> list[TensorComparison]:
    """Compare this rank's tensors with the reference of rank 0; collective, equal result on every rank.

    Args:
        mine: this rank's tensors.
        reference, bounds: the oracle's tensors and their bounds on rank 0; None on other ranks.
        like: a tensor of the right shape for every name that can occur; equal on every rank.
        device: device of the collectives.
    Wire: one broadcast of all values, one of presence and bounds, one all_gather of errors.
    """
    names = list(like)
    head = torch.zeros(2, len(names), dtype=torch.float64)
    if reference is not None and bounds is not None:
        head[0] = torch.tensor([float(n in reference) for n in names])
        head[1] = torch.tensor([bounds.get(n, 0.0) for n in names])
    head = net.broadcast(head.to(device), group).wait().cpu()
    present = [bool(x) for x in head[0]]
    # All ranks send the same number of values, so a tensor that the oracle does not have travels as zeros.
    flat = (
        torch.cat([_reference_values(reference, n, like[n], device) for n in names])
        if names
        else torch.zeros(0, device=device)
    )
    flat = net.broadcast(flat, group).wait()
    references = flat.split([as_reals(like[n]).numel() for n in names])
    errors = torch.tensor(
        [
            _largest_error(mine.get(n), x, is_present)
            for n, x, is_present in zip(names, references, present, strict=True)
        ],
        dtype=torch.float64,
        device=device,
    )
    table = torch.stack(net.all_gather(errors, group).wait()).T.tolist()
    return [
        TensorComparison(step, quantity, n, tuple(row), bound)
        for n, row, bound in zip(names, table, head[1].tolist(), strict=True)
    ]


def first_failure(comparisons: Sequence[TensorComparison]) -> TensorComparison | None:
    """Return the first comparison whose error exceeds its bound; None: all are within."""
    return next((comparison for comparison in comparisons if not comparison.ok), None)


def _reference_values(
    reference: NamedTensors | None, name: str, like: Tensor, device: torch.device
) -> Tensor:
    if reference is None or name not in reference:
        return torch.zeros(as_reals(like).numel(), dtype=torch.float64, device=device)
    return as_reals(reference[name]).reshape(-1).to(device, torch.float64)


def _largest_error(mine: Tensor | None, reference: Tensor, present: bool) -> float:
    if (mine is not None) != present:
        # A tensor that only one side has differs whatever its values are.
        return float("inf")
    if mine is None or not mine.numel():
        return 0.0
    # Sums such as the loss are on the CPU, and the reference is on the device of the collectives.
    own = as_reals(mine).reshape(-1).to(reference.device, torch.float64)
    difference = (own - reference).abs().max()
    return float("inf") if torch.isnan(difference) else float(difference)
