"""Clips what one rank gives to a sum, before coding keeps most of it for later."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.reduction.gradients import Gradients, Reduction
from paceline.comm.reduction.norm import joint_norm
from paceline.slot import Slot


class LocalClip:
    """Shortens this rank's gradient to 1/sqrt(N) of what the whole one may have, for N ranks.

    Nothing leaves before the norm of all of it is known, so nothing is sent while backward runs. A gradient
    that is not finite is handed on as it is, so that the update step sees it.

    Args:
        inner: takes what is left of each gradient.
        clip_norm: of the whole divided gradient.
        num_ranks: N; each gives about an N-th of the items.
        divides: the update step divides by the number of items.
    Source: Lin et al. 2018, Deep Gradient Compression, arXiv:1712.01887, section 3.2 (local gradient
    clipping: were the gradients of N ranks independent, each would have 1/sqrt(N) of the norm of their sum).
    """

    def __init__(self, inner: Reduction, clip_norm: float, num_ranks: int, *, divides: bool) -> None:
        self._inner, self._limit = inner, clip_norm / math.sqrt(num_ranks)
        self._num_ranks, self._divides = num_ranks, divides
        self._held: dict[Slot, Tensor | None] = {}
        self._divisor = 1.0

    @property
    def by_micro_batch(self) -> bool:
        """See `GradientSink`."""
        return self._inner.by_micro_batch

    def begin(self, num_micro_batches: int | None = None) -> None:
        """See `Reduction`."""
        self._held, self._divisor = {}, 1.0
        self._inner.begin(num_micro_batches)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """See `GradientSink`."""
        self._inner.micro_batch(shards, is_last)

    def ready(self, slot: Slot, grad: Tensor | None) -> None:
        """Keep a reference."""
        self._held[slot] = grad

    def ran(self, count: float, scale: float) -> None:
        """What this rank has run in this step, before `close`: so many items, with losses times `scale`."""
        self._divisor = scale * (max(1.0, count) * self._num_ranks if self._divides else 1.0)

    def close(self) -> None:
        """Clip, and hand all of it on."""
        factor = self._factor([grad for grad in self._held.values() if grad is not None])
        for slot, grad in self._held.items():
            self._inner.ready(slot, grad if grad is None or factor == 1.0 else grad * factor)
        self._held = {}
        self._inner.close()

    def _factor(self, grads: Sequence[Tensor]) -> float:
        norm = joint_norm(torch._foreach_norm(list(grads))) / self._divisor if grads else 0.0
        return self._limit / norm if self._limit < norm < math.inf else 1.0

    def finish(self) -> Gradients:
        """See `Reduction`."""
        return self._inner.finish()

    def commit(self, used: Collection[str] | None = None) -> None:
        """See `Reduction`."""
        self._inner.commit(used)

    def abort(self) -> None:
        """See `Reduction`."""
        self._held = {}
        self._inner.abort()

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """See `Reduction`."""
        return self._inner.lost()

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `Reduction`."""
        self._inner.set_lost(found)

    def rescale(self, factor: float) -> None:
        """See `Reduction`."""
        self._inner.rescale(factor)
