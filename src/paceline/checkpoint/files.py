"""Files of one folder, on a local disk or a remote store, through fsspec.

Invariant: when `write` or `publish` returns, the bytes survive a power cut (local) or the store has confirmed
them (remote); what `publish` writes is there in full or not at all. It does not know what the files mean.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from paceline.checkpoint.ranges import Mapped, Ranges, Requested
from paceline.disk.writeback import Writeback
from paceline.errors import CheckpointError

Block = bytes | memoryview
_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    """Does the error say that there is no space left?"""
    return error.errno in _FULL


class Files:
    """A folder.

    Args:
        url: a path, or an fsspec URL such as `s3://bucket/folder` or `memory://folder`.
    Raises:
        CheckpointError: nothing installed can read such a URL.
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
        self._checked: Callable[[str], str] = _regular if local else str
        self._accompany: type[Writeback] = Writeback if local else _Nothing
        self._replace: Callable[[str, bytes], None] = _replace_local if local else self._put

    def place(self, name: str) -> str:
        """Where a file is, as a user may name it."""
        return f"{self.url.rstrip('/')}/{name}"

    def local_path(self, name: str) -> Path | None:
        """Where a file is on this machine; None in a remote store."""
        return Path(self._path(name)) if isinstance(self._fs, LocalFileSystem) else None

    def write(self, name: str, blocks: Iterable[Block]) -> None:
        """Write a file; a half one may be left behind by a crash."""
        path = self.make_room(name)
        with self._fs.open(path, "wb") as stream:
            writeback = self._accompany(stream)
            for block in blocks:
                stream.write(block)
                writeback.wrote(len(block))
            writeback.finish()

    def make_room(self, name: str) -> str:
        """Make the folder that a file lies in; returns the path of the file."""
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path

    def publish(self, name: str, data: bytes) -> None:
        """Write a small file at once: a reader sees the old one, or all of the new one."""
        path = self.make_room(name)
        self._replace(path, data)

    def read(self, name: str) -> bytes:
        """All bytes of a file.

        Raises:
            OSError: it is not there, or it is a pipe or a device, which might have no end.
        """
        return bytes(self._fs.cat_file(self._checked(self._path(name))))

    def ranges(self, name: str) -> Ranges:
        """A file, to read parts of.

        Raises:
            OSError: it is not there, cannot be reached, or is no regular file.
        """
        path = self._checked(self._path(name))
        place = self.local_path(name)
        return Requested(self._fs, path) if place is None else Mapped(place)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is not there."""
        try:
            return int(self._fs.info(self._path(name))["size"])
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """What is directly in the folder; empty if the folder is not there."""
        try:
            found = self._fs.ls(self._root or "/", detail=False)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"cannot read the folder of the checkpoints: {error}",
                where=self.url,
                next_step="check its rights, or name another run",
            ) from error
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found})

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it, if it is there."""
        try:
            self._fs.rm(self._path(name), recursive=True)
        except FileNotFoundError:
            return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, path: str, data: bytes) -> None:
        self._fs.pipe_file(path, data)


class _Nothing(Writeback):
    """No write-back: a remote store uploads while a file is written, and confirms it on close."""

    def wrote(self, num_bytes: int) -> None:
        """Nothing to do."""

    def finish(self) -> None:
        """Nothing to do."""


def _regular(path: str) -> str:
    """The same path, if it is a file of this size and no other."""
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is no regular file ({stat.filemode(mode)[0]})", path)
    return path


def _replace_local(path: str, data: bytes) -> None:
    place = Path(path)
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with draft.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
    descriptor = os.open(place.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
