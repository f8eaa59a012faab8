"""Writing the files of a run on a disk that may be full, read-only or gone.

`LineAppender` never fails: it keeps lines that cannot be written and writes them in order once that is
possible again. It warns once when writing first fails, and at the end about lines that were lost.
Invariant: nothing is written through a symbolic link, as a run folder can be somebody else's work.
`explain_os_errors` is for files that a run cannot do without: it turns an OSError into an error with a next
step.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import RunFolderError, format_count

_MAX_PENDING_BYTES = 16 * 2**20

WarnFunction = Callable[[str], object]


def warn_on_stderr(text: str) -> None:
    """Print a line on stderr; a closed stderr is ignored."""
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        return


def create_draft(path: Path) -> BinaryIO:
    """Open a new file for writing; one of this name, which a crash or an attacker has left, is removed.

    Raises:
        OSError: it cannot be created.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return the beginning of a file without waiting: a pipe or a symbolic link in its place is not read.

    Raises:
        OSError: it cannot be read.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read(min(max_bytes, os.fstat(file.fileno()).st_size))


def publish_json(path: Path, value: Any) -> None:
    """Write a value as JSON in place of a file, so that readers see the old or the new one; makes its folder.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with create_draft(draft) as file:
            file.write(json.dumps(value, separators=(",", ":")).encode())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


class LineAppender:
    """A file to which lines are appended.

    Args:
        path: appended to; a line that a crash cut short is ended first, so that it does not spoil the next
            one.
        rotate: renames a file that is full.
        rotate_bytes: the size at which a file is full; 0 for a single file.
        warn: called when the file cannot be written, and when lines are lost.
    """

    def __init__(
        self,
        path: Path,
        rotate: Callable[[Path], None],
        rotate_bytes: int = 0,
        warn: WarnFunction = warn_on_stderr,
    ) -> None:
        self._path, self._rotate, self._rotate_bytes, self._warn = path, rotate, rotate_bytes, warn
        self._pending: deque[bytes] = deque()
        self._pending_bytes = self._num_lost_lines = self._size = 0
        self._file: int | None = None
        self._has_ended_last_line = self._has_warned = False
        self._write_pending()

    def append(self, line: str) -> None:
        """Write a line, which includes its newline, or keep it until the file can be written."""
        data = line.encode(errors="replace")
        self._pending.append(data)
        self._pending_bytes += len(data)
        while self._pending_bytes > _MAX_PENDING_BYTES:
            self._pending_bytes -= len(self._pending.popleft())
            self._num_lost_lines += 1
        self._write_pending()

    def close(self) -> None:
        """Close the file, and warn about lines that could not be written."""
        self._write_pending()
        num_lost = self._num_lost_lines + len(self._pending)
        if num_lost:
            self._warn(
                f"lost {format_count(num_lost, 'line')} of {self._path.name} that could not be written"
            )
        self._close_file()

    def _write_pending(self) -> None:
        try:
            file = self._open() if self._file is None else self._file
            while self._pending:
                if self._rotate_bytes and self._size >= self._rotate_bytes:
                    self._close_file()
                    self._rotate(self._path)
                    file = self._open()
                self._write_first(file)
        except OSError as error:
            self._close_file()
            if not self._has_warned:
                self._has_warned = True
                self._warn(
                    f"cannot write {self._path}: {describe_os_error(error)}; the run goes on without it"
                )

    def _write_first(self, file: int) -> None:
        """Write the first pending line; if a full disk takes only a part, the remainder stays the first."""
        data = self._pending[0]
        count = os.write(file, data)
        self._size += count
        self._pending_bytes -= count
        self._pending.popleft()
        if count < len(data):
            self._pending.appendleft(data[count:])

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o666)
        self._file, self._size = file, os.fstat(file).st_size
        if not self._has_ended_last_line and self._size and os.pread(file, 1, self._size - 1) != b"\n":
            self._size += os.write(file, b"\n")
        # A line without an end is our own from here on, and its remainder is the first pending one.
        self._has_ended_last_line = True
        return file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def describe_os_error(error: OSError) -> str:
    """Return what went wrong, in words."""
    if error.errno == errno.ELOOP:
        return "it is a symbolic link, which is not followed"
    return error.strerror or str(error)


_NEXT_STEPS = {
    errno.ELOOP: "remove the link, or choose another folder: --set run_dir=FOLDER",
    errno.ENOSPC: "free space there, then `paceline train --resume RUN`",
    errno.EDQUOT: "free space there or raise the quota, then `paceline train --resume RUN`",
    errno.EACCES: "choose a folder that you can write to: --set run_dir=FOLDER",
    errno.EPERM: "choose a folder that you can write to: --set run_dir=FOLDER",
    errno.EROFS: "the file system is read-only; choose another folder: --set run_dir=FOLDER",
    errno.ENOTDIR: "a part of this path is a file; choose another folder: --set run_dir=FOLDER",
    errno.EEXIST: "there is a file with this name; choose another folder: --set run_dir=FOLDER",
}


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into an error that names the file or folder and a next step.

    Raises:
        RunFolderError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise run_folder_error(error, path) from error


def run_folder_error(error: OSError, path: Path | None = None) -> RunFolderError:
    """Return the error for a file of a run that could not be written, with what the user can do."""
    return RunFolderError(
        f"cannot write the files of the run: {describe_os_error(error)}",
        where=str(path or error.filename),
        next_step=_NEXT_STEPS.get(error.errno or 0, "choose another folder: --set run_dir=FOLDER"),
    )
