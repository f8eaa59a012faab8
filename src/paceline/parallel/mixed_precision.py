"""Precision of forward and backward: autocast and compilation.

Parameters, gradients and optimizer state stay float32 (master weights); only the arithmetic of forward and
backward runs in the compute dtype.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.models.fused_operations import missing_compiler

_DTYPES_BY_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NO_AUTOCAST: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class MixedPrecision:
    """Compute dtype of forward and backward, and how autocast is used.

    Args:
        compute: "fp32", "bf16" or "fp16".
        device_type: "cpu" or "cuda".
        caches: cast a weight once for each micro-batch. Threads share this cache and every stage has its own,
            so a reproducible run turns it off: it changes the rounding of the gradient of a weight that is
            used twice.
    """

    compute: str
    device_type: str
    caches: bool = True

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a new context manager, which caches casts, for the forward of one micro-batch."""
        off = self.compute == "fp32"
        if off and self.caches and not torch.is_autocast_enabled(self.device_type):
            # Entering a disabled autocast takes time in every micro-batch.
            return _NO_AUTOCAST
        # With fp32, this switches off an autocast that the caller has entered: the recipe alone decides the
        # dtype.
        return torch.autocast(
            self.device_type,
            dtype=_DTYPES_BY_NAME[self.compute],
            enabled=not off,
            cache_enabled=self.caches,
        )


def compile_or_explain(model: nn.Module, device_type: str) -> str:
    """Compile the model in place if the machine has a compiler.

    Returns:
        An empty string, or the reason why the model runs without compilation.
    """
    if reason := missing_compiler(device_type):
        return f"compile = true has no effect: {reason}: running uncompiled"
    # Not torch.compile(model): its wrapper would put `_orig_mod.` before every parameter name.
    model.compile(dynamic=False)
    return ""
