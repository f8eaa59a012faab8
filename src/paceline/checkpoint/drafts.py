"""The files of one rank's part of a checkpoint, before they are written. Pure.

A large part is cut into several files, so that several threads can hash and write. Invariant: where it is cut
follows from the tensors alone, so that equal states have equal files whoever writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.checkpoint.tensor_file import Chunk, encode_header

_LEAST_BYTES = 64 * 2**20  # a smaller file is not worth a thread
_MOST_FILES = 4


@dataclass(frozen=True)
class Draft:
    """A file to be written.

    Args:
        header: what stands before the tensors.
        chunks: the tensors, in the order of their bytes.
    """

    name: str
    header: bytes
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(chunk.num_bytes for chunk in self.chunks)


def file_name(rank: int, index: int, count: int) -> str:
    """The file of a rank's tensors, or the index-th of several."""
    return f"rank-{rank:05d}" + (f".{index + 1}-of-{count}" if count > 1 else "") + ".safetensors"


def draft_files(rank: int, chunks: Sequence[Chunk]) -> list[Draft]:
    """Files of about equal size, in the order of the chunks; a tensor is not cut."""
    total = sum(chunk.num_bytes for chunk in chunks)
    wanted = min(_MOST_FILES, max(1, total // _LEAST_BYTES))
    groups: dict[int, list[Chunk]] = {}
    begin = 0
    for chunk in chunks:
        groups.setdefault(min(begin * wanted // max(1, total), wanted - 1), []).append(chunk)
        begin += chunk.num_bytes
    return [
        Draft(file_name(rank, i, len(groups)), encode_header(group), tuple(group))
        for i, group in enumerate(groups.values())
    ]
