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
        how: "blocks" keeps the input of every one of L blocks and runs it twice, "0,1,4" that of the blocks
            with these numbers; "segments" keeps about sqrt(L) of them and runs most blocks three times
            (`paceline.layout.segments`).
    Returns:
        Number of blocks that are computed again.
    Raises:
        TaskError: there are no blocks, or not so many.
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
    if how not in _HOW:
        blocks = [blocks[number] for number in _numbers(how, len(blocks))]
    run = _HOW.get(how, _each_by_itself)(len(blocks))
    for block in blocks:
        block.__class__ = _recomputing(type(block), run)
    return len(blocks)


def _numbers(written: str, num_blocks: int) -> list[int]:
    found = [int(n) for n in written.split(",")]
    if found[-1] >= num_blocks:
        raise TaskError(
            f"memory.recompute names block {found[-1]}, and the model has blocks 0 to {num_blocks - 1}",
            next_step='set memory.recompute = "auto"',
        )
    return found


def recomputed_blocks(
    model: nn.Module, choose: Callable[[nn.Module], Iterable[nn.Module]] | None
) -> list[nn.Module]:
    """The blocks of a model: those that are chosen, or the entries of every `nn.ModuleList`."""
    return list(dict.fromkeys((choose or _module_lists)(model)))


def outermost_blocks(
    model: nn.Module, choose: Callable[[nn.Module], Iterable[nn.Module]] | None
) -> dict[int, nn.Module]:
    """By number, the blocks that lie in no other block."""
    blocks = recomputed_blocks(model, choose)
    inside = {one for block in blocks for one in block.modules() if one is not block}
    return {number: block for number, block in enumerate(blocks) if block not in inside}


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


def _each_by_itself(_num_blocks: int) -> Run:
    return _by_itself


_HOW: Mapping[str, Callable[[int], Run]] = {"blocks": _each_by_itself, "segments": _in_segments}
