"""One optimizer step on gradients that still have to be multiplied by one number.

A fused optimizer takes the number into its kernel, which reads the gradients anyway; for any other the
gradients are multiplied first. Either way `p.grad` holds the multiplied gradient afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ScaledStep = Callable[[Sequence[Tensor], float], None]
"""`step(flats, multiplier)`: the storage of all gradients, and what each value is to be multiplied with."""

_FOLDING = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_LARGEST = torch.finfo(torch.float32).max


class MultipliedStep:
    """Multiply, then step: right for every optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, flats: Sequence[Tensor], multiplier: float) -> None:
        """See `ScaledStep`."""
        if multiplier != 1.0 and flats:
            torch._foreach_mul_(list(flats), multiplier)
        self._optimizer.step()


class FoldedStep:
    """The kernel of a fused optimizer divides each gradient by the inverse as it reads it: a pass less.

    Exactness: the inverse is rounded to float32, one rounding more than a multiplication.
    Source: `grad_scale` of torch's fused optimizers, made for `torch.amp.GradScaler`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer: Any = optimizer
        self._multiplied = MultipliedStep(optimizer)
        self._device = device

    def __call__(self, flats: Sequence[Tensor], multiplier: float) -> None:
        """See `ScaledStep`; a number whose inverse no float32 holds is multiplied."""
        if multiplier == 1.0 or not 1.0 / _LARGEST <= multiplier <= _LARGEST:
            self._multiplied(flats, multiplier)
            return
        self._optimizer.grad_scale = torch.tensor(1.0 / multiplier, dtype=torch.float32, device=self._device)
        try:
            self._optimizer.step()
        finally:
            del self._optimizer.grad_scale


def scaled_step(optimizer: torch.optim.Optimizer) -> ScaledStep:
    """The cheapest step that is right for this optimizer.

    Folded only into torch's own classes (a subclass may read gradients before the kernel does), only where
    all groups are fused and all parameters float32 on one device, and nobody looks at gradients
    before a step.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fused = all(group.get("fused") for group in optimizer.param_groups)
    alike = {(p.dtype, p.device) for p in parameters}
    folds = type(optimizer) in _FOLDING and getattr(optimizer, "_step_supports_amp_scaling", False)
    if not (folds and fused and len(alike) == 1) or optimizer._optimizer_step_pre_hooks:
        return MultipliedStep(optimizer)
    dtype, device = alike.pop()
    return FoldedStep(optimizer, device) if dtype is torch.float32 else MultipliedStep(optimizer)
