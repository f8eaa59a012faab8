"""Ranges of the bytes of one file: mapped, if it is on this machine, else by requests.

Invariant: a range comes whole, in blocks of at most `BLOCK_BYTES`, or is an error. Beside what the caller
holds there is one block in memory: pages of a mapped file are given back as soon as they are read.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

BLOCK_BYTES = 2**23  # a multiple of the size of every number
_TRIES = 4
_FIRST_PAUSE_SECONDS = 0.2
_LIBRARIES = {"aiohttp": "ClientError", "botocore.exceptions": "BotoCoreError"}  # what breaks is no OSError
_T = TypeVar("_T")


class Ranges(Protocol):
    """`local`: reading twice costs little."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def local(self) -> bool: ...
    def blocks(self, begin: int, end: int) -> Iterator[memoryview]:
        """The bytes from `begin` to `end`; a block is valid until the next one.

        Raises:
            OSError: it cannot be read, or is shorter.
        """
        ...

    def close(self) -> None: ...


class Mapped:
    """A file of this machine.

    Raises:
        OSError: it cannot be read.
        ValueError: it is empty.
    """

    local = True

    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        self.num_bytes = len(self._map)

    def blocks(self, begin: int, end: int) -> Iterator[memoryview]:
        """See `Ranges`."""
        _require(end <= self.num_bytes, end - self.num_bytes)
        for first in range(begin, end, BLOCK_BYTES):
            last = min(first + BLOCK_BYTES, end)
            yield memoryview(self._map)[first:last]
            page = first - first % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, page, last - page)

    def close(self) -> None:
        """The map ends with the last block that somebody holds."""
        del self._map


class Requested:
    """A file of a remote store; a connection that breaks is tried again.

    Args:
        filesystem: of fsspec.
        path: as the file system names it.
    Raises:
        OSError: it is not there, cannot be reached, or does not say how long it is.
    """

    local = False

    def __init__(self, filesystem: Any, path: str) -> None:
        self._file = insist(lambda: filesystem.open(path, "rb", cache_type="none"))
        if not isinstance(self._file.size, int):
            self._file.close()
            raise OSError(f"the server does not say how long {path} is: download it first")
        self.num_bytes = self._file.size

    def blocks(self, begin: int, end: int) -> Iterator[memoryview]:
        """See `Ranges`."""
        for first in range(begin, end, BLOCK_BYTES):
            wanted = min(BLOCK_BYTES, end - first)
            yield memoryview(bytearray(insist(lambda: self._read(first, wanted))))  # noqa: B023, called at once

    def close(self) -> None:
        """End the connection."""
        self._file.close()

    def _read(self, first: int, wanted: int) -> bytes:
        try:
            self._file.seek(first)
            found = bytes(self._file.read(wanted))
        except ValueError as error:  # fsspec's word for a server that knows whole files only
            raise NoRangesError(f"it has no ranges of files ({error}): download it first") from error
        _require(len(found) == wanted, wanted - len(found))
        return found


class NoRangesError(OSError):
    """A server that would send all of a file each time."""


def insist(act: Callable[[], _T]) -> _T:
    """What `act` returns, after some tries if a connection breaks.

    Raises:
        OSError: it is not there, is not allowed, or the last try broke too.
    """
    for pause in range(_TRIES):
        try:
            return act()
        except (FileNotFoundError, PermissionError, NoRangesError):
            raise
        except _broken() as error:
            refused = 400 <= getattr(error, "status", 0) < 500
            if refused or pause == _TRIES - 1:
                raise OSError(str(error) or type(error).__name__) from error
            time.sleep(_FIRST_PAUSE_SECONDS * 2**pause)
    raise AssertionError


def _broken() -> tuple[type[Exception], ...]:
    """What the libraries of stores that are in use raise."""
    own = [getattr(sys.modules[room], name) for room, name in _LIBRARIES.items() if room in sys.modules]
    return OSError, *own


def _require(whole: bool, missing: int) -> None:
    if not whole:
        raise OSError(f"it is cut short: {missing} bytes are missing")
