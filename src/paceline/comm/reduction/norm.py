"""The norm of a whole gradient from the parts that ranks hold, each value counted once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.reduction.gradients import Gradients
from paceline.mesh import Group
from paceline.slot import Slot


class AnyOrderNorm:
    """From the norms of this rank's share.

    Args:
        group: the ranks whose shares make one gradient.
    Wire: one all_reduce of 8 bytes; none in a group of one.
    """

    def __init__(self, group: Group, net: Net) -> None:
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

    def __init__(self, slots: Sequence[Slot], counted: Sequence[Slot], group: Group, net: Net) -> None:
        self._counted, self._group, self._net = counted, group, net
        self._first: dict[str, int] = {}
        self._num_rows = 0
        for slot in slots:
            self._first[slot.name] = self._num_rows
            self._num_rows += slot.shape[0] if slot.shape else 1

    def __call__(self, grads: Gradients) -> float:
        """See `AnyOrderNorm`."""
        device = grads.flats[0].device if grads.flats else torch.device("cpu")
        squares = torch.zeros(self._num_rows, dtype=torch.float64, device=device)
        for slot in self._counted:
            part = grads.tensors.get(slot)
            if part is not None:
                first = self._first[slot.name] + (slot.part[0][0] if slot.part else 0)
                found = row_squares(part)
                squares[first : first + len(found)] = found
        return float(self._net.all_reduce(squares, self._group).wait().sum().sqrt())


def squares_bytes(num_values: int) -> int:
    """Of what the kernel of `row_squares` takes for itself: the values in float64."""
    return torch.float64.itemsize * num_values


def of_own_part(grads: Gradients) -> float:
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
