"""Recomputation: the activations inside blocks are discarded, and backward computes them again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from paceline.errors import TaskError
from paceline.layout.repetition import Contexts, contexts_of
from paceline.layout.segments import Link

Forward = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Run = Callable[[Forward, Contexts | None, Args, Kwargs], Any]
"""Runs a forward with its arguments such that backward computes it again, in its contexts."""


def recompute_blocks(
    model: nn.Module, choose: Callable[[nn.Module], Iterable[nn.Module]] | None, how: str = "blocks"
) -> int:
    """Discard the activations inside each block after its forward, and compute them again in backward.

    Args:
        model: changed in place; names of parameters stay.
        choose: the blocks of a model; by default the entries of every `nn.ModuleList`.
        how: "blocks" keeps the input of every one of L blocks and runs it twice; "segments" keeps about
            sqrt(L) of them and runs most blocks three times (`paceline.layout.segments`).
    Returns:
        Number of blocks.
    Exactness: bitwise; keyed dropout draws the same masks, PyTorch's own has its state restored, and buffers
    that the forward changes are changed once.
    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
    """
    blocks = recomputed_blocks(model, choose)
    if not blocks:
        raise TaskError(
            f'memory.recompute = "{how}", but the model has no nn.ModuleList and the task names no blocks',
            next_step='pass Task(blocks=...), or set memory.recompute = "none"',
        )
    run = _HOW[how](len(blocks))
    for block in blocks:
        block.__class__ = _recomputing(type(block), run)
    return len(blocks)


def recomputed_blocks(
    model: nn.Module, choose: Callable[[nn.Module], Iterable[nn.Module]] | None
) -> list[nn.Module]:
    """The blocks of a model: those that are chosen, or the entries of every `nn.ModuleList`."""
    return list(dict.fromkeys((choose or _module_lists)(model)))


def _module_lists(model: nn.Module) -> Iterable[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module


def _recomputing(kind: type[nn.Module], run: Run) -> type[nn.Module]:
    """A subclass whose forward is recomputed; unlike a wrapped method it follows a copy of the block."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return run(plain, contexts_of(self, _get_current_function_mode_stack()), args, kwargs)

    return type(f"Recomputed{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def _by_itself(plain: Forward, contexts: Contexts | None, args: Args, kwargs: Kwargs) -> Any:
    around: dict[str, Any] = {"context_fn": contexts} if contexts else {}
    return checkpoint(plain, *args, use_reentrant=False, **around, **kwargs)


def _in_segments(num_blocks: int) -> Run:
    longest = math.isqrt(num_blocks - 1) + 1  # the root, rounded up

    def run(plain: Forward, contexts: Contexts | None, args: Args, kwargs: Kwargs) -> Any:
        link = Link(plain, longest, contexts, args, kwargs)
        return link.mark(checkpoint(link, link.at, use_reentrant=False, preserve_rng_state=False))

    return run


_HOW: Mapping[str, Callable[[int], Run]] = {"blocks": lambda _: _by_itself, "segments": _in_segments}
