"""The plan of a save: which rank writes which part of the state, and into which files; pure.

Every part is written once, by one of the ranks that hold it. The part of a rank is cut into several files if
it is large, so that several threads can hash and write.

Invariant: the plan is a function of the tables of all ranks, so every rank makes the same plan and no further
message is needed. The cuts follow from the tensors alone, so equal states have equal files whichever rank
writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from paceline.checkpoint.safetensors_file import TensorChunk, dtype_code, encode_header
from paceline.errors import CheckpointError
from paceline.state.slot import TensorPiece


def chunk_of_piece(piece: TensorPiece) -> TensorChunk:
    """Return the chunk in a file for a piece that is a box.

    Raises:
        CheckpointError: safetensors has no code for its dtype.
    """
    slot, code = piece.slot, dtype_code(piece.tensor.dtype)
    if code is None:
        raise CheckpointError(
            f"the state's '{slot.name}' is {piece.tensor.dtype}, which cannot be saved",
            next_step="register the buffer with persistent=False, or give it another type",
        )
    offsets = tuple(span[0] for span in slot.part)
    return TensorChunk(slot.name, code, slot.shape, offsets, slot.sizes)


def plan_writes(tables: Sequence[Iterable[TensorChunk]], shared: bool = True) -> list[frozenset[TensorChunk]]:
    """Return the chunks that each rank writes; the largest first, each by the rank with the least to write.

    Args:
        tables: the chunks that each rank holds.
        shared: ranks that hold the same chunk hold the same values; otherwise the first of them writes it.
    """
    holders: dict[TensorChunk, list[int]] = {}
    for rank, table in enumerate(tables):
        for chunk in table:
            if all(chunk.sizes) or not all(chunk.shape):  # skip empty parts of tensors that are not empty
                holders.setdefault(chunk, []).append(rank)
    # Workers hold a whole copy of what several servers hold in parts: it is written by the servers.
    values_in_parts: dict[str, int] = {}
    for chunk in holders:
        if chunk.sizes != chunk.shape:
            values_in_parts[chunk.name] = values_in_parts.get(chunk.name, 0) + prod(chunk.sizes)
    for chunk in [chunk for chunk in holders if chunk.sizes == chunk.shape]:
        if values_in_parts.get(chunk.name) == prod(chunk.shape):
            del holders[chunk]
    load = [0] * len(tables)
    chunks_by_rank: list[set[TensorChunk]] = [set() for _ in tables]
    # The largest first balances best; names and offsets make the order equal on all ranks.
    for chunk in sorted(holders, key=lambda c: (-c.num_bytes, c.name, c.offsets)):
        # Without `shared` all loads count as 0, so the first holder writes.
        writer = min(holders[chunk], key=lambda rank: (load[rank] * shared, rank))
        load[writer] += chunk.num_bytes
        chunks_by_rank[writer].add(chunk)
    return [frozenset(chunks) for chunks in chunks_by_rank]


def render_table(chunks: Iterable[TensorChunk]) -> list[list[object]]:
    """Return chunks as JSON values."""
    return [[c.name, c.dtype, c.shape, c.offsets, c.sizes] for c in chunks]


def parse_table(values: Iterable[Sequence[object]]) -> list[TensorChunk]:
    """Return the chunks of `render_table`."""
    return [
        TensorChunk(str(name), str(dtype), _int_tuple(shape), _int_tuple(offsets), _int_tuple(sizes))
        for name, dtype, shape, offsets, sizes in values
    ]


def merge_scalars(by_rank: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Merge the scalars of all ranks: tables (numbers by parameter) are joined, other values are those of the
    first.
    """
    merged: dict[str, object] = {}
    for scalars in by_rank:
        for key, value in scalars.items():
            before = merged.setdefault(key, value)
            if isinstance(value, Mapping) and isinstance(before, Mapping):
                merged[key] = {**value, **before}
    return merged


def _int_tuple(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


_MIN_FILE_BYTES = 64 * 2**20  # a smaller file is not worth a thread
_MAX_FILES = 4


@dataclass(frozen=True)
class FileDraft:
    """A file to be written.

    Args:
        name: of the file.
        header: bytes in front of the tensors.
        chunks: the tensors, in the order of their bytes.
    """

    name: str
    header: bytes
    chunks: tuple[TensorChunk, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole file."""
        return len(self.header) + sum(chunk.num_bytes for chunk in self.chunks)


def rank_file_name(rank: int, index: int, count: int) -> str:
    """Return the file name of a rank's tensors; `index` of `count` files."""
    return f"rank-{rank:05d}" + (f".{index + 1}-of-{count}" if count > 1 else "") + ".safetensors"


def draft_files(rank: int, chunks: Sequence[TensorChunk]) -> list[FileDraft]:
    """Divide chunks into files of about equal size, in their order; no tensor is cut."""
    total = sum(chunk.num_bytes for chunk in chunks)
    wanted = min(_MAX_FILES, max(1, total // _MIN_FILE_BYTES))
    groups: dict[int, list[TensorChunk]] = {}
    begin = 0
    for chunk in chunks:
        groups.setdefault(min(begin * wanted // max(1, total), wanted - 1), []).append(chunk)
        begin += chunk.num_bytes
    return [
        FileDraft(rank_file_name(rank, i, len(groups)), encode_header(group), tuple(group))
        for i, group in enumerate(groups.values())
    ]
