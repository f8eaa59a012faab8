"""Publishing a checkpoint in two phases, so that a folder holds a complete checkpoint or none.

Phase one, on every rank: write the files of its part, then a report that lists them. Phase two, on the first
rank: wait for all reports, write the manifest, and remove checkpoints that are no longer kept. Both wait for
space if the disk is full, and so does claiming a folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

from paceline.checkpoint.catalog import CheckpointCatalog, unusable_checkpoint_error
from paceline.checkpoint.checkpoint_certificate import CERTIFICATE_FILE, Certifier
from paceline.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointOrigin,
    Manifest,
    RankPart,
    TensorFileRecord,
    decode_part,
    encode_part,
    hash_state,
    missing_tensors,
)
from paceline.checkpoint.staging import StagedFile, chunk_checksums
from paceline.checkpoint.storage import StorageFolder, is_disk_full
from paceline.checkpoint.write_plan import merge_scalars
from paceline.checkpoint.writers import PartWriter
from paceline.errors import CheckpointError, DeadlineError, PacelineError

_RETRY_SECONDS = 1.0
_T = TypeVar("_T")


def report_name(rank: int) -> str:
    """Return the name of the file that a rank writes after the files of its part."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True)
class FullDiskPatience:
    """The time to wait for space on a full disk.

    Args:
        seconds: the longest wait; 0: none.
        warn: called once when the wait begins.
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
    """Write and report a rank's part of a checkpoint; wait for space if the disk is full.

    Args:
        files: the folder of the checkpoints.
        folder: name of the checkpoint.
        rank: this rank.
        staged: the files of the part.
        scalars: this rank's values that are not tensors.
        patience: with a full disk.
        writer: writes the files.
    Raises:
        CheckpointError: the write failed; this rank's files of the checkpoint are removed.
    """

    def write() -> None:
        written = writer.write(files, folder, staged)
        tensors = {file.draft.name: chunk_checksums(file) for file in staged}
        # The report comes last, because it states that all files before it are on the disk.
        files.publish(f"{folder}/{report_name(rank)}", encode_part(RankPart(written, scalars, tensors)))

    write_with_retries(write, files, [f"{folder}/{file.draft.name}" for file in staged], patience)


def refused_write_error(path: str, error: OSError) -> CheckpointError:
    """Return the error for a failed write to a disk or remote store."""
    return CheckpointError(
        f"cannot write a checkpoint: {error}; those saved before are untouched",
        where=path,
        next_step="free space, set checkpoint.full_disk_seconds, or choose another checkpoint.folder"
        if is_disk_full(error)
        else "look at this file and the permissions of its folder, or choose another checkpoint.folder",
    )


def write_with_retries(
    write: Callable[[], _T],
    files: StorageFolder,
    names: Sequence[str],
    patience: FullDiskPatience,
    *,
    refuse: Callable[[str, OSError], PacelineError] = refused_write_error,
) -> _T:
    """Call `write` and return its result; while the disk is full and there is patience, try again.

    Args:
        write: writes files; called again from the start.
        files: the folder.
        names: files that a failed attempt can leave; they are removed.
        patience: with a full disk.
        refuse: returns the error to raise.
    """
    expires = time.monotonic() + patience.seconds
    warned = False
    while True:
        try:
            return write()
        except OSError as error:
            for name in names:
                # What a failed attempt has left takes the space that the next one needs.
                files.remove(name)
            if not is_disk_full(error) or time.monotonic() >= expires:
                raise refuse(files.place(names[0]) if names else files.url, error) from error
        if not warned:
            patience.warn(f"the disk of {files.url} is full: waiting up to {patience.seconds:g} s for space")
            warned = True
        time.sleep(min(_RETRY_SECONDS, patience.seconds))


_POLL_SECONDS = 0.02


class PartLostError(CheckpointError):
    """A rank was lost before it had written a part of the state that no other rank writes."""


@dataclass(frozen=True)
class RetentionCounts:
    """The numbers of checkpoints to keep: the newest, and the best by evaluation loss."""

    newest: int
    best: int


def publish(
    catalog: CheckpointCatalog,
    name: str,
    step: int,
    origin: CheckpointOrigin,
    keep: RetentionCounts,
    expires: float,
    patience: FullDiskPatience,
    ranks: Sequence[int],
    left: Callable[[], Collection[int]] = tuple,
    idle: Collection[int] = (),
    certifier: Certifier | None = None,
) -> None:
    """Make the parts of all ranks a checkpoint.

    Args:
        catalog: of the folder.
        name: of the checkpoint.
        step: steps taken.
        origin: of the run.
        keep: how many checkpoints to keep.
        expires: when to stop waiting for other ranks, on the monotonic clock.
        patience: with a full disk.
        ranks: ranks that write parts.
        left: returns the ranks that are not lost, as far as is known; empty: none is lost.
        idle: ranks with nothing to write, whose report is not needed if they are lost.
        certifier: makes the certificate; None: one without a verification.
    Raises:
        DeadlineError: a rank has not reported in time; names it.
        PartLostError: a rank was lost before it had reported.
        CheckpointError: the parts do not fill the state, or the write failed.
    """
    reports = {rank: _wait_for_report(catalog.files, name, rank, expires, left) for rank in ranks}
    _require_reports(ranks, reports, idle, catalog.files.place(name))
    parts = [_decode_report(report, catalog, name) for report in reports.values() if report is not None]
    files = tuple(file for part in parts for file in part.files)
    if missing := missing_tensors(files):
        raise CheckpointError(
            f"internal error: {len(missing)} tensors of the state are not complete, such as '{missing[0]}'",
            where=catalog.files.place(name),
            next_step="please report it with the strategy",
        )
    manifest = _manifest(catalog, step, origin, files, merge_scalars([part.scalars for part in parts]))
    tensors = {file: checksums for part in parts for file, checksums in part.tensors.items()}
    certificate = (certifier or Certifier()).certify(manifest, tensors)

    def write() -> None:
        catalog.files.publish(f"{name}/{CERTIFICATE_FILE}", certificate)
        # From the manifest on the draft is a checkpoint: only cleaning up may fail after it.
        catalog.publish(name, manifest)

    written_names = [f"{name}/{CERTIFICATE_FILE}", f"{name}/{MANIFEST_FILE}"]
    write_with_retries(write, catalog.files, written_names, patience)
    _remove_expired(catalog, keep, patience)


def _manifest(
    catalog: CheckpointCatalog,
    step: int,
    origin: CheckpointOrigin,
    files: tuple[TensorFileRecord, ...],
    scalars: dict[str, object],
) -> Manifest:
    seal = hash_state(files, scalars)
    return Manifest(
        step, catalog.next_serial, time.time_ns(), origin, files, scalars, seal, _finite_losses(catalog)
    )


def _finite_losses(catalog: CheckpointCatalog) -> dict[str, float]:
    """Return the evaluation losses that JSON can express, by step."""
    return {str(step): loss for step, loss in catalog.losses.items() if isfinite(loss)}


def _remove_expired(catalog: CheckpointCatalog, keep: RetentionCounts, patience: FullDiskPatience) -> None:
    try:
        catalog.remove_expired(keep.newest, keep.best)
    except OSError as error:
        patience.warn(f"old checkpoints cannot be removed: {error}")


def _require_reports(
    ranks: Sequence[int], reports: Mapping[int, bytes | None], idle: Collection[int], path: str
) -> None:
    """Check that no rank was lost that had something to write."""
    lost_ranks = [rank for rank in ranks if reports[rank] is None and rank not in idle]
    if lost_ranks:
        raise PartLostError(
            f"rank {lost_ranks[0]} was lost before it had written its part of the checkpoint",
            where=path,
            next_step="--resume RUN continues from the checkpoint before it",
        )


def _decode_report(report: bytes, catalog: CheckpointCatalog, name: str) -> RankPart:
    try:
        return decode_part(report)
    except ValueError as error:
        raise unusable_checkpoint_error(catalog.files, name, str(error)) from error


def _wait_for_report(
    files: StorageFolder, name: str, rank: int, expires: float, left: Callable[[], Collection[int]]
) -> bytes | None:
    """Return the report of a rank; None: the rank is lost and has not reported."""
    pause = _POLL_SECONDS
    while True:
        # Asked before the read: a rank that reports and is lost afterwards counts.
        left_ranks = left()
        try:
            return files.read(f"{name}/{report_name(rank)}")
        except FileNotFoundError:
            if left_ranks and rank not in left_ranks:
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
    """Read a folder and claim it for this run, see `CheckpointCatalog.claim`.

    Raises:
        CheckpointError: it cannot be read or written.
    """
    return write_with_retries(lambda: CheckpointCatalog.read(files).claim(), files, [], patience)
