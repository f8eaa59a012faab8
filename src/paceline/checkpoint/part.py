"""One rank's part of a checkpoint: its file of tensors, then its report. Phase one of publishing."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.files import Block, Files, is_full
from paceline.checkpoint.manifest import File, encode_part
from paceline.checkpoint.tensor_file import Chunk, encode_header
from paceline.errors import CheckpointError

_RETRY_SECONDS = 1.0


def file_name(rank: int) -> str:
    """The file of a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


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


def write_part(
    files: Files,
    folder: str,
    rank: int,
    chunks: Sequence[Chunk],
    blocks: Sequence[Block],
    scalars: Mapping[str, Any],
    patience: Patience,
) -> None:
    """Write and report; a full disk is tried again.

    Raises:
        CheckpointError: the disk refused; what was written of this checkpoint by this rank is removed.
    """

    def write() -> None:
        file = _write_tensors(files, f"{folder}/{file_name(rank)}", chunks, blocks) if chunks else None
        files.publish(f"{folder}/{report_name(rank)}", encode_part(file, scalars))

    insist(write, files, f"{folder}/{file_name(rank)}", patience)


def _write_tensors(files: Files, name: str, chunks: Sequence[Chunk], blocks: Sequence[Block]) -> File:
    """Write a file while another thread hashes the same bytes."""
    header = encode_header(chunks)
    with ThreadPoolExecutor(1, "checkpoint-hash") as pool:
        digest = pool.submit(_digest, itertools.chain([header], blocks))
        files.write(name, itertools.chain([header], blocks))
        num_bytes = len(header) + sum(len(block) for block in blocks)
        return File(name.rpartition("/")[2], num_bytes, digest.result(), tuple(chunks))


def _digest(blocks: Iterable[Block]) -> str:
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def insist(write: Callable[[], None], files: Files, name: str, patience: Patience) -> None:
    """Write; while the disk is full and there is patience, remove the half file and try again."""
    expires = time.monotonic() + patience.seconds
    told = False
    while True:
        try:
            return write()
        except OSError as error:
            files.remove(name)
            if not is_full(error) or time.monotonic() >= expires:
                raise refused(files.place(name), error) from error
        if not told:
            patience.warn(f"the disk of {files.url} is full: waiting up to {patience.seconds:g} s for space")
            told = True
        time.sleep(min(_RETRY_SECONDS, patience.seconds))


def refused(place: str, error: OSError) -> CheckpointError:
    """The disk or the store said no."""
    return CheckpointError(
        f"cannot write a checkpoint: {error}; those saved before are untouched",
        where=place,
        next_step="free space, set checkpoint.full_disk_seconds, or put checkpoint.folder elsewhere",
    )
