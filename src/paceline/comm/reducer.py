"""The reducer: gradients of this rank in, sums over the group out, while the backward pass goes on.

Gradients are copied into flat buckets as they become ready; a full bucket is all-reduced at once, and
buckets are launched in one order on every rank. Buffers are allocated once.

Invariant: after `finish`, every rank of the group holds the same sums, and a parameter that had no
gradient on this rank counted as zero. It sums; dividing is the tail's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Gradients:
    """Summed gradients of one step.

    Args:
        tensors: by parameter index, in the parameter's shape; None where nobody has a gradient.
        flats: the storage that `tensors` are views of: a norm or a scale over these covers everything.
        norms: Euclidean norm of each of `flats`, 0-d.
        scale: what the sums were multiplied with before backward.
    """

    tensors: Sequence[Tensor | None]
    flats: Sequence[Tensor]
    norms: Sequence[Tensor]
    scale: float = 1.0

    def agreed(self, used: Sequence[bool], scale: float) -> Gradients:
        """Without those that no rank used (their storage holds zeros), and with their scale."""
        kept = [g if u else None for g, u in zip(self.tensors, used, strict=True)]
        return Gradients(kept, self.flats, self.norms, scale)


class Reducer(Protocol):
    """What a layout feeds during backward, and a rule empties after it."""

    @property
    def by_unit(self) -> bool:
        """Whether it takes every unit's gradients apart; if not, their sum over this rank's units."""

    def begin(self) -> None:
        """Open a step: nothing is ready."""

    def unit(self, shards: range, is_last: bool) -> None:
        """By unit only: what is ready from now on is the sum over these shards; no more follow the last."""

    def ready(self, index: int, grad: Tensor | None) -> None:
        """The gradient of parameter `index` is complete on this rank; may launch communication."""

    def finish(self) -> Gradients:
        """Wait for the sums; every parameter was called ready once."""

    def commit(self) -> None:
        """The sums have been applied: the step cannot be aborted any more."""

    def abort(self) -> None:
        """Drop a step that is not committed: afterwards all is as it was before `begin`."""

    def residuals(self) -> Sequence[tuple[str, int, Tensor]]:
        """What coding has lost: (which side's, parameter index, values in the parameter's shape)."""

    def set_residuals(self, found: Mapping[tuple[str, int], Tensor]) -> None:
        """Go on from these, by (side, parameter index); what is missing is zero."""


class TakesSums:
    """A reducer that is given sums over this rank's units."""

    by_unit = False

    def unit(self, shards: range, is_last: bool) -> None:
        """Nobody calls it."""


class WrappedReducer:
    """A reducer that passes everything on; a subclass changes one thing on the way."""

    def __init__(self, inner: Reducer) -> None:
        self.inner = inner

    @property
    def by_unit(self) -> bool:
        """As the inner one."""
        return self.inner.by_unit

    def begin(self) -> None:
        """Pass it on."""
        self.inner.begin()

    def unit(self, shards: range, is_last: bool) -> None:
        """Pass it on."""
        self.inner.unit(shards, is_last)

    def ready(self, index: int, grad: Tensor | None) -> None:
        """Pass it on."""
        self.inner.ready(index, grad)

    def finish(self) -> Gradients:
        """Pass it on."""
        return self.inner.finish()

    def commit(self) -> None:
        """Pass it on."""
        self.inner.commit()

    def abort(self) -> None:
        """Pass it on."""
        self.inner.abort()

    def residuals(self) -> Sequence[tuple[str, int, Tensor]]:
        """Pass it on."""
        return self.inner.residuals()

    def set_residuals(self, found: Mapping[tuple[str, int], Tensor]) -> None:
        """Pass it on."""
        self.inner.set_residuals(found)


class LocalReducer(TakesSums):
    """A group of one: the gradients are the sums."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._grads: list[Tensor | None] = [None] * len(parameters)

    def begin(self) -> None:
        """Forget the last step."""
        self._grads = [None] * len(self._grads)

    def ready(self, index: int, grad: Tensor | None) -> None:
        """Keep a reference; nothing is copied."""
        self._grads[index] = grad

    def finish(self) -> Gradients:
        """Return what there is."""
        flats = [grad for grad in self._grads if grad is not None]
        return Gradients(self._grads, flats, torch._foreach_norm(flats) if flats else [])

    def commit(self) -> None:
        """Nothing is kept between steps."""

    def abort(self) -> None:
        """Drop the references."""
        self.begin()

    def residuals(self) -> Sequence[tuple[str, int, Tensor]]:
        """Nothing is coded."""
        return ()

    def set_residuals(self, found: Mapping[tuple[str, int], Tensor]) -> None:
        """There is no coder to take them."""
