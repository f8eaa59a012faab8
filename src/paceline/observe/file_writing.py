"""Lines at the end of a file, on a disk that may be full, read-only or gone: the run goes on without them.

Invariant: writing never fails. What cannot be written is kept, and written in its order as soon as that is
possible again; the user is told once that it cannot, and once how many lines were given up for good.

Files of a run that cannot be written: what happened and what to do, in place of a bare OSError.
"""

from __future__ import annotations

import errno
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import RunFolderError

_MAX_PENDING_BYTES = 16 * 2**20

WarnFunction = Callable[[str], object]


def warn_on_stderr(text: str) -> None:
    """A line for the user, unless nobody reads it any more."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        return


class LineAppender:
    """The lines of one file.

    Args:
        path: appended to; a line that a crash cut short is ended, so that it spoils no other.
        put_aside: renames a file that is full.
        rotate_bytes: size at which a file is full; 0: never.
        say: is told of what cannot be written.
    """

    def __init__(
        self,
        path: Path,
        put_aside: Callable[[Path], None],
        rotate_bytes: int = 0,
        say: WarnFunction = warn_on_stderr,
    ) -> None:
        self._path, self._put_aside, self._rotate_bytes, self._say = path, put_aside, rotate_bytes, say
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._lost_lines = self._size = 0
        self._file: int | None = None
        self._cut = self._told = False
        self._write()

    def append(self, line: str) -> None:
        """Write a line, with its end; or keep it."""
        data = line.encode(errors="replace")
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        while self._waiting_bytes > _MAX_PENDING_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._lost_lines += 1
        self._write()

    def close(self) -> None:
        """Close the file; what still cannot be written is lost, and that is said."""
        self._write()
        lost = self._lost_lines + len(self._waiting)
        if lost:
            self._say(f"{self._path.name} lacks {lost} lines, which could not be written")
        self._let_go()

    def _write(self) -> None:
        try:
            file = self._open() if self._file is None else self._file
            while self._waiting:
                if self._rotate_bytes and self._size >= self._rotate_bytes:
                    self._let_go()
                    self._put_aside(self._path)
                    file = self._open()
                self._write_first(file)
        except OSError as error:
            self._let_go()
            if not self._told:
                self._told = True
                self._say(f"{self._path} cannot be written: {error.strerror}; the run goes on without it")

    def _write_first(self, file: int) -> None:
        """The first line that waits; of one that was cut by a full disk the rest is the first."""
        data = self._waiting[0]
        count = os.write(file, data)
        self._size += count
        self._waiting_bytes -= count
        self._waiting.popleft()
        if count < len(data):
            self._waiting.appendleft(data[count:])

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._file, self._size = file, os.fstat(file).st_size
        if not self._cut and self._size and os.pread(file, 1, self._size - 1) != b"\n":
            self._size += os.write(file, b"\n")
        self._cut = True  # from here on a line without an end is one of ours, and its rest follows
        return file

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


_ADVICE = {
    errno.ENOSPC: "free space there, then `paceline train --resume RUN`",
    errno.EDQUOT: "free space there, or raise the quota, then `paceline train --resume RUN`",
    errno.EACCES: "name a folder that you may write: --set run_dir=FOLDER",
    errno.EPERM: "name a folder that you may write: --set run_dir=FOLDER",
    errno.EROFS: "the file system is read-only; name another folder: --set run_dir=FOLDER",
    errno.ENOTDIR: "a part of this path is a file; name another folder: --set run_dir=FOLDER",
    errno.EEXIST: "there is a file of this name; name another folder: --set run_dir=FOLDER",
}


@contextmanager
def explain_os_errors(place: Path) -> Iterator[None]:
    """Say which file or folder of a run could not be written.

    Raises:
        RunFolderError: in place of an OSError of the block.
    """
    try:
        yield
    except OSError as error:
        raise run_folder_error(error, place) from error


def run_folder_error(error: OSError, place: Path | None = None) -> RunFolderError:
    """What a file system refused, where, and what to do."""
    return RunFolderError(
        f"cannot write the files of the run: {error.strerror or error}",
        where=str(place or error.filename),
        next_step=_ADVICE.get(error.errno or 0, "name another folder: --set run_dir=FOLDER"),
    )
