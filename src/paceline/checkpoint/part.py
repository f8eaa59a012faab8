"""One rank's part of a checkpoint: its files of tensors, then its report. Phase one of publishing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.files import Files, is_full
from paceline.checkpoint.manifest import encode_part
from paceline.checkpoint.staging import Staged
from paceline.checkpoint.writers import Writer
from paceline.errors import CheckpointError, PacelineError

_RETRY_SECONDS = 1.0


def report_name(rank: int) -> str:
    """The file that says that a rank's part is written."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True)
class Patience:
    """What to do when a disk is full.

    Args:
        seconds: how long to wait for space; 0: not at all.
        warn: is told once that the run waits.
    """

    seconds: float
    warn: Callable[[str], None]


def write_part(
    files: Files,
    folder: str,
    rank: int,
    staged: Sequence[Staged],
    scalars: Mapping[str, Any],
    patience: Patience,
    writer: Writer,
) -> None:
    """Write and report; a full disk is tried again.

    Args:
        staged: what the part consists of.
    Raises:
        CheckpointError: the disk refused; what was written of this checkpoint by this rank is removed.
    """

    def write() -> None:
        written = writer.write(files, folder, staged)
        files.publish(f"{folder}/{report_name(rank)}", encode_part(written, scalars))

    insist(write, files, [f"{folder}/{file.draft.name}" for file in staged], patience)


def refused(place: str, error: OSError) -> CheckpointError:
    """The disk or the remote store refused a write."""
    return CheckpointError(
        f"cannot write a checkpoint: {error}; those saved before are untouched",
        where=place,
        next_step="free space, set checkpoint.full_disk_seconds, or choose another checkpoint.folder",
    )


def insist(
    write: Callable[[], None],
    files: Files,
    names: Sequence[str],
    patience: Patience,
    *,
    refuse: Callable[[str, OSError], PacelineError] = refused,
) -> None:
    """Write; while the disk is full and there is patience, remove the half files and try again."""
    expires = time.monotonic() + patience.seconds
    told = False
    while True:
        try:
            return write()
        except OSError as error:
            for name in names:
                files.remove(name)
            if not is_full(error) or time.monotonic() >= expires:
                raise refuse(files.place(names[0]) if names else files.url, error) from error
        if not told:
            patience.warn(f"the disk of {files.url} is full: waiting up to {patience.seconds:g} s for space")
            told = True
        time.sleep(min(_RETRY_SECONDS, patience.seconds))
