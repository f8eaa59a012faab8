"""Writing a large file so that the disk works from the first block on and the page cache is not filled.

By default Linux keeps written pages in memory until `fsync`, and afterwards: the disk idles while the file is
made, pages that are read often are evicted, and on a virtual machine a new page can cost more than its bytes
on the disk. Here a block bypasses the page cache if the file system can do that (`HashedFileWrite`): it is
hashed, and the disk reads it from where it lies. Otherwise windows of the file are sent to the disk when they
are complete, and dropped from the cache when they are there (`Writeback`).

Source: sync_file_range(2), posix_fadvise(2), O_DIRECT of open(2) of Linux; elsewhere nothing is sent early or
dropped.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections import deque
from contextlib import ExitStack
from typing import Any

from paceline.checkpoint.disk.checksum import FileChecksum

_WINDOW_BYTES = 8 * 2**20
_MAX_WINDOWS = 2  # in flight to the disk
_SEND, _WAIT = 2, 1 | 2 | 4
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


class Writeback:
    """The early write-back of one file.

    Args:
        stream: the file, open for writing from its start, with `flush` and `fileno`.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._begin = self._end = 0
        self._in_flight: deque[tuple[int, int]] = deque()

    def count_written(self, num_bytes: int) -> None:
        """Record that `num_bytes` more were written."""
        self._end += num_bytes
        if self._end - self._begin >= _WINDOW_BYTES:
            self._stream.flush()
            self._sync(self._begin, self._end, _SEND)
            self._in_flight.append((self._begin, self._end))
            self._begin = self._end
        # Waiting for the oldest window bounds the pages that are not on the disk yet.
        if len(self._in_flight) > _MAX_WINDOWS:
            begin, end = self._in_flight.popleft()
            self._sync(begin, end, _WAIT)
            self._drop_from_cache(begin, end)

    def finish(self) -> None:
        """Return when everything is on the disk.

        Raises:
            OSError: the write failed.
        """
        self._stream.flush()
        os.fsync(self._stream.fileno())
        for begin, end in self._in_flight:
            self._drop_from_cache(begin, end)

    def _sync(self, begin: int, end: int, what: int) -> None:
        """Call `sync_file_range`, best effort; durability comes from the later `fsync`."""
        if _sync_file_range is not None:
            file, offset, count = self._stream.fileno(), ctypes.c_int64(begin), ctypes.c_int64(end - begin)
            _sync_file_range(file, offset, count, what)

    def _drop_from_cache(self, begin: int, end: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._stream.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)


BLOCK_BYTES = 2**20
"""Small enough that a hashed block is still in the CPU cache, and that a slow thread ends its block soon."""
PAGE_BYTES = 4096
"""Direct writes begin and end at multiples of this, in memory and in the file."""
_DIRECT = getattr(os, "O_DIRECT", 0)


class HashedFileWrite:
    """A file that is being written and hashed, block by block.

    Args:
        path: created or emptied by the first step.
        content: all bytes; they are written directly if they begin at a multiple of `PAGE_BYTES` in memory.
    Attributes:
        done: nothing is left to do, or it has failed.
    """

    def __init__(self, path: str, content: memoryview) -> None:
        self.path, self.done = path, False
        self._content, self._offset, self._checksum = content, 0, FileChecksum()
        self._stack = ExitStack()
        self._file = -1

    def step(self) -> None:
        """Hash and write one block; after the last one, return when everything is on the disk.

        Raises:
            OSError: the write failed; the file is closed.
        """
        try:
            if self._file < 0:
                self._begin()
            self._next()
        except OSError:
            self._end()
            raise

    def checksum(self) -> str:
        """Return the checksum of the bytes so far."""
        return self._checksum.text()

    def _begin(self) -> None:
        stream = self._stack.enter_context(os.fdopen(_open_direct(self.path), "wb", buffering=0))
        self._file, self._writeback = stream.fileno(), Writeback(stream)

    def _next(self) -> None:
        block = self._content[self._offset : self._offset + BLOCK_BYTES]
        self._checksum.update(block)
        self._write(block)
        self._writeback.count_written(len(block))
        self._offset += len(block)
        if self._offset == len(self._content):
            self._writeback.finish()
            self._end()

    def _end(self) -> None:
        self.done = True
        self._stack.close()

    def _write(self, block: memoryview) -> None:
        whole = len(block) // PAGE_BYTES * PAGE_BYTES
        # Only whole pages can bypass the cache; the last bytes of a file go through it.
        for pages in (block[:whole], block[whole:]):
            if len(pages) % PAGE_BYTES:
                self._disable_direct_io()
            while pages:
                pages = pages[self._write_some(pages) :]

    def _write_some(self, pages: memoryview) -> int:
        try:
            return os.write(self._file, pages)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._uses_direct_io():
                raise
        self._disable_direct_io()  # the file system accepts the flag but not the write
        return os.write(self._file, pages)

    def _uses_direct_io(self) -> bool:
        return bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & _DIRECT)

    def _disable_direct_io(self) -> None:
        """Write the following blocks through the page cache."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)


def _open_direct(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666)
