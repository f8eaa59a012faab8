"""The arithmetic of one forward and backward: autocast, compilation.

Parameters, gradients and optimizer state stay fp32 (master weights); only the arithmetic of the forward
and backward pass runs in the compute type.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_DTYPES_BY_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NO_AUTOCAST: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class MixedPrecision:
    """The type of the arithmetic.

    Args:
        compute: "fp32", "bf16" or "fp16".
        device_type: "cpu" or "cuda".
        seeds_everything: see `seed_micro_batch`.
        caches: cast a weight once a micro-batch. Threads share this cache, and each stage has its own:
            without it the gradient of a weight that is used twice does not depend on them.
    """

    compute: str
    device_type: str
    caches: bool = True
    seeds_everything: bool = False

    def autocast(self) -> AbstractContextManager[Any]:
        """Around one micro-batch's forward, anew for each: casts are cached inside it, with their graph."""
        off = self.compute == "fp32"
        if off and self.caches and not torch.is_autocast_enabled(self.device_type):
            return _NO_AUTOCAST  # what is off already costs nothing
        return torch.autocast(
            self.device_type,
            dtype=_DTYPES_BY_NAME[self.compute],
            enabled=not off,
            cache_enabled=self.caches,
        )


def compile_or_explain(model: nn.Module, device_type: str) -> str:
    """Compile the model in place if the machine can.

    Returns:
        An empty string, or why it runs without compilation.
    """
    if device_type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "compile = true needs a C++ compiler (g++ or clang++) and none is on PATH: running uncompiled"
    model.compile(dynamic=False)
    return ""
