"""Who writes what: every part of the state once, shared out among the ranks that hold it. Pure.

Invariant: the plan is a function of the tables of all ranks, so every rank that sees the same tables makes
the same plan, and no message is needed to agree on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.checkpoint.tensor_file import Chunk, code_of
from paceline.errors import CheckpointError
from paceline.slot import Piece


def chunk_of(piece: Piece) -> Chunk:
    """What a piece that is a box is called in a file.

    Raises:
        CheckpointError: safetensors has no word for its type.
    """
    slot, code = piece.slot, code_of(piece.tensor.dtype)
    if code is None:
        raise CheckpointError(
            f"the state's '{slot.name}' is {piece.tensor.dtype}, which cannot be saved",
            next_step="register the buffer with persistent=False, or give it another type",
        )
    offsets = tuple(span[0] for span in slot.part)
    return Chunk(slot.name, code, slot.shape, offsets, slot.sizes)


def plan_writes(tables: Sequence[Iterable[Chunk]], shared: bool = True) -> list[frozenset[Chunk]]:
    """By rank, the chunks that it writes; the largest go first, to whom has least to write.

    Args:
        tables: what every rank holds, by rank.
        shared: ranks that hold the same chunk hold the same values; else the first of them writes it.
    """
    holders: dict[Chunk, list[int]] = {}
    for rank, table in enumerate(tables):
        for chunk in table:
            if all(chunk.sizes) or not all(chunk.shape):  # an empty part of something is nothing
                holders.setdefault(chunk, []).append(rank)
    load = [0] * len(tables)
    found: list[set[Chunk]] = [set() for _ in tables]
    for chunk in sorted(holders, key=lambda c: (-c.num_bytes, c.name, c.offsets)):
        writer = min(holders[chunk], key=lambda rank: (load[rank] * shared, rank))
        load[writer] += chunk.num_bytes
        found[writer].add(chunk)
    return [frozenset(chunks) for chunks in found]


def render_table(chunks: Iterable[Chunk]) -> list[list[object]]:
    """A table as JSON values."""
    return [[c.name, c.dtype, c.shape, c.offsets, c.sizes] for c in chunks]


def parse_table(values: Iterable[Sequence[object]]) -> list[Chunk]:
    """The inverse of `render_table`."""
    return [
        Chunk(str(name), str(dtype), _ints(shape), _ints(offsets), _ints(sizes))
        for name, dtype, shape, offsets, sizes in values
    ]


def merge_scalars(by_rank: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """One set of scalars: tables (numbers by parameter) are joined, for the rest the first rank speaks."""
    merged: dict[str, object] = {}
    for scalars in by_rank:
        for key, value in scalars.items():
            before = merged.setdefault(key, value)
            if isinstance(value, Mapping) and isinstance(before, Mapping):
                merged[key] = {**value, **before}
    return merged


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)
