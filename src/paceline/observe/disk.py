"""Files of a run that cannot be written: what happened and what to do, in place of a bare OSError."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import RunFolderError

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
def explained(place: Path) -> Iterator[None]:
    """Say which file or folder of a run could not be written.

    Raises:
        RunFolderError: in place of an OSError of the block.
    """
    try:
        yield
    except OSError as error:
        raise unwritable(error, place) from error


def unwritable(error: OSError, place: Path | None = None) -> RunFolderError:
    """What a file system refused, where, and what to do."""
    return RunFolderError(
        f"cannot write the files of the run: {error.strerror or error}",
        where=str(place or error.filename),
        next_step=_ADVICE.get(error.errno or 0, "name another folder: --set run_dir=FOLDER"),
    )
