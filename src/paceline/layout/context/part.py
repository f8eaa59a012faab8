"""The positions of one rank: cut out of a batch, and found again in what the model makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import TaskError
from paceline.layout.context.spans import Runs, runs_of


class Part:
    """What one rank runs of the sequences of one micro-batch; `Task.sequence` calls it.

    Args:
        num_ranks: among which sequences are split.
        rank: this one.
    """

    def __init__(self, num_ranks: int, rank: int) -> None:
        self._num_ranks, self._rank = num_ranks, rank
        self.runs: tuple[Runs, ...] = ()
        self.length = 0
        self._dims: set[int] = set()

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        """This rank's positions of a tensor, along a dimension.

        Raises:
            TaskError: sequences of two lengths are in one batch, or shorter than the ranks are many.
        """
        length = x.shape[dim]
        if self.length not in (0, length):
            raise TaskError(
                f"Task.sequence cuts sequences of {self.length} and of {length} positions in one batch",
                next_step="cut tensors of one length along the dimension of positions only",
            )
        if not self.length:
            self.length, self.runs = length, runs_of(length, self._num_ranks)
        self._dims.add(dim % x.dim())
        return self.take(x, dim)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """These positions of something that has all of them along a dimension."""
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.runs[self._rank]], dim)

    @property
    def size(self) -> int:
        """How many positions the rank has."""
        return self.runs[self._rank].size

    def positions(self, device: torch.device) -> Tensor:
        """Their places in the whole sequence, int64 [T], ascending."""
        return self.take(torch.arange(self.length, device=device), 0)

    def dim_in(self, shape: Sequence[int], what: str) -> int:
        """Along which dimension a tensor of the model has the positions, as those of the batch have.

        Raises:
            TaskError: that dimension is of another size, so nobody knows.
        """
        found = [dim for dim in self._dims if dim < len(shape) and shape[dim] == self.size]
        if len(found) != 1:
            dims = " or ".join(map(str, sorted(self._dims)))
            raise TaskError(
                f"{what} sees a tensor of shape {tuple(shape)}, and context=N has to find this rank's"
                f" {self.size} positions in it along dimension {dims}",
                next_step="call it where positions lie along the dimension that Task.sequence cuts",
            )
        return found[0]

    def whole_shape(self, shape: Sequence[int], dim: int) -> list[int]:
        """The shape that a tensor would have with all positions."""
        return [self.length if d == dim else n for d, n in enumerate(shape)]
