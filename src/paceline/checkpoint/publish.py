"""Phase two of a save, on the first rank: wait for the reports of all, write the manifest, tidy up."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from paceline.checkpoint.files import Files
from paceline.checkpoint.manifest import (
    MANIFEST,
    File,
    Manifest,
    Origin,
    decode_part,
    hash_state,
    missing_tensors,
)
from paceline.checkpoint.part import Patience, insist, report_name
from paceline.checkpoint.plan import merge_scalars
from paceline.checkpoint.shelf import Shelf, unusable
from paceline.errors import CheckpointError, DeadlineError

_POLL_SECONDS = 0.02


class PartLostError(CheckpointError):
    """A rank is lost whose part of the state nobody else has written: of this draft nothing can be made."""


@dataclass(frozen=True)
class Keep:
    """How many checkpoints stay: the newest, and the best by evaluation loss."""

    newest: int
    best: int


def publish(
    shelf: Shelf,
    name: str,
    step: int,
    origin: Origin,
    keep: Keep,
    expires: float,
    patience: Patience,
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
    reports = {rank: _await_report(shelf.files, name, rank, expires, left) for rank in ranks}
    _require_those(ranks, reports, idle, shelf.files.place(name))
    parts = [_decoded(report, shelf, name) for report in reports.values() if report is not None]
    files = tuple(file for written, _ in parts for file in written)
    if missing := missing_tensors(files):
        raise CheckpointError(
            f"no rank holds all of {len(missing)} tensors of the state, the first is '{missing[0]}'",
            where=shelf.files.place(name),
            next_step="this is an error of the strategy's layout: report it",
        )
    manifest = _manifest(shelf, step, origin, files, merge_scalars([scalars for _, scalars in parts]))
    insist(lambda: shelf.publish(name, manifest), shelf.files, [f"{name}/{MANIFEST}"], patience)
    _tidy(shelf, keep, patience)


def _manifest(
    shelf: Shelf, step: int, origin: Origin, files: tuple[File, ...], scalars: dict[str, object]
) -> Manifest:
    seal = hash_state(files, scalars)
    return Manifest(step, shelf.next_serial, time.time_ns(), origin, files, scalars, seal, _finite(shelf))


def _finite(shelf: Shelf) -> dict[str, float]:
    """The losses of evaluations, by step."""
    return {str(step): loss for step, loss in shelf.losses.items() if isfinite(loss)}


def _tidy(shelf: Shelf, keep: Keep, patience: Patience) -> None:
    try:
        shelf.tidy(keep.newest, keep.best)
    except OSError as error:
        patience.warn(f"old checkpoints cannot be removed: {error}")


def _require_those(
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


def _decoded(report: bytes, shelf: Shelf, name: str) -> tuple[list[File], Mapping[str, Any]]:
    try:
        return decode_part(report)
    except ValueError as error:
        raise unusable(shelf.files, name, str(error)) from error


def _await_report(
    files: Files, name: str, rank: int, expires: float, left: Callable[[], Collection[int]]
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
