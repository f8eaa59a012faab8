"""Storage of checkpoints: the files of a folder on a local disk or in a remote store, and ranges of one file.

Local files are mapped, remote ones are read by requests through fsspec. A broken connection is tried again.

Invariant: when `write` or `publish` returns, the bytes survive a power cut (local) or the store has confirmed
them (remote); what `publish` writes is there in full or not at all. A range arrives whole, in blocks of at
most `BLOCK_BYTES`, or is an error; one block is in memory in addition to what the caller holds, because pages
of a mapped file are released as soon as they are read.
Not done here: the meaning of the files.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from paceline.checkpoint.disk.direct_write import Writeback
from paceline.errors import CheckpointError, format_count
from paceline.observe.file_writing import create_draft

BLOCK_BYTES = 2**23  # a multiple of the size of every dtype
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # mmap has no name for it
_MAX_TRIES = 4
_FIRST_PAUSE_SECONDS = 0.2
_STORE_ERRORS = {
    "aiohttp": "ClientError",
    "botocore.exceptions": "BotoCoreError",
}  # what breaks is no OSError
_T = TypeVar("_T")


class FileRanges(Protocol):
    """Ranges of one file. `local`: reading twice costs little."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def local(self) -> bool: ...
    def blocks(self, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes from `begin` to `end`; a block is valid until the next one.

        Raises:
            OSError: the file cannot be read, or is shorter.
        """
        ...

    def close(self) -> None: ...


class MappedFile:
    """A file on this machine.

    Raises:
        OSError: it cannot be read.
        ValueError: it is empty.
    """

    local = True

    def __init__(self, path: Path) -> None:
        with path.open("rb") as stream:
            # Writable for torch, and private. Without NORESERVE, Linux refuses a file larger than its memory,
            # although pages are released as soon as they are read.
            self._map = mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE | _MAP_NORESERVE)
        self.num_bytes = len(self._map)

    @property
    def data(self) -> mmap.mmap:
        """All bytes; a tensor that views them keeps the file mapped."""
        return self._map

    def blocks(self, begin: int, end: int) -> Iterator[memoryview]:
        _require_complete(end <= self.num_bytes, end - self.num_bytes)
        for first in range(begin, end, BLOCK_BYTES):
            last = min(first + BLOCK_BYTES, end)
            yield memoryview(self._map)[first:last]
            # Otherwise every page that was read would stay in memory as long as the map.
            page = first - first % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, page, last - page)

    def close(self) -> None:
        """Release the memory map; the file stays mapped until the last block that is in use is freed."""
        del self._map


class RemoteFile:
    """A file of a remote store.

    Args:
        filesystem: of fsspec.
        path: as the file system names it.
    Raises:
        OSError: it is not there, cannot be reached, or has no known length.
    """

    local = False

    def __init__(self, filesystem: Any, path: str) -> None:
        self._file = retry_connection(lambda: filesystem.open(path, "rb", cache_type="none"))
        if not isinstance(self._file.size, int):
            self._file.close()
            raise OSError(f"the server reports no length for {path}; download it first")
        self.num_bytes = self._file.size

    def blocks(self, begin: int, end: int) -> Iterator[memoryview]:
        for first in range(begin, end, BLOCK_BYTES):
            wanted = min(BLOCK_BYTES, end - first)
            yield memoryview(bytearray(retry_connection(lambda: self._read(first, wanted))))  # noqa: B023, called at once

    def close(self) -> None:
        """Close the connection."""
        self._file.close()

    def _read(self, first: int, num_bytes: int) -> bytes:
        try:
            self._file.seek(first)
            data = bytes(self._file.read(num_bytes))
        except ValueError as error:  # raised by fsspec for a server without range requests
            raise NoRangesError(f"no range requests on this server ({error}); download it first") from error
        _require_complete(len(data) == num_bytes, num_bytes - len(data))
        return data


class NoRangesError(OSError):
    """A server without range requests, which would send the whole file each time."""


def retry_connection(act: Callable[[], _T]) -> _T:
    """Return the result of `act`, called again a few times if a connection breaks.

    Raises:
        OSError: the file is not there, is not allowed, or the last attempt broke too.
    """
    for pause in range(_MAX_TRIES):
        try:
            return act()
        except (FileNotFoundError, PermissionError, NoRangesError):
            raise
        except _connection_errors() as error:
            # A client error is an answer and no broken connection: another attempt gets the same one.
            refused = 400 <= getattr(error, "status", 0) < 500
            if refused or pause == _MAX_TRIES - 1:
                raise OSError(str(error) or type(error).__name__) from error
            time.sleep(_FIRST_PAUSE_SECONDS * 2**pause)
    raise AssertionError


def _connection_errors() -> tuple[type[Exception], ...]:
    """Return the errors that libraries of stores raise, as far as they are loaded."""
    loaded = [
        getattr(sys.modules[module], name) for module, name in _STORE_ERRORS.items() if module in sys.modules
    ]
    return OSError, *loaded


def _require_complete(is_complete: bool, missing: int) -> None:
    if not is_complete:
        raise OSError(f"it is cut short: {format_count(missing, 'byte')} missing")


Block = bytes | memoryview
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


def is_disk_full(error: OSError) -> bool:
    """Return whether an error says that there is no space left."""
    return error.errno in _DISK_FULL_ERRORS


class StorageFolder:
    """A folder.

    Args:
        url: a path, or an fsspec URL such as `s3://bucket/folder` or `memory://folder`.
    Raises:
        CheckpointError: no installed library can read such a URL.
    """

    def __init__(self, url: str) -> None:
        try:
            self._fs, root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"cannot reach the folder: {error}",
                where=url,
                next_step="s3:// needs paceline[s3], https:// paceline[http]; a plain path always works",
            ) from error
        self.url, self._root = url, root.rstrip("/")
        local = isinstance(self._fs, LocalFileSystem)
        self._checked: Callable[[str], str] = _require_regular_file if local else str
        self._accompany: type[Writeback] = Writeback if local else _NoWriteback
        self._replace: Callable[[str, bytes], None] = _replace_local if local else self._put

    def place(self, name: str) -> str:
        """Return the path or URL of a file, for messages."""
        return f"{self.url.rstrip('/')}/{name}"

    def local_path(self, name: str) -> Path | None:
        """Return the path of a file on this machine; None in a remote store."""
        return Path(self._path(name)) if isinstance(self._fs, LocalFileSystem) else None

    def write(self, name: str, blocks: Iterable[Block]) -> None:
        """Write a file; a crash can leave a part of it."""
        path = self.make_room(name)
        with self._fs.open(path, "wb") as stream:
            writeback = self._accompany(stream)
            for block in blocks:
                stream.write(block)
                writeback.count_written(len(block))
            writeback.finish()

    def make_room(self, name: str) -> str:
        """Make the parent folder of a file, and return the path of the file."""
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path

    def publish(self, name: str, data: bytes) -> None:
        """Write a small file atomically: a reader sees the old file or all of the new one."""
        path = self.make_room(name)
        self._replace(path, data)

    def read(self, name: str) -> bytes:
        """Return all bytes of a file.

        Raises:
            OSError: it is not there, or it is a pipe or a device, which might never end.
        """
        return bytes(self._fs.cat_file(self._checked(self._path(name))))

    def ranges(self, name: str) -> FileRanges:
        """Open a file to read parts of it.

        Raises:
            OSError: it is not there, cannot be reached, or is no regular file.
        """
        path = self._checked(self._path(name))
        local = self.local_path(name)
        return RemoteFile(self._fs, path) if local is None else MappedFile(local)

    def size(self, name: str) -> int | None:
        """Return the size of a file; None if it is not there."""
        try:
            return int(self._fs.info(self._path(name))["size"])
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        """Return whether there is a file of this name, or a link, wherever that leads to."""
        path = self.local_path(name)
        return os.path.lexists(path) if path else self.size(name) is not None

    def is_folder(self, name: str) -> bool:
        """Return whether there is a folder of this name inside of this one, and not a link to another."""
        path = self.local_path(name)
        return path.is_dir() and not path.is_symlink() if path else bool(self._fs.isdir(self._path(name)))

    def names(self) -> list[str]:
        """Return the names in the folder; empty if the folder is not there."""
        try:
            paths = self._fs.ls(self._root or "/", detail=False)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"cannot read the checkpoint folder: {error}",
                where=self.url,
                next_step="check its permissions, or name another run",
            ) from error
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in paths})

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with everything in it, if it is there."""
        try:
            self._fs.rm(self._path(name), recursive=True)
        except FileNotFoundError:
            return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(path, data)


class _NoWriteback(Writeback):
    """No write-back: a remote store uploads during the write, and confirms it on close."""

    def count_written(self, num_bytes: int) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


def _require_regular_file(path: str) -> str:
    """Return the path if it is a regular file."""
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is not a regular file ({stat.filemode(mode)[0]})", path)
    return path


def _replace_local(path: str, data: bytes) -> None:
    target = Path(path)
    # In the same folder, because a rename is atomic only within one file system.
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with create_draft(draft) as stream:
            stream.write(data)
            stream.flush()
            # Before the rename, or a power cut could leave the new name without its bytes.
            os.fsync(stream.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    # The rename survives a power cut only after the folder itself is synchronised.
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
