"""Writers of a rank's files: threads of the training process, or a process with low priority.

Invariant: the bytes and their checksums do not depend on the writer.
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

_MIN_PROCESS_BYTES = 64 * 2**20  # less is written before a process has started


class PartWriter(Protocol):
    """The protocol of a writer of saves, one after the other."""

    def begin(self, num_bytes: int) -> None:
        """Start a save of `num_bytes`; called by the training before `allocate`."""

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return memory for the files of a save, uint8; it replaces the memory returned before."""

    def write(
        self, files: StorageFolder, folder: str, staged: Sequence[StagedFile]
    ) -> tuple[TensorFileRecord, ...]:
        """Write files, and return when they are on the disk; called in the background.

        Raises:
            OSError: the write failed.
        """

    def hurry(self) -> None:
        """Write faster: the training is waiting for the save in progress."""

    def close(self) -> None:
        """End the writer; there are no more saves."""


class ThreadWriter:
    """A writer that uses threads of this process.

    Args:
        count: the number of threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def begin(self, num_bytes: int) -> None:
        """Do nothing."""

    def allocate(self, num_bytes: int) -> np.ndarray:
        return np.empty(num_bytes, dtype=np.uint8)

    def write(
        self, files: StorageFolder, folder: str, staged: Sequence[StagedFile]
    ) -> tuple[TensorFileRecord, ...]:
        with ThreadPoolExecutor(self._count, "checkpoint-writer") as pool:
            return tuple(pool.map(partial(_write_file, files, folder), staged))

    def hurry(self) -> None:
        """Do nothing: threads have full priority."""

    def close(self) -> None:
        """Do nothing."""


class ProcessWriter:
    """A writer that uses a process with idle priority, until the training waits. A thread writes small saves.

    Args:
        process: closed with this writer.
        seconds: time after which a save in progress gets full priority.
        warn: called if the process is lost; the training process writes from then on.
    """

    def __init__(self, process: WriterProcess, seconds: float, warn: Callable[[str], None]) -> None:
        self._process, self._seconds, self._warn = process, seconds, warn
        self._thread = ThreadWriter(1)
        self._expires, self._ready, self._shared, self._closed = 0.0, False, False, False

    def begin(self, num_bytes: int) -> None:
        self._expires = time.monotonic() + self._seconds
        self._ready = num_bytes >= _MIN_PROCESS_BYTES
        if self._ready:
            try:
                self._process.begin()
            except WriterLostError as error:
                self._handle_lost_process(error)

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return memory that is shared with the process if the process is to write it."""
        self._shared = self._ready
        if not self._ready:
            return self._thread.allocate(num_bytes)
        return np.frombuffer(self._process.memory(num_bytes), dtype=np.uint8)

    def write(
        self, files: StorageFolder, folder: str, staged: Sequence[StagedFile]
    ) -> tuple[TensorFileRecord, ...]:
        if self._ready and self._shared:
            try:
                return self._write_by_process(files, folder, staged)
            except WriterLostError as error:
                # Closing kills the process on purpose, so this thread must not write in its place.
                if self._closed:
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), folder) from error
                self._handle_lost_process(error)
        return self._thread.write(files, folder, staged)

    def hurry(self) -> None:
        self._process.hurry()

    def close(self) -> None:
        self._closed = True
        self._process.close()

    def _write_by_process(
        self, files: StorageFolder, folder: str, staged: Sequence[StagedFile]
    ) -> tuple[TensorFileRecord, ...]:
        ranges = []
        for file in staged:
            path = files.make_room(f"{folder}/{file.draft.name}")
            ranges.append((path, file.begin, file.begin + file.draft.num_bytes))
        patience = max(0.0, self._expires - time.monotonic())
        checksums = self._process.write(ranges, patience)
        return tuple(
            _file_record(file.draft, checksum) for file, checksum in zip(staged, checksums, strict=True)
        )

    def _handle_lost_process(self, error: WriterLostError) -> None:
        self._ready = False
        self._warn(f"{error}; the training process writes this save, which can slow training down")


def _write_file(files: StorageFolder, folder: str, file: StagedFile) -> TensorFileRecord:
    """Write a file and compute its checksum on the way."""
    checksum = FileChecksum()

    def hashed() -> Iterator[Block]:
        for block in file.blocks():
            checksum.update(block)
            yield block

    files.write(f"{folder}/{file.draft.name}", hashed())
    return _file_record(file.draft, checksum.text())


def _file_record(draft: FileDraft, checksum: str) -> TensorFileRecord:
    return TensorFileRecord(draft.name, draft.num_bytes, checksum, draft.chunks)
