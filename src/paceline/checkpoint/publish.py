"""One rank's part of a checkpoint: its files of tensors, then its report. Phase one of publishing.

Phase two of a save, on the first rank: wait for the reports of all, write the manifest, tidy up.

Make a folder of checkpoints a run's own, on a disk that may be full at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from paceline.checkpoint.catalog import CheckpointCatalog, unusable_checkpoint_error
from paceline.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointOrigin,
    Manifest,
    TensorFileRecord,
    decode_part,
    encode_part,
    hash_state,
    missing_tensors,
)
from paceline.checkpoint.staging import StagedFile
from paceline.checkpoint.storage import StorageFolder, is_disk_full
from paceline.checkpoint.write_plan import merge_scalars
from paceline.checkpoint.writers import PartWriter
from paceline.errors import CheckpointError, DeadlineError, PacelineError

_RETRY_SECONDS = 1.0


def report_name(rank: int) -> str:
    """The file that says that a rank's part is written."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True)
class FullDiskPatience:
    """What to do when a disk is full.

    Args:
        seconds: how long to wait for space; 0: not at all.
        warn: is told once that the run waits.
    """

    seconds: float
    warn: Callable[[str], None]


def write_part(
    files: StorageFolder,
    folder: str,
    rank: int,
    staged: Sequence[StagedFile],
    scalars: Mapping[str, Any],
    patience: FullDiskPatience,
    writer: PartWriter,
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

    write_with_retries(write, files, [f"{folder}/{file.draft.name}" for file in staged], patience)


def refused_write_error(place: str, error: OSError) -> CheckpointError:
    """The disk or the remote store refused a write."""
    return CheckpointError(
        f"cannot write a checkpoint: {error}; those saved before are untouched",
        where=place,
        next_step="free space, set checkpoint.full_disk_seconds, or choose another checkpoint.folder",
    )


def write_with_retries(
    write: Callable[[], None],
    files: StorageFolder,
    names: Sequence[str],
    patience: FullDiskPatience,
    *,
    refuse: Callable[[str, OSError], PacelineError] = refused_write_error,
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
            if not is_disk_full(error) or time.monotonic() >= expires:
                raise refuse(files.place(names[0]) if names else files.url, error) from error
        if not told:
            patience.warn(f"the disk of {files.url} is full: waiting up to {patience.seconds:g} s for space")
            told = True
        time.sleep(min(_RETRY_SECONDS, patience.seconds))


_POLL_SECONDS = 0.02


class PartLostError(CheckpointError):
    """A rank is lost whose part of the state nobody else has written: of this draft nothing can be made."""


@dataclass(frozen=True)
class RetentionCounts:
    """How many checkpoints stay: the newest, and the best by evaluation loss."""

    newest: int
    best: int


def publish(
    shelf: CheckpointCatalog,
    name: str,
    step: int,
    origin: CheckpointOrigin,
    keep: RetentionCounts,
    expires: float,
    patience: FullDiskPatience,
    ranks: Sequence[int],
    left: Callable[[], Collection[int]] = tuple,
    idle: Collection[int] = (),
) -> None:
    """Turn the parts of all ranks into a checkpoint.

    Args:
        expires: when to stop waiting for the other ranks, on the monotonic clock.
        ranks: that write parts; not all, where some were lost.
        left: the ranks that are not lost now, as far as is known; empty: nobody is lost.
        idle: of the ranks, those with nothing to write, which are not needed where they are lost.
    Raises:
        DeadlineError: a rank has not reported; names it.
        PartLostError: a rank was lost before it had; nobody writes to the draft any more.
        CheckpointError: the parts do not fill the state, or the disk refused.
    """
    reports = {rank: _wait_for_report(shelf.files, name, rank, expires, left) for rank in ranks}
    _require_reports(ranks, reports, idle, shelf.files.place(name))
    parts = [_decode_report(report, shelf, name) for report in reports.values() if report is not None]
    files = tuple(file for written, _ in parts for file in written)
    if missing := missing_tensors(files):
        raise CheckpointError(
            f"no rank holds all of {len(missing)} tensors of the state, the first is '{missing[0]}'",
            where=shelf.files.place(name),
            next_step="this is an error of the strategy's layout: report it",
        )
    manifest = _manifest(shelf, step, origin, files, merge_scalars([scalars for _, scalars in parts]))
    write_with_retries(
        lambda: shelf.publish(name, manifest), shelf.files, [f"{name}/{MANIFEST_FILE}"], patience
    )
    _tidy(shelf, keep, patience)


def _manifest(
    shelf: CheckpointCatalog,
    step: int,
    origin: CheckpointOrigin,
    files: tuple[TensorFileRecord, ...],
    scalars: dict[str, object],
) -> Manifest:
    seal = hash_state(files, scalars)
    return Manifest(
        step, shelf.next_serial, time.time_ns(), origin, files, scalars, seal, _finite_losses(shelf)
    )


def _finite_losses(shelf: CheckpointCatalog) -> dict[str, float]:
    """The losses of evaluations, by step."""
    return {str(step): loss for step, loss in shelf.losses.items() if isfinite(loss)}


def _tidy(shelf: CheckpointCatalog, keep: RetentionCounts, patience: FullDiskPatience) -> None:
    try:
        shelf.tidy(keep.newest, keep.best)
    except OSError as error:
        patience.warn(f"old checkpoints cannot be removed: {error}")


def _require_reports(
    ranks: Sequence[int], reports: Mapping[int, bytes | None], idle: Collection[int], place: str
) -> None:
    """See that no rank is lost that had something to write."""
    lost = [rank for rank in ranks if reports[rank] is None and rank not in idle]
    if lost:
        raise PartLostError(
            f"rank {lost[0]} was lost before it had written its part of the checkpoint",
            where=place,
            next_step="--resume RUN goes on from the checkpoint before it",
        )


def _decode_report(
    report: bytes, shelf: CheckpointCatalog, name: str
) -> tuple[list[TensorFileRecord], Mapping[str, Any]]:
    try:
        return decode_part(report)
    except ValueError as error:
        raise unusable_checkpoint_error(shelf.files, name, str(error)) from error


def _wait_for_report(
    files: StorageFolder, name: str, rank: int, expires: float, left: Callable[[], Collection[int]]
) -> bytes | None:
    """What a rank reports; None: it is lost, and has not."""
    pause = _POLL_SECONDS
    while True:
        those = left()
        try:
            return files.read(f"{name}/{report_name(rank)}")
        except FileNotFoundError:
            if those and rank not in those:
                return None
            if time.monotonic() >= expires:
                raise DeadlineError(
                    f"rank {rank} has not written its part of the checkpoint in time",
                    where=files.place(name),
                    next_step="raise checkpoint.deadline_seconds, or check that all nodes share the folder",
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, 1.0)


def claim_folder(files: StorageFolder, patience: FullDiskPatience) -> CheckpointCatalog:
    """Look at a folder, and claim it; see `CheckpointCatalog.claim`.

    Raises:
        CheckpointError: it cannot be read or written.
    """
    found: list[CheckpointCatalog] = []
    write_with_retries(lambda: found.append(CheckpointCatalog.look(files).claim()), files, [], patience)
    return found[-1]
