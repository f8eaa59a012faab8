"""Norms of a whole gradient from the parts that ranks hold, each value counted once, and a clip before
encoding.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.reduction.gradients import GradientReduction, Gradients
from paceline.job.mesh import RankGroup
from paceline.state.slot import TensorSlot


class SharedNorm:
    """The norm of all gradients, from the norms of this rank's share.

    Args:
        group: the ranks whose shares make one gradient.
    Wire: one all_reduce of 8 bytes; none in a group of one.
    """

    def __init__(self, group: RankGroup, net: Net) -> None:
        self._group, self._net = group, net

    def __call__(self, grads: Gradients) -> float:
        """Return the norm of the sums, not yet divided; collective over the group. Waits for the device."""
        local = joint_norm(grads.norms)
        if self._group.size == 1:
            return local
        device = grads.flats[0].device if grads.flats else torch.device("cpu")
        total = torch.tensor(local**2, dtype=torch.float64, device=device)
        return float(self._net.all_reduce(total, self._group).wait().sqrt())


class CanonicalNorm:
    """The norm with one order of additions, which does not depend on buckets, ranks or threads.

    Each tensor is cut into the rows of its first dimension. A row's sum of squares is computed in float64
    from the row alone; all rows of all tensors are added in the order of the model. Ranks that hold other
    rows fill in theirs, and zeros elsewhere, so that nothing is rounded on the way.

    Args:
        slots: slots of the whole model, in its order.
        counted: the parts that this rank counts; each is counted once in the group, and has whole rows.
        group: the ranks whose parts make one gradient.
    Wire: one all_reduce of 8 bytes for every row of every parameter; none in a group of one.
    """

    def __init__(
        self, slots: Sequence[TensorSlot], counted: Sequence[TensorSlot], group: RankGroup, net: Net
    ) -> None:
        self._counted, self._group, self._net = counted, group, net
        self._first: dict[str, int] = {}
        self._num_rows = 0
        for slot in slots:
            self._first[slot.name] = self._num_rows
            self._num_rows += slot.shape[0] if slot.shape else 1

    def __call__(self, grads: Gradients) -> float:
        """Return the norm of the sums, not yet divided; collective over the group. Waits for the device."""
        device = grads.flats[0].device if grads.flats else torch.device("cpu")
        # Rows that other ranks count stay zero here, so the all_reduce rounds nothing.
        squares = torch.zeros(self._num_rows, dtype=torch.float64, device=device)
        for slot in self._counted:
            grad = grads.tensors.get(slot)
            if grad is not None:
                first = self._first[slot.name] + (slot.part[0][0] if slot.part else 0)
                sums = row_squares(grad)
                squares[first : first + len(sums)] = sums
        return float(self._net.all_reduce(squares, self._group).wait().sum().sqrt())


def local_norm(grads: Gradients) -> float:
    """Return the norm of this rank's share alone, not yet divided. Waits for the device, and for no other
    rank.
    """
    return joint_norm(grads.norms)


def row_squares(x: Tensor) -> Tensor:
    """Return sums of squares of the rows of x [rows, ...], float64 [rows]; a scalar is one row.

    Exactness: the bits of a row's sum depend only on that row and its width.
    """
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:])) if x.dim() else x.reshape(1, 1)
    # Rows of one value, as of a bias, need no reduction.
    if rows.shape[1] == 1:
        return rows[:, 0].to(torch.float64).square()
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()


def joint_norm(norms: Sequence[Tensor]) -> float:
    """Return the Euclidean norm over all tensors together, from the norms of each; 0 for none. Waits for
    the device.
    """
    if not norms:
        return 0.0
    device = norms[0].device
    on_one_device = [n if n.device == device else n.to(device) for n in norms]
    return float(torch.linalg.vector_norm(torch.stack(on_one_device)))


class LocalClip:
    """A reduction that clips this rank's gradient to 1/sqrt(N) of the limit of the whole one, for N ranks.

    Nothing is sent before the norm of all of it is known, so nothing is sent during backward. A gradient that
    is not finite is passed on as it is, so that the update step sees it.

    Args:
        inner: takes the clipped gradients.
        clip_norm: largest norm of the whole divided gradient.
        num_ranks: N; each has about an N-th of the items.
        divides: the update step divides by the number of items.
    Source: Lin et al. 2018, Deep Gradient Compression, arXiv:1712.01887, section 3.2 (local gradient
        clipping: were the
    gradients of N ranks independent, each would have 1/sqrt(N) of the norm of their sum).
    """

    def __init__(self, inner: GradientReduction, clip_norm: float, num_ranks: int, *, divides: bool) -> None:
        self._inner, self._limit = inner, clip_norm / math.sqrt(num_ranks)
        self._num_ranks, self._divides = num_ranks, divides
        self._held: dict[TensorSlot, Tensor | None] = {}
        self._divisor = 1.0

    @property
    def by_micro_batch(self) -> bool:
        return self._inner.by_micro_batch

    def begin(self, num_micro_batches: int | None = None) -> None:
        self._held, self._divisor = {}, 1.0
        self._inner.begin(num_micro_batches)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        self._inner.micro_batch(shards, is_last)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Hold a reference to the gradient, to scale it later."""
        self._held[slot] = grad

    def record_items(self, count: float, scale: float) -> None:
        """Set the number of items that this rank has run and the scale of their losses, before `close`."""
        self._divisor = scale * (max(1.0, count) * self._num_ranks if self._divides else 1.0)

    def close(self) -> None:
        """Clip the gradients, and pass all of them on."""
        # One norm over all gradients, so nothing can be passed on before the last one is there.
        factor = self._factor([grad for grad in self._held.values() if grad is not None])
        for slot, grad in self._held.items():
            self._inner.ready(slot, grad if grad is None or factor == 1.0 else grad * factor)
        self._held = {}
        self._inner.close()

    def _factor(self, grads: Sequence[Tensor]) -> float:
        norm = joint_norm(torch._foreach_norm(list(grads))) / self._divisor if grads else 0.0
        # `norm < inf` is false for NaN too: both pass through unchanged.
        return self._limit / norm if self._limit < norm < math.inf else 1.0

    def finish(self) -> Gradients:
        return self._inner.finish()

    def commit(self, used: Collection[str] | None = None) -> None:
        self._inner.commit(used)

    def abort(self) -> None:
        self._held = {}
        self._inner.abort()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        return self._inner.residuals()

    def set_residuals(self, residuals: Mapping[tuple[str, str], Tensor]) -> None:
        self._inner.set_residuals(residuals)

    def rescale(self, factor: float) -> None:
        self._inner.rescale(factor)
