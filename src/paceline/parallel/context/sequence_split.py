"""Which positions of a sequence a rank has, and which of two ranks' positions attend to each other. Pure.

A sequence is cut into 2 N runs, and rank r has the runs r and 2 N - 1 - r. Under a causal mask an early
position attends to few others and a late one to many, so every rank has the same work. Sizes differ by one at
most, whatever the length. Ranks keep their positions in ascending order.

Source: Brandon et al. 2023, Striped Attention, arXiv:2311.09431 (why work must be balanced). An early run is
paired with a late one as in Grattafiori et al. 2024, Llama 3, arXiv:2407.21783, section 3.3.2.

The positions of one rank: cut out of a batch, and found again in what the model makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import TaskError
from paceline.parallel.placement import even_span

PositionRun = tuple[int, int]


class PositionRuns(NamedTuple):
    """The positions of one rank: [start, stop) of its early run and of its late one."""

    early: PositionRun
    late: PositionRun

    @property
    def sizes(self) -> tuple[int, int]:
        """How many positions each run has."""
        return self.early[1] - self.early[0], self.late[1] - self.late[0]

    @property
    def size(self) -> int:
        """How many positions the rank has."""
        return sum(self.sizes)


def split_positions(length: int, num_ranks: int) -> tuple[PositionRuns, ...]:
    """The runs of every rank.

    Raises:
        TaskError: there are fewer positions than ranks.
    """
    if length < num_ranks:
        raise TaskError(
            f"a sequence of {length} positions is too short for context={num_ranks}: a rank would have none",
            next_step="give longer sequences, or choose a smaller context",
        )
    sizes = [stop - start for start, stop in (even_span(length, num_ranks, r) for r in range(num_ranks))]
    early = _consecutive_runs([(size + 1) // 2 for size in sizes], 0)
    late = _consecutive_runs([size // 2 for size in reversed(sizes)], early[-1][1])
    return tuple(PositionRuns(*both) for both in zip(early, reversed(late), strict=True))


def _consecutive_runs(sizes: list[int], start: int) -> list[PositionRun]:
    found = []
    for size in sizes:
        found.append((start, start + size))
        start += size
    return found


class AttentionBlock(NamedTuple):
    """What one rank's queries see of one rank's keys.

    Args:
        queries: of the rank's own positions.
        keys: of those that came.
        causal: each query sees keys up to its own place; else all of them.
    """

    queries: slice
    keys: slice
    causal: bool

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return self.queries.start == self.queries.stop or self.keys.start == self.keys.stop


def attention_block(
    runs: tuple[PositionRuns, ...], mine: int, theirs: int, *, causal: bool
) -> AttentionBlock:
    """Which of the queries of rank `mine` see which of the keys of rank `theirs`."""
    queries, keys = slice(0, runs[mine].size), slice(0, runs[theirs].size)
    if not causal or mine == theirs:
        return AttentionBlock(queries, keys, causal)
    if theirs < mine:  # its early run is before both of mine, its late one after both
        return AttentionBlock(queries, slice(0, runs[theirs].sizes[0]), False)
    return AttentionBlock(slice(runs[mine].sizes[0], runs[mine].size), keys, False)


class SequencePart:
    """What one rank runs of the sequences of one micro-batch; `Task.sequence` calls it.

    Args:
        num_ranks: among which sequences are split.
        rank: this one.
    """

    def __init__(self, num_ranks: int, rank: int) -> None:
        self._num_ranks, self._rank = num_ranks, rank
        self.runs: tuple[PositionRuns, ...] = ()
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
            self.length, self.runs = length, split_positions(length, self._num_ranks)
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
