"""What is around a block's forward when backward repeats it: the modes and the buffers of the first time.

Invariant: a repetition computes what the forward computed, and leaves no trace. A forward that changes a
persistent buffer, such as the running statistics of BatchNorm, changes it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Mode = AbstractContextManager[Any]
Contexts = Callable[[], tuple[Mode, Mode]]
_Place = tuple[dict[str, Tensor | None], str]


def contexts_of(block: nn.Module, modes: Sequence[Mode]) -> Contexts | None:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint` for one forward; None if nothing is needed.

    Args:
        modes: that are around the forward; backward runs outside of them.
    """
    places = [] if torch.compiler.is_compiling() else list(_persistent(block))
    return partial(_contexts, places, modes) if places or modes else None


def is_repeated_in_modes(context_fn: object) -> bool:
    """Whether a checkpoint was given what `contexts_of` returned."""
    return isinstance(context_fn, partial) and context_fn.func is _contexts


def _contexts(places: Sequence[_Place], modes: Sequence[Mode]) -> tuple[Mode, Mode]:
    first = _First(places)
    return first, _Repeated(first, modes)


class _First(AbstractContextManager[None]):
    """Around the forward: keeps copies of the buffers (BatchNorm counts no version where it changes one)."""

    def __init__(self, places: Sequence[_Place]) -> None:
        self._places = places
        self.before: list[tuple[_Place, Tensor]] = []

    def __enter__(self) -> None:
        held = [(place, place[0][place[1]]) for place in self._places]
        self.before = [(place, b.detach().clone()) for place, b in held if b is not None]

    def __exit__(self, *_: object) -> None:
        return None


class _Repeated(AbstractContextManager[None]):
    """Around the repetition: buffers are as they were before the forward, and then as they were."""

    def __init__(self, first: _First, modes: Sequence[Mode]) -> None:
        self._first, self._modes = first, modes

    def __enter__(self) -> None:
        self._stack = ExitStack()
        for mode in self._modes:
            self._stack.enter_context(mode)
        self._now = [(place, place[0][place[1]]) for place, _ in self._first.before]
        for (table, name), copy in self._first.before:
            table[name] = copy.clone()

    def __exit__(self, *error: Any) -> None:
        for (table, name), b in self._now:
            table[name] = b
        self._stack.__exit__(*error)


def _persistent(block: nn.Module) -> Iterator[_Place]:
    for module in block.modules():
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                yield module._buffers, name
