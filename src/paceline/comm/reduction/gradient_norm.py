"""The norm of a whole gradient from the parts that ranks hold, each value counted once.

Clips what one rank gives to a sum, before coding keeps most of it for later.
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
    """From the norms of this rank's share.

    Args:
        group: the ranks whose shares make one gradient.
    Wire: one all_reduce of 8 bytes; none in a group of one.
    """

    def __init__(self, group: RankGroup, net: Net) -> None:
        self._group, self._net = group, net

    def __call__(self, grads: Gradients) -> float:
        """Of the sums, not yet divided; collective over the group. Waits for the device."""
        mine = joint_norm(grads.norms)
        if self._group.size == 1:
            return mine
        device = grads.flats[0].device if grads.flats else torch.device("cpu")
        total = torch.tensor(mine**2, dtype=torch.float64, device=device)
        return float(self._net.all_reduce(total, self._group).wait().sqrt())


class CanonicalNorm:
    """In one order of additions, which does not depend on buckets, ranks or threads.

    Each tensor is cut into the rows of its first dimension. A row's sum of squares is taken in float64 from
    the row alone; all rows of all tensors are added in the order of the model. Ranks that hold other rows
    fill in theirs, and zeros elsewhere, so that nothing is rounded on the way.

    Args:
        slots: of the whole model, in its order.
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
        """See `SharedNorm`."""
        device = grads.flats[0].device if grads.flats else torch.device("cpu")
        squares = torch.zeros(self._num_rows, dtype=torch.float64, device=device)
        for slot in self._counted:
            part = grads.tensors.get(slot)
            if part is not None:
                first = self._first[slot.name] + (slot.part[0][0] if slot.part else 0)
                found = row_squares(part)
                squares[first : first + len(found)] = found
        return float(self._net.all_reduce(squares, self._group).wait().sum().sqrt())


def local_norm(grads: Gradients) -> float:
    """Of this rank's share alone, not yet divided. Waits for the device, and for nobody else."""
    return joint_norm(grads.norms)


def row_squares(x: Tensor) -> Tensor:
    """Sums of squares of the rows of x [rows, ...], float64 [rows]; a scalar is one row.

    Exactness: the bits of a row's sum depend on that row and on its width alone.
    """
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:])) if x.dim() else x.reshape(1, 1)
    if rows.shape[1] == 1:
        return rows[:, 0].to(torch.float64).square()
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()


def joint_norm(norms: Sequence[Tensor]) -> float:
    """Euclidean norm over all tensors together, from the norms of each; 0 for none. Waits for the device."""
    if not norms:
        return 0.0
    device = norms[0].device
    there = [n if n.device == device else n.to(device) for n in norms]
    return float(torch.linalg.vector_norm(torch.stack(there)))


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

    def __init__(self, inner: GradientReduction, clip_norm: float, num_ranks: int, *, divides: bool) -> None:
        self._inner, self._limit = inner, clip_norm / math.sqrt(num_ranks)
        self._num_ranks, self._divides = num_ranks, divides
        self._held: dict[TensorSlot, Tensor | None] = {}
        self._divisor = 1.0

    @property
    def by_micro_batch(self) -> bool:
        """See `GradientSink`."""
        return self._inner.by_micro_batch

    def begin(self, num_micro_batches: int | None = None) -> None:
        """See `GradientReduction`."""
        self._held, self._divisor = {}, 1.0
        self._inner.begin(num_micro_batches)

    def micro_batch(self, shards: range, is_last: bool) -> None:
        """See `GradientSink`."""
        self._inner.micro_batch(shards, is_last)

    def ready(self, slot: TensorSlot, grad: Tensor | None) -> None:
        """Keep a reference."""
        self._held[slot] = grad

    def record_items(self, count: float, scale: float) -> None:
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
        """See `GradientReduction`."""
        return self._inner.finish()

    def commit(self, used: Collection[str] | None = None) -> None:
        """See `GradientReduction`."""
        self._inner.commit(used)

    def abort(self) -> None:
        """See `GradientReduction`."""
        self._held = {}
        self._inner.abort()

    def residuals(self) -> Sequence[tuple[str, TensorSlot, Tensor]]:
        """See `GradientReduction`."""
        return self._inner.residuals()

    def set_residuals(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `GradientReduction`."""
        self._inner.set_residuals(found)

    def rescale(self, factor: float) -> None:
        """See `GradientReduction`."""
        self._inner.rescale(factor)
