"""Split of sequences over the ranks of the context axis: the positions of each rank, and their attention.

A sequence is split into 2 N runs, and rank r has the runs r and 2 N - 1 - r. Under a causal mask an early
position attends to few others and a late one to many, so every rank has the same work. Sizes differ by at
most one, whatever the length. Ranks keep their positions in ascending order. The split is pure;
`SequencePart` applies it to the tensors of a batch.

Sources: Brandon et al. 2023, Striped Attention, arXiv:2311.09431 (why work must be balanced). An early run
is paired with a late one as in Grattafiori et al. 2024, Llama 3, arXiv:2407.21783, section 3.3.2.
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
    """Positions of one rank: [start, stop) of its early run and of its late one."""

    early: PositionRun
    late: PositionRun

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of positions of each run."""
        return self.early[1] - self.early[0], self.late[1] - self.late[0]

    @property
    def size(self) -> int:
        """Number of positions of the rank."""
        return sum(self.sizes)


def split_positions(length: int, num_ranks: int) -> tuple[PositionRuns, ...]:
    """Return the runs of every rank.

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
    runs = []
    for size in sizes:
        runs.append((start, start + size))
        start += size
    return runs


class AttentionBlock(NamedTuple):
    """Part of the attention between one rank's queries and one rank's keys.

    Args:
        queries: slice of the rank's own positions.
        keys: slice of the positions whose keys were received.
        causal: each query attends to keys up to its own place; otherwise to all of them.
    """

    queries: slice
    keys: slice
    causal: bool

    @property
    def is_empty(self) -> bool:
        """Return whether the block has nothing to compute."""
        return self.queries.start == self.queries.stop or self.keys.start == self.keys.stop


def attention_block(
    runs: tuple[PositionRuns, ...], query_rank: int, key_rank: int, *, causal: bool
) -> AttentionBlock:
    """Return which queries of `query_rank` attend to which keys of `key_rank`."""
    queries, keys = slice(0, runs[query_rank].size), slice(0, runs[key_rank].size)
    if not causal or query_rank == key_rank:
        return AttentionBlock(queries, keys, causal)
    if key_rank < query_rank:
        # Its early run is before both local runs, and its late run after both.
        return AttentionBlock(queries, slice(0, runs[key_rank].sizes[0]), False)
    # Only the local late run is after the keys, and it is after both of their runs.
    return AttentionBlock(slice(runs[query_rank].sizes[0], runs[query_rank].size), keys, False)


class SequencePart:
    """One rank's part of the sequences of one micro-batch; `Task.sequence` calls it.

    Args:
        num_ranks: number of ranks over which sequences are split.
        rank: this rank.
    """

    def __init__(self, num_ranks: int, rank: int) -> None:
        self._num_ranks, self._rank = num_ranks, rank
        self.runs: tuple[PositionRuns, ...] = ()
        self.length = 0
        self._dims: set[int] = set()

    def __call__(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's positions of a tensor, along a dimension.

        Raises:
            TaskError: sequences of one batch have two lengths, or fewer positions than there are ranks.
        """
        length = x.shape[dim]
        if self.length not in (0, length):
            raise TaskError(
                f"Task.sequence splits sequences of {self.length} and of {length} positions in one batch",
                next_step="split only tensors of one length, along the dimension of positions",
            )
        if not self.length:
            self.length, self.runs = length, split_positions(length, self._num_ranks)
        self._dims.add(dim % x.dim())
        return self.take(x, dim)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's positions of a tensor that has all of them along a dimension."""
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.runs[self._rank]], dim)

    @property
    def size(self) -> int:
        """Number of positions of this rank."""
        return self.runs[self._rank].size

    def positions(self, device: torch.device) -> Tensor:
        """Return the places of this rank's positions in the whole sequence, int64 [T], ascending."""
        return self.take(torch.arange(self.length, device=device), 0)

    def dim_in(self, shape: Sequence[int], what: str) -> int:
        """Return the dimension of a tensor along which this rank's positions are, as in tensors of the batch.

        Raises:
            TaskError: no such dimension, or several, have the right size.
        """
        candidates = [dim for dim in self._dims if dim < len(shape) and shape[dim] == self.size]
        if len(candidates) != 1:
            dims = " or ".join(map(str, sorted(self._dims)))
            raise TaskError(
                f"{what} got a tensor of shape {tuple(shape)}, in which context=N cannot find this rank's"
                f" {self.size} positions along dimension {dims}",
                next_step="call it where positions are along the dimension that Task.sequence splits",
            )
        return candidates[0]

    def whole_shape(self, shape: Sequence[int], dim: int) -> list[int]:
        """Return the shape that a tensor would have with all positions."""
        return [self.length if d == dim else n for d, n in enumerate(shape)]
