"""One file from memory to the disk, block by block, hashed on the way.

A block goes past the system's memory where the file system can do that: nothing is copied, and the disk reads
it from where it lies. Where it cannot, the file goes through that memory, in windows.

Source: O_DIRECT of open(2) of Linux.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack

from paceline.disk.checksum import Checksum
from paceline.disk.writeback import Writeback

BLOCK_BYTES = 2**20
"""A block that was hashed is still in the core's cache, and nobody waits long for a slow thread's block."""
PAGE_BYTES = 4096
"""What is written directly begins and ends at multiples of this, in memory and in the file."""
_DIRECT = getattr(os, "O_DIRECT", 0)


class Writing:
    """A file that is being written.

    Args:
        path: is made, or emptied, by the first step.
        content: all of it; it goes directly if it begins at a multiple of `PAGE_BYTES` in memory.
    Attributes:
        done: nothing is left to do, or it has failed.
    """

    def __init__(self, path: str, content: memoryview) -> None:
        self.path, self.done = path, False
        self._content, self._place, self._checksum = content, 0, Checksum()
        self._stack = ExitStack()
        self._file = -1

    def step(self) -> None:
        """Hash and write one block; after the last one, return when all is on the disk.

        Raises:
            OSError: the disk refused, or the file cannot be made; it is closed.
        """
        try:
            if self._file < 0:
                self._begin()
            self._next()
        except OSError:
            self._end()
            raise

    def checksum(self) -> str:
        """Of what was written so far."""
        return self._checksum.text()

    def _begin(self) -> None:
        stream = self._stack.enter_context(os.fdopen(_open(self.path), "wb", buffering=0))
        self._file, self._writeback = stream.fileno(), Writeback(stream)

    def _next(self) -> None:
        block = self._content[self._place : self._place + BLOCK_BYTES]
        self._checksum.update(block)
        self._write(block)
        self._writeback.wrote(len(block))
        self._place += len(block)
        if self._place == len(self._content):
            self._writeback.finish()
            self._end()

    def _end(self) -> None:
        self.done = True
        self._stack.close()

    def _write(self, block: memoryview) -> None:
        whole = len(block) // PAGE_BYTES * PAGE_BYTES
        for part in (block[:whole], block[whole:]):
            if len(part) % PAGE_BYTES:
                self._through_memory()
            while part:
                part = part[self._write_some(part) :]

    def _write_some(self, part: memoryview) -> int:
        try:
            return os.write(self._file, part)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct():
                raise
        self._through_memory()  # this file system takes the word, and not the writing
        return os.write(self._file, part)

    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._file, fcntl.F_GETFL) & _DIRECT)

    def _through_memory(self) -> None:
        """What follows is written as files usually are."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)


def _open(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o666)
