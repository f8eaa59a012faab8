"""The norm of a gradient that does not depend on buckets, ranks or threads.

Each tensor is cut into the rows of its first dimension. A row's sum of squares is taken in float64 from the
row alone; all rows of all tensors are added in the order of the model. Ranks that hold other rows fill in
theirs, and zeros elsewhere, so that nothing is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.reducer import Gradients, Reducer, WrappedReducer
from paceline.mesh import Group
from paceline.slot import Slot


def row_squares(x: Tensor) -> Tensor:
    """Sums of squares of the rows of x [rows, ...], float64 [rows]; a scalar is one row.

    Exactness: the bits of a row's sum depend on that row and on its width alone.
    """
    rows = x.detach().reshape(x.shape[0] if x.dim() else 1, -1)
    if rows.shape[1] == 1:
        return rows[:, 0].to(torch.float64).square()
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()


class CanonicalNorm(WrappedReducer):
    """A reducer whose norm is that of the whole gradient, in one order of additions.

    Args:
        inner: gives this rank's parts.
        slots: of the whole model, in its order.
        counted: by parameter index, the rows of the whole that this rank counts; each is counted once in
            the group.
        group: the ranks whose parts make one gradient.
    Wire: one all_reduce of 8 bytes for every row of every parameter; none in a group of one.
    """

    def __init__(
        self, inner: Reducer, slots: Sequence[Slot], counted: Mapping[int, slice], group: Group, net: Net
    ) -> None:
        super().__init__(inner)
        self._counted, self._group, self._net = counted, group, net
        self._first, self._num_rows = [], 0
        for slot in slots:
            self._first.append(self._num_rows)
            self._num_rows += slot.shape[0] if slot.shape else 1

    def finish(self) -> Gradients:
        """The parts, with the norm of the whole."""
        grads = self.inner.finish()
        device = grads.flats[0].device if grads.flats else torch.device("cpu")
        squares = torch.zeros(self._num_rows, dtype=torch.float64, device=device)
        for index, rows in self._counted.items():
            part = grads.tensors[index]
            if part is not None:
                first = self._first[index] + (rows.start or 0)
                found = row_squares(part)
                squares[first : first + len(found)] = found
        norm = self._net.all_reduce(squares, self._group).wait().sum().sqrt()
        return Gradients(grads.tensors, grads.flats, [norm], grads.scale)
