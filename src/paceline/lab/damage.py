"""Damage to files of a host: a full disk, a file that was cut, a bit that flipped. Acts on the real files.

Invariant: what is damaged and where follows from the numbers that are passed in, never from chance.
"""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import LabError

_FILLER = ".filler"

Draw = Callable[[int, str], int]
"""A number below the first argument, for the purpose that the second one names."""


def inside_path(first: int, path: str, directory: Path) -> Path:
    """Where a file of a host is for a process outside: below the host's own root."""
    return Path(f"/proc/{first}/root") / (directory / path).relative_to("/")


def newest(pattern: Path) -> Path:
    """The newest file that fits.

    Raises:
        LabError: none does.
    """
    found = [Path(name) for name in glob.glob(str(pattern)) if Path(name).is_file()]  # noqa: PTH207, absolute
    if not found:
        raise LabError(
            f"no file fits {pattern}",
            where="the fault plan",
            next_step="let it happen later, or check the path",
        )
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def flip_bit(path: Path, draw: Draw) -> dict[str, object]:
    """Flip one bit of a file in place; says which."""
    size = path.stat().st_size
    if size == 0:
        raise LabError(f"{path.name} is empty: it has no bit to flip")
    offset, bit = draw(size, "byte"), draw(8, "bit")
    with path.open("r+b") as stream:
        stream.seek(offset)
        (old,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([old ^ (1 << bit)]))
    return {"file": path.name, "byte": offset, "bit": bit}


def tear(path: Path, draw: Draw) -> dict[str, object]:
    """Cut a file in place; says where."""
    size = path.stat().st_size
    kept = draw(max(1, size), "length")
    os.truncate(path, kept)
    return {"file": path.name, "kept_bytes": kept, "of_bytes": size}


def fill(disks: Sequence[Path]) -> None:
    """Take all space that is left on disks."""
    for disk in disks:
        fd = os.open(disk / _FILLER, os.O_WRONLY | os.O_CREAT)
        try:
            _take(fd)
        finally:
            os.close(fd)


def _take(fd: int) -> None:
    piece, end = 1 << 20, os.fstat(fd).st_size
    while piece:
        try:
            os.posix_fallocate(fd, end, piece)
            end += piece
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece >>= 1


def free(disks: Sequence[Path]) -> None:
    """Give it back."""
    for disk in disks:
        (disk / _FILLER).unlink(missing_ok=True)
