"""Reductions of a group of one: nothing is sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.reduction.gradients import Gradients
from paceline.comm.reduction.tree import Carry
from paceline.slot import Slot


class LocalReducer:
    """A group of one: the gradients are the sums, and nothing is copied.

    Args:
        counts: see `Reducer`.
    """

    by_micro_batch = False

    def __init__(self, tensors: Mapping[Slot, Tensor], counts: bool = True) -> None:
        self._grads: dict[Slot, Tensor | None] = dict.fromkeys(tensors)
        self._counts = counts

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Forget the last step."""
        self._grads = dict.fromkeys(self._grads)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """Not called, as `by_micro_batch` is false."""

    def ready(self, slot: Slot, grad: Tensor | None) -> None:
        """Keep a reference."""
        self._grads[slot] = grad

    def close(self) -> None:
        """Nothing was launched."""

    def finish(self) -> Gradients:
        """Return what there is."""
        flats = [grad for grad in self._grads.values() if grad is not None]
        return Gradients(self._grads, flats, torch._foreach_norm(flats) if flats and self._counts else [])

    def commit(self, used: Collection[str] | None = None) -> None:
        """Nothing is kept between steps."""

    def abort(self) -> None:
        """Drop the references."""
        self.begin()

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """Nothing is coded."""
        return ()

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """Does nothing: there is no codec."""

    def rescale(self, factor: float) -> None:
        """Nothing is coded."""


class TreeReducer(LocalReducer):
    """A group of one whose shards are added in the order of the tree.

    Args:
        nodes: of the tree, that this rank holds.
    Exactness: bitwise.
    """

    by_micro_batch = True

    def __init__(self, tensors: Mapping[Slot, Tensor], nodes: Sequence[range]) -> None:
        super().__init__(tensors, counts=False)
        self._carries = {slot: Carry(nodes) for slot in tensors}
        self._place = range(0)

    def begin(self, num_micro_batches: int | None = None) -> None:
        """Drop partial sums."""
        super().begin()
        for carry in self._carries.values():
            carry.close()

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """What is ready from now on belongs to these shards."""
        self._place = shards

    def ready(self, slot: Slot, grad: Tensor | None) -> None:
        """Add the gradient to the tree; it is kept and changed."""
        self._carries[slot].push(self._place, grad)

    def take(self) -> dict[Slot, dict[int, Tensor]]:
        """By slot, the sums by place of their node; those without a gradient are not there."""
        return {slot: carry.close() for slot, carry in self._carries.items()}

    def finish(self) -> Gradients:
        """The sums of the only node; a tensor without a gradient is None."""
        self._grads = {slot: next(iter(sums.values()), None) for slot, sums in self.take().items()}
        found = super().finish()
        without_negative_zeros(found.flats)
        return found


def without_negative_zeros(flats: Sequence[Tensor]) -> Sequence[Tensor]:
    """-0.0 becomes 0.0, in place: whether nothing or a zero was added must not show."""
    if flats:
        torch._foreach_add_(list(flats), 0.0)
    return flats
