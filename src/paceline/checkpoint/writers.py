"""Who writes the files of a part: threads of the training, or a process beside it.

Invariant: the bytes and their checksums do not depend on it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import numpy as np

from paceline.checkpoint.disk.checksum import FileChecksum
from paceline.checkpoint.disk.writer_process import WriterLostError, WriterProcess
from paceline.checkpoint.manifest import TensorFileRecord
from paceline.checkpoint.staging import StagedFile
from paceline.checkpoint.storage import Block, StorageFolder
from paceline.checkpoint.write_plan import FileDraft

_MIN_PROCESS_BYTES = 64 * 2**20  # less is written before a process has begun


class PartWriter(Protocol):
    """Writes one save after the other."""

    def begin(self, num_bytes: int) -> None:
        """A save of so many bytes begins; called by the training, before `allocate`."""

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Memory for the files of a save, uint8; in place of what was made before."""

    def write(
        self, files: StorageFolder, folder: str, staged: Sequence[StagedFile]
    ) -> tuple[TensorFileRecord, ...]:
        """Write files, and return when they are on the disk; called in the background.

        Raises:
            OSError: the disk refused.
        """

    def hurry(self) -> None:
        """The training waits for the save under way."""

    def close(self) -> None:
        """There will be no more saves."""


class ThreadWriter:
    """Threads of this process.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def begin(self, num_bytes: int) -> None:
        """See `PartWriter`; nothing to do."""

    def allocate(self, num_bytes: int) -> np.ndarray:
        """See `PartWriter`."""
        return np.empty(num_bytes, dtype=np.uint8)

    def write(
        self, files: StorageFolder, folder: str, staged: Sequence[StagedFile]
    ) -> tuple[TensorFileRecord, ...]:
        """See `PartWriter`."""
        with ThreadPoolExecutor(self._count, "checkpoint-writer") as pool:
            return tuple(pool.map(partial(_write_file, files, folder), staged))

    def hurry(self) -> None:
        """See `PartWriter`; they do already."""

    def close(self) -> None:
        """See `PartWriter`; nothing to do."""


class ProcessWriter:
    """A process of its own that takes of the processor what the training leaves, until the training waits.

    A small save is written by a thread.

    Args:
        process: is closed with this.
        seconds: after which a save that is not written hurries.
        warn: is told if the process is lost; then the training writes.
    """

    def __init__(self, process: WriterProcess, seconds: float, warn: Callable[[str], None]) -> None:
        self._process, self._seconds, self._warn = process, seconds, warn
        self._thread = ThreadWriter(1)
        self._expires, self._ready, self._shared, self._closed = 0.0, False, False, False

    def begin(self, num_bytes: int) -> None:
        """See `PartWriter`."""
        self._expires = time.monotonic() + self._seconds
        self._ready = num_bytes >= _MIN_PROCESS_BYTES
        if self._ready:
            try:
                self._process.begin()
            except WriterLostError as error:
                self._lost(error)

    def allocate(self, num_bytes: int) -> np.ndarray:
        """See `PartWriter`; other processes can see it where the process is to write it."""
        self._shared = self._ready
        if not self._ready:
            return self._thread.allocate(num_bytes)
        return np.frombuffer(self._process.memory(num_bytes), dtype=np.uint8)

    def write(
        self, files: StorageFolder, folder: str, staged: Sequence[StagedFile]
    ) -> tuple[TensorFileRecord, ...]:
        """See `PartWriter`."""
        if self._ready and self._shared:
            try:
                return self._write_beside(files, folder, staged)
            except WriterLostError as error:
                if self._closed:
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), folder) from error
                self._lost(error)
        return self._thread.write(files, folder, staged)

    def hurry(self) -> None:
        """See `PartWriter`."""
        self._process.hurry()

    def close(self) -> None:
        """See `PartWriter`."""
        self._closed = True
        self._process.close()

    def _write_beside(
        self, files: StorageFolder, folder: str, staged: Sequence[StagedFile]
    ) -> tuple[TensorFileRecord, ...]:
        places = []
        for file in staged:
            path = files.make_room(f"{folder}/{file.draft.name}")
            places.append((path, file.begin, file.begin + file.draft.num_bytes))
        patience = max(0.0, self._expires - time.monotonic())
        checksums = self._process.write(places, patience)
        return tuple(
            _file_record(file.draft, checksum) for file, checksum in zip(staged, checksums, strict=True)
        )

    def _lost(self, error: WriterLostError) -> None:
        self._ready = False
        self._warn(f"{error}; this save is written by the training, which it may slow down")


def _write_file(files: StorageFolder, folder: str, file: StagedFile) -> TensorFileRecord:
    """Write a file, and take its checksum on the way."""
    checksum = FileChecksum()

    def hashed() -> Iterator[Block]:
        for block in file.blocks():
            checksum.update(block)
            yield block

    files.write(f"{folder}/{file.draft.name}", hashed())
    return _file_record(file.draft, checksum.text())


def _file_record(draft: FileDraft, checksum: str) -> TensorFileRecord:
    return TensorFileRecord(draft.name, draft.num_bytes, checksum, draft.chunks)
