"""Where in a model a rehearsal is: before, inside or behind which of its layers.

Place 2k + 1 is inside the k-th call of a layer, forward or backward, and 2k between it and the call before.
Modules tell of forward, and the gradients of what a block was given and gave tell of backward; nothing that
is computed, or kept, changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.hooks import RemovableHandle

from paceline.plan.live_bytes import LiveBytes


class Shape(NamedTuple):
    """A tensor, without its memory."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


class Entry(NamedTuple):
    """A call of a layer.

    Args:
        layer: its number; of a block that of the block.
        live: bytes that were alive before it.
        given: its arguments, positional and by name; a `Shape` in place of each tensor.
    """

    layer: int
    live: int
    given: tuple[tuple[Any, ...], dict[str, Any]]


class Places:
    """Around a forward: tells where it is, and where its backward will be.

    Args:
        layers: by number, none inside another.
        live: is told.
    Attributes:
        entries: calls so far, in order.
    """

    def __init__(self, layers: Mapping[int, nn.Module], live: LiveBytes) -> None:
        self._layers, self._live = layers, live
        self._hooks: list[RemovableHandle] = []
        self.entries: list[Entry] = []

    def __enter__(self) -> None:
        for number, layer in self._layers.items():
            self._hooks += [
                layer.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True),
                layer.register_forward_hook(self._leave),
            ]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, number: int, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = len(self.entries)
        self.entries.append(Entry(number, self._live.now, tree_map(_shape, (args, kwargs))))
        self._live.at(2 * call + 1)
        _tell((args, kwargs), lambda: self._out_of(call))

    def _leave(self, _layer: nn.Module, _args: Any, results: Any) -> None:
        call = len(self.entries) - 1
        self._live.at(2 * call + 2)
        _tell(results, lambda: self._live.at(2 * call + 1))

    def _out_of(self, call: int) -> None:
        """Unless backward is in another layer already, which gave what this one was given."""
        if self._live.place == 2 * call + 1:
            self._live.at(2 * call)


def _shape(value: Any) -> Any:
    return Shape(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _tell(values: Any, arrived: Callable[[], None]) -> None:
    """Once a gradient of one of them comes."""
    for t in _differentiable(values):
        t.register_hook(partial(_ignore, arrived))


def _ignore(arrived: Callable[[], None], _grad: Tensor) -> None:
    arrived()


def _differentiable(values: Any) -> Iterator[Tensor]:
    for value in tree_iter(values):
        if isinstance(value, Tensor) and value.requires_grad:
            yield value
