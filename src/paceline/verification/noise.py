"""How far the rounding of a micro-batch's own arithmetic moves a gradient, measured.

Where both sides run other kernels on a term (a matrix product that is cut among ranks, statistics over all
ranks), a gradient that is zero but for rounding has no digit in common on the two sides, and its own size
says nothing about its error. So the oracle computes it again, with every parameter moved by one rounding in a
direction that is drawn: what changes is what rounding leaves undecided.
Source: Vignes 2004, Discrete Stochastic Arithmetic for Validating Results of Numerical Software (the CESTAC
method).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.data import MicroBatch
from paceline.verification.compare import largest, unit_of
from paceline.verification.oracle import Oracle
from paceline.verification.plain_buffers import Tensors

_DRAWS = 3


def rounding_noise(
    oracle: Oracle, micro_batches: tuple[MicroBatch, ...], scale: float, sums: Tensors, roundoff: float
) -> dict[str, float]:
    """By name, the largest change of a summed gradient under other roundings.

    Args:
        oracle: in the state from which `sums` were made; afterwards again.
        scale: of the loss, see `Oracle.accumulate`.
        sums: of the gradients as they are.
        roundoff: of the arithmetic; coarser types of a parameter have their own.
    """
    found = dict.fromkeys(sums, 0.0)
    generator = torch.Generator().manual_seed(0)
    parameters = dict(oracle.model.named_parameters())
    kept = {name: p.detach().clone() for name, p in parameters.items()}
    for _ in range(_DRAWS):
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(_rounded(kept[name], roundoff, generator))
        for name, g in oracle.accumulate(micro_batches, scale).gradients.items():
            if name in sums:
                found[name] = max(found[name], largest(g - sums[name]))
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(kept[name])
    return found


def _rounded(value: Tensor, roundoff: float, generator: torch.Generator) -> Tensor:
    """Each value moved by a unit roundoff, up or down."""
    draws = torch.randint(2, value.shape, generator=generator).to(value.device)
    return value * (1 + 2 * max(roundoff, unit_of(value)) * (2 * draws - 1).to(value.real.dtype))
