"""One rank's part of a checkpoint: its files of tensors, then its report. Phase one of publishing.

A large part is cut into several files, so that several threads can hash and write. Invariant: where it is cut
follows from the tensors alone, so that equal states have equal files whoever writes them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.files import Block, Files, is_full
from paceline.checkpoint.manifest import File, encode_part
from paceline.checkpoint.tensor_file import Chunk, encode_header
from paceline.errors import CheckpointError, PacelineError

_RETRY_SECONDS = 1.0
_LEAST_BYTES = 64 * 2**20  # a smaller file is not worth a thread
_MOST_FILES = 4

Blocks = Callable[[int, int], Sequence[Block]]
"""The bytes of a part from one place to another, without headers."""


def file_name(rank: int, index: int, count: int) -> str:
    """The file of a rank's tensors, or the index-th of several."""
    return f"rank-{rank:05d}" + (f".{index + 1}-of-{count}" if count > 1 else "") + ".safetensors"


def report_name(rank: int) -> str:
    """The file that says that a rank's part is written."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True)
class Patience:
    """What to do when a disk is full.

    Args:
        seconds: how long to wait for space; 0: not at all.
        warn: is told once that the run waits.
    """

    seconds: float
    warn: Callable[[str], None]


@dataclass(frozen=True)
class _Cut:
    """The chunks of one file, and where their bytes lie in the part."""

    name: str
    chunks: tuple[Chunk, ...]
    begin: int
    end: int


def write_part(
    files: Files,
    folder: str,
    rank: int,
    chunks: Sequence[Chunk],
    blocks: Blocks,
    scalars: Mapping[str, Any],
    patience: Patience,
    writers: int = 1,
) -> None:
    """Write and report; a full disk is tried again.

    Args:
        chunks: what the part consists of, in the order of its bytes.
        writers: how many threads write.
    Raises:
        CheckpointError: the disk refused; what was written of this checkpoint by this rank is removed.
    """
    cuts = _cut(rank, chunks)

    def write() -> None:
        with ThreadPoolExecutor(writers, "checkpoint-writer") as pool:
            written = tuple(pool.map(lambda cut: _write_tensors(files, folder, cut, blocks), cuts))
        files.publish(f"{folder}/{report_name(rank)}", encode_part(written, scalars))

    insist(write, files, [f"{folder}/{cut.name}" for cut in cuts], patience)


def _cut(rank: int, chunks: Sequence[Chunk]) -> list[_Cut]:
    """Files of about equal size; a tensor is not cut."""
    total = sum(chunk.num_bytes for chunk in chunks)
    wanted = min(_MOST_FILES, max(1, total // _LEAST_BYTES))
    groups: dict[int, list[Chunk]] = {}
    begin = 0
    for chunk in chunks:
        groups.setdefault(min(begin * wanted // max(1, total), wanted - 1), []).append(chunk)
        begin += chunk.num_bytes
    cuts, begin = [], 0
    for i, group in enumerate(groups.values()):
        end = begin + sum(chunk.num_bytes for chunk in group)
        cuts.append(_Cut(file_name(rank, i, len(groups)), tuple(group), begin, end))
        begin = end
    return cuts


def _write_tensors(files: Files, folder: str, cut: _Cut, blocks: Blocks) -> File:
    """Write a file, and hash it on the way."""
    header, digest = encode_header(cut.chunks), hashlib.sha256()

    def hashed() -> Iterator[Block]:
        for block in (header, *blocks(cut.begin, cut.end)):
            digest.update(block)
            yield block

    files.write(f"{folder}/{cut.name}", hashed())
    return File(cut.name, len(header) + cut.end - cut.begin, digest.hexdigest(), cut.chunks)


def refused(place: str, error: OSError) -> CheckpointError:
    """The disk or the remote store refused a write."""
    return CheckpointError(
        f"cannot write a checkpoint: {error}; those saved before are untouched",
        where=place,
        next_step="free space, set checkpoint.full_disk_seconds, or choose another checkpoint.folder",
    )


def insist(
    write: Callable[[], None],
    files: Files,
    names: Sequence[str],
    patience: Patience,
    *,
    refuse: Callable[[str, OSError], PacelineError] = refused,
) -> None:
    """Write; while the disk is full and there is patience, remove the half files and try again."""
    expires = time.monotonic() + patience.seconds
    told = False
    while True:
        try:
            return write()
        except OSError as error:
            for name in names:
                files.remove(name)
            if not is_full(error) or time.monotonic() >= expires:
                raise refuse(files.place(names[0]) if names else files.url, error) from error
        if not told:
            patience.warn(f"the disk of {files.url} is full: waiting up to {patience.seconds:g} s for space")
            told = True
        time.sleep(min(_RETRY_SECONDS, patience.seconds))
