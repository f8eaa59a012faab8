"""Hold tensors of every rank against those of the oracle on rank 0, each with a bound.

Bounds follow from what may differ between two right computations. u is the unit roundoff of a tensor's type,
or of float32 if that is coarser; V is the number of shards.

Gradients. Two sums of the same V terms in any two orders differ by at most 2 (V - 1) u times the sum of the
terms' magnitudes (Higham 2002, section 4.2), whatever cancels in the sum. Each term has the same bits on both
sides if both run the same kernels; else its own roundings are added. Where a term itself is computed in
parts, on several ranks, what may cancel inside it is measured (`noise`).

Norm. A float32 sum of n squares is off by about sqrt(n) u, with a factor of 8 nearly for sure (Higham & Mary
2019, A new approach to probabilistic rounding error analysis); its root by half of that.

Final gradients. One side divides and clips in one multiplication, the other in two: some u. If it is clipped,
the multiplier has the error of the norm. Below the smallest normal number errors are absolute.

Update. Both sides run the same optimizer on inputs that differ by a relative e. How much that moves its
result is measured, not guessed: the oracle makes the update again with gradients and state changed by a known
relative d, once to one side and once to opposite ones, which shows also what cancels in a moment. The larger
of the two changes, times e / d, is the first order of the error; a factor of 8 covers the rest.
Then each value is rounded when it is stored.
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
_KERNEL_SLACK = 8  # roundings of one kernel that may split its loop by the alignment of its input
_OTHER_KERNELS_SLACK = 64  # compiled kernels, and sums in parts, round between other operations
_MULTIPLIER_SLACK = 16  # roundings of what is divided, clipped and stored
_PROBABLE = 8  # standard deviations of a sum of rounding errors
_FIRST_ORDER = 8  # what the second order of an update may add to the first
_TINY = 2.0**-126  # below it float32 has fewer digits


@dataclass(frozen=True)
class TensorComparison:
    """The comparison of one tensor in one step.

    Args:
        quantity: "initial value", "loss", "gradient", "update" (norm and rate), "final gradient", "state" or
            "evaluation".
        errors: largest absolute difference from the oracle on each rank; infinite if one side has none.
        bound: what rounding alone may cause.
        part: of the model, whose update it was; empty: there is one for all of it.
    """

    step: int
    quantity: str
    tensor: str
    errors: tuple[float, ...]
    bound: float
    part: str = ""

    @property
    def error(self) -> float:
        """The largest error over all ranks."""
        return max(self.errors)

    @property
    def ok(self) -> bool:
        """Whether rounding explains the error."""
        return self.error <= self.bound


@dataclass(frozen=True)
class KernelAgreement:
    """Which arithmetic both sides run.

    Args:
        same: both sides run the same kernels on the same shapes, so that a shard has the same bits.
        compute: type of the arithmetic.
        in_parts: a shard is computed by several ranks together.
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
        """Largest error of each mean gradient: (2 V u + roundings inside a term) max(sum |G_s|) / count.

        Args:
            magnitudes: sums of |G_s|, by name.
            roundoffs: unit roundoff of each gradient.
            noise: how far other roundings inside terms were seen to move each, for terms that are computed in
                parts.
        """
        found = {}
        for name, magnitude in magnitudes.items():
            u = roundoffs[name]
            inside = (_OTHER_KERNELS_SLACK if self.in_parts else _KERNEL_SLACK) * u
            if not self.same:
                inside = _OTHER_KERNELS_SLACK * max(u, UNIT_ROUNDOFF[self.compute])
            undecided = _PROBABLE * noise.get(name, 0.0)
            found[name] = (
                (2 * num_shards * u + inside) * largest_magnitude(magnitude) + undecided
            ) / count + _TINY
        return found


def unit_roundoff(t: Tensor) -> float:
    """Unit roundoff of a tensor's type, but not below float32's; of float32 for integers."""
    inexact = t.dtype.is_floating_point or t.dtype.is_complex
    return max(_U, torch.finfo(t.dtype).eps / 2) if inexact else _U


def norm_error(gradients: NamedTensors) -> float:
    """Relative error of the norm of all these gradients."""
    n = sum(g.numel() for g in gradients.values())
    return _PROBABLE * math.sqrt(n) * _U + _MULTIPLIER_SLACK * _coarsest(gradients)


def multiplier_error(gradients: NamedTensors, clipped: bool) -> float:
    """Relative error of gradients after they were divided and clipped."""
    return _MULTIPLIER_SLACK * _coarsest(gradients) + (norm_error(gradients) if clipped else 0.0)


def final_bounds(final: NamedTensors, error: float) -> dict[str, float]:
    """Bounds of gradients that were divided and clipped."""
    return {name: error * largest_magnitude(g) + _TINY for name, g in final.items()}


def state_bounds(after: NamedTensors, moved: Mapping[str, float], error: float) -> dict[str, float]:
    """Bounds of parameters, optimizer state and buffers.

    Args:
        after: all of them, after the update.
        moved: by name, how far an update moves it that starts from relative errors of 1 (first order).
        error: relative error of the gradients.
    """
    return {
        name: _KERNEL_SLACK * unit_roundoff(value) * largest_magnitude(value)
        + _FIRST_ORDER * error * moved.get(name, 0.0)
        + _TINY
        for name, value in after.items()
    }


def largest_magnitude(value: Tensor) -> float:
    """The largest magnitude; 0 for none."""
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
    flat = (
        torch.cat([_reference_values(reference, n, like[n], device) for n in names])
        if names
        else torch.zeros(0)
    )
    flat = net.broadcast(flat, group).wait()
    pieces = flat.split([as_reals(like[n]).numel() for n in names])
    errors = torch.tensor(
        [_largest_error(mine.get(n), p, there) for n, p, there in zip(names, pieces, present, strict=True)],
        dtype=torch.float64,
        device=device,
    )
    table = torch.stack(net.all_gather(errors, group).wait()).T.tolist()
    return [
        TensorComparison(step, quantity, n, tuple(row), bound)
        for n, row, bound in zip(names, table, head[1].tolist(), strict=True)
    ]


def first_failure(findings: Sequence[TensorComparison]) -> TensorComparison | None:
    """The first finding that rounding does not explain."""
    return next((f for f in findings if not f.ok), None)


def _reference_values(
    reference: NamedTensors | None, name: str, like: Tensor, device: torch.device
) -> Tensor:
    if reference is None or name not in reference:
        return torch.zeros(as_reals(like).numel(), dtype=torch.float64, device=device)
    return as_reals(reference[name]).reshape(-1).to(device, torch.float64)


def _largest_error(mine: Tensor | None, reference: Tensor, present: bool) -> float:
    if (mine is not None) != present:
        return float("inf")
    if mine is None or not mine.numel():
        return 0.0
    difference = (as_reals(mine).reshape(-1).to(torch.float64) - reference).abs().max()
    return float("inf") if torch.isnan(difference) else float(difference)
