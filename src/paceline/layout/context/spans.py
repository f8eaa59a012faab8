"""Which positions of a sequence a rank has, and which of two ranks' positions attend to each other. Pure.

A sequence is cut into 2 N runs, and rank r has the runs r and 2 N - 1 - r. Under a causal mask an early
position attends to few others and a late one to many, so every rank has the same work. Sizes differ by one at
most, whatever the length. Ranks keep their positions in ascending order.

Source: Brandon et al. 2023, Striped Attention, arXiv:2311.09431 (why work must be balanced). An early run is
paired with a late one as in Grattafiori et al. 2024, Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.errors import TaskError
from paceline.layout.placement import even_span

Run = tuple[int, int]


class Runs(NamedTuple):
    """The positions of one rank: [start, stop) of its early run and of its late one."""

    early: Run
    late: Run

    @property
    def sizes(self) -> tuple[int, int]:
        """How many positions each run has."""
        return self.early[1] - self.early[0], self.late[1] - self.late[0]

    @property
    def size(self) -> int:
        """How many positions the rank has."""
        return sum(self.sizes)


def runs_of(length: int, num_ranks: int) -> tuple[Runs, ...]:
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
    early = _following([(size + 1) // 2 for size in sizes], 0)
    late = _following([size // 2 for size in reversed(sizes)], early[-1][1])
    return tuple(Runs(*both) for both in zip(early, reversed(late), strict=True))


def _following(sizes: list[int], start: int) -> list[Run]:
    found = []
    for size in sizes:
        found.append((start, start + size))
        start += size
    return found


class Block(NamedTuple):
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


def block_of(runs: tuple[Runs, ...], mine: int, theirs: int, *, causal: bool) -> Block:
    """Which of the queries of rank `mine` see which of the keys of rank `theirs`."""
    queries, keys = slice(0, runs[mine].size), slice(0, runs[theirs].size)
    if not causal or mine == theirs:
        return Block(queries, keys, causal)
    if theirs < mine:  # its early run is before both of mine, its late one after both
        return Block(queries, slice(0, runs[theirs].sizes[0]), False)
    return Block(slice(runs[mine].sizes[0], runs[mine].size), keys, False)
