"""Recomputation in segments: of a chain of blocks the input of every s-th one is kept.

A block whose input is the untouched result of the block before it keeps nothing. When backward comes to a
segment, its blocks run once more from the kept input, which gives the inputs of all of them; then each block
runs again for its own backward, and its input goes. With L blocks in segments of sqrt(L) that is memory for
about 2 sqrt(L) inputs and one block, for two more forwards in place of one.

Invariant: whatever the model does between two blocks is not repeated, so a result that went through anything
else, or was written to, begins a segment. A link knows its own forward alone: forwards may lie in each other,
on any thread.

Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, sections 4.2, 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from paceline.layout.repetition import Contexts, Mode

_MARK = "_paceline_made_by"
_NESTED = (tuple, list, dict)


@dataclass(frozen=True)
class _Origin:
    """Which call made a tensor, as which of its results, and how often it had been written to then."""

    link: Link
    place: int
    version: int


@dataclass(frozen=True)
class _Made:
    """An argument that is found again: a result of an earlier link."""

    link: Link
    place: int
    requires_grad: bool

    def tensor(self) -> Tensor:
        return self.link.results()[self.place].detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class _Kept:
    """An argument that is kept."""

    value: Tensor
    version: int
    requires_grad: bool

    def tensor(self) -> Tensor:
        if self.value._version != self.version:
            raise RuntimeError(
                "a tensor that a recomputed block was called with was written to before backward needed it"
            )
        return self.value.detach().requires_grad_(self.requires_grad)


class Link:
    """One call of a block in one forward: run it, then keep as little as finds its arguments again.

    Args:
        run: the block's forward.
        longest: blocks in a segment.
        contexts: what is around the forward and around its repetitions; see `repetition`.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        longest: int,
        contexts: Contexts | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._run = run
        around: tuple[Mode, Mode] = contexts() if contexts else (nullcontext(), nullcontext())
        self._first, self._repeated = around
        self._passed: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._kept = _each(Tensor, (args, kwargs), lambda t: _shortest(t, longest))
        self._before = {one.link for one in _found(_Made, self._kept)}
        self.depth = 1 + max((link.depth for link in self._before), default=0)
        tensors = list(_found(Tensor, (args, kwargs)))
        self.at = tensors[0].new_empty(0) if tensors else torch.empty(0)
        self._random = self._random_state(), get_device_states(*tensors)
        self._results: list[Tensor] | None = None

    def __call__(self, _at: Tensor) -> Any:
        """Run: with what the model passed at first, and later with what is found again, which then goes."""
        passed, self._passed = self._passed, None
        if passed is not None:
            with self._first:
                return self._run(*passed[0], **passed[1])
        args, kwargs = self._arguments()
        for link in self._before:
            link.forget()
        return self._again(args, kwargs)

    def mark(self, results: Any) -> Any:
        """Let the next block know who made these; a leaf may outlive this forward, and is kept."""
        for place, t in enumerate(_found(Tensor, results)):
            if t.grad_fn is not None:
                setattr(t, _MARK, _Origin(self, place, t._version))
        return results

    def results(self) -> list[Tensor]:
        """Of the block, found again if they are not there."""
        if self._results is None:
            args, kwargs = self._arguments()
            with saved_tensors_hooks(_drop, _never):
                self._results = [t.detach() for t in _found(Tensor, self._again(args, kwargs))]
        return self._results

    def forget(self) -> None:
        """The results are not needed again; if they are, they are found again."""
        self._results = None

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run with the random numbers of the forward, in its modes and on the buffers that it had."""
        cpu, (devices, states) = self._random
        with self._repeated, torch.random.fork_rng(devices):
            torch.set_rng_state(cpu)
            set_device_states(devices, states)
            return self._run(*args, **kwargs)

    def _random_state(self) -> Tensor:
        """Of the processor's generator, uint8 [5056]; blocks that draw nothing share one."""
        now = torch.get_rng_state()
        known = (link._random[0] for link in self._before)
        return next((state for state in known if torch.equal(state, now)), now)

    def _arguments(self) -> Any:
        return _each((_Made, _Kept), self._kept, lambda one: one.tensor())


def _shortest(t: Tensor, longest: int) -> _Made | _Kept:
    origin = getattr(t, _MARK, None)
    if origin is not None and origin.version == t._version and origin.link.depth < longest:
        return _Made(origin.link, origin.place, t.requires_grad)
    return _Kept(t.detach(), t._version, t.requires_grad)


def _drop(t: Tensor) -> None:
    """Gradients are on, so that the kernels are those of the forward; nothing is saved."""


def _never(saved: None) -> Tensor:
    raise AssertionError("nothing goes back through a forward that only finds inputs again")


def _found(kind: Any, value: Any) -> Iterator[Any]:
    """What is of a kind in nested arguments or results, in order."""
    if isinstance(value, kind):
        yield value
    elif type(value) in _NESTED:
        for one in value.values() if type(value) is dict else value:
            yield from _found(kind, one)


def _each(kind: Any, value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested arguments with everything of a kind changed; what is in other objects stays as it is."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {name: _each(kind, one, change) for name, one in value.items()}
    return type(value)(_each(kind, one, change) for one in value) if type(value) in (tuple, list) else value
