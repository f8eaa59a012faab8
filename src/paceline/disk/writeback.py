"""Writing a large file so that the disk works from the first block on, and memory is not filled with it.

By default the system keeps what is written in memory until `fsync`, and afterwards: the disk rests while the
file is made, pages that nobody will read are taken from those that are read again and again, and on a virtual
machine every new page may cost more than its bytes on the disk. Here windows of the file are sent to the disk
as they are complete, and forgotten when they are there.

Source: sync_file_range(2), posix_fadvise(2) of Linux; elsewhere nothing is sent early or forgotten.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from typing import Any

_WINDOW_BYTES = 8 * 2**20
_MOST_WINDOWS = 2  # on their way to the disk
_SEND, _WAIT = 2, 1 | 2 | 4
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


class Writeback:
    """Accompanies the writing of one file.

    Args:
        stream: the file, open for writing, with `flush` and `fileno`; written from its beginning on.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._begin = self._end = 0
        self._under_way: deque[tuple[int, int]] = deque()

    def wrote(self, num_bytes: int) -> None:
        """Note that so many more bytes were written."""
        self._end += num_bytes
        if self._end - self._begin >= _WINDOW_BYTES:
            self._stream.flush()
            self._sync(self._begin, self._end, _SEND)
            self._under_way.append((self._begin, self._end))
            self._begin = self._end
        if len(self._under_way) > _MOST_WINDOWS:
            begin, end = self._under_way.popleft()
            self._sync(begin, end, _WAIT)
            self._forget(begin, end)

    def finish(self) -> None:
        """Return when all is on the disk.

        Raises:
            OSError: it is not.
        """
        self._stream.flush()
        os.fsync(self._stream.fileno())
        for begin, end in self._under_way:
            self._forget(begin, end)

    def _sync(self, begin: int, end: int, what: int) -> None:
        """A wish: whether all has arrived is for `fsync` to say."""
        if _sync_file_range is not None:
            file, offset, count = self._stream.fileno(), ctypes.c_int64(begin), ctypes.c_int64(end - begin)
            _sync_file_range(file, offset, count, what)

    def _forget(self, begin: int, end: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._stream.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
