"""Precision and memory of one forward and backward: autocast, recomputation, compilation.

Parameters, gradients and optimizer state stay fp32 (master weights); only the arithmetic of the forward
and backward pass runs in the compute type.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from paceline.errors import TaskError
from paceline.layout.repetition import contexts_of

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
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
            return nullcontext()  # what is off already costs nothing
        return torch.autocast(
            self.device_type,
            dtype=_TYPES[self.compute],
            enabled=not off,
            cache_enabled=self.caches,
        )


def recompute_blocks(model: nn.Module, choose: Callable[[nn.Module], Iterable[nn.Module]] | None) -> int:
    """Discard the activations inside each block after its forward, and compute them again in backward.

    Args:
        model: changed in place; names of parameters stay.
        choose: the blocks of a model; by default the entries of every `nn.ModuleList`.
    Returns:
        Number of blocks.
    Exactness: bitwise; keyed dropout draws the same masks, PyTorch's own has its state restored, and buffers
    that the forward changes are changed once.
    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
    """
    blocks = recomputed_blocks(model, choose)
    if not blocks:
        raise TaskError(
            'memory.recompute = "blocks", but the model has no nn.ModuleList and the task names no blocks',
            next_step='pass Task(blocks=...), or set memory.recompute = "none"',
        )
    for block in blocks:
        block.__class__ = _recomputing(type(block))
    return len(blocks)


def recomputed_blocks(
    model: nn.Module, choose: Callable[[nn.Module], Iterable[nn.Module]] | None
) -> list[nn.Module]:
    """The blocks of a model: those that are chosen, or the entries of every `nn.ModuleList`."""
    return list(dict.fromkeys((choose or _module_lists)(model)))


def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose forward is recomputed; unlike a wrapped method it follows a copy of the block."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        contexts = contexts_of(self, _get_current_function_mode_stack())
        around: dict[str, Any] = {"context_fn": contexts} if contexts else {}
        return checkpoint(plain, *args, use_reentrant=False, **around, **kwargs)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def _module_lists(model: nn.Module) -> Iterable[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module


def compile_or_explain(model: nn.Module, device_type: str) -> str:
    """Compile the model in place if the machine can.

    Returns:
        An empty string, or why it runs without compilation.
    """
    if device_type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "compile = true needs a C++ compiler (g++ or clang++) and none is on PATH: running uncompiled"
    model.compile(dynamic=False)
    return ""
