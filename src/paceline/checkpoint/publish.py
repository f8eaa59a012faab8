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
) -> None:
    """Turn the parts of all ranks into a checkpoint.

    Args:
        expires: when to stop waiting for the other ranks, on the monotonic clock.
        ranks: that write parts; not all, where some were lost.
        left: the ranks that are not lost now, as far as is known; empty: nobody is lost.
    Raises:
        DeadlineError: a rank has not reported; names it.
        CheckpointError: a rank was lost before it had, the parts do not fill the state, or the disk refused.
    """
    reports = [_await_report(shelf.files, name, rank, expires, left) for rank in ranks]
    parts = [_decoded(report, shelf, name) for report in reports]
    files = tuple(file for written, _ in parts for file in written)
    if missing := missing_tensors(files):
        raise CheckpointError(
            f"no rank holds all of {len(missing)} tensors of the state, the first is '{missing[0]}'",
            where=shelf.files.place(name),
            next_step="this is an error of the strategy's layout: report it",
        )
    scalars = merge_scalars([scalars for _, scalars in parts])
    seal = hash_state(files, scalars)
    manifest = Manifest(step, shelf.next_serial, time.time_ns(), origin, files, scalars, seal, _finite(shelf))
    insist(lambda: shelf.publish(name, manifest), shelf.files, [f"{name}/{MANIFEST}"], patience)
    _tidy(shelf, keep, patience)


def _finite(shelf: Shelf) -> dict[str, float]:
    """The losses of evaluations, by step."""
    return {str(step): loss for step, loss in shelf.losses.items() if isfinite(loss)}


def _tidy(shelf: Shelf, keep: Keep, patience: Patience) -> None:
    try:
        shelf.tidy(keep.newest, keep.best)
    except OSError as error:
        patience.warn(f"old checkpoints cannot be removed: {error}")


def _decoded(report: bytes, shelf: Shelf, name: str) -> tuple[list[File], Mapping[str, Any]]:
    try:
        return decode_part(report)
    except ValueError as error:
        raise unusable(shelf.files, name, str(error)) from error


def _await_report(
    files: Files, name: str, rank: int, expires: float, left: Callable[[], Collection[int]]
) -> bytes:
    pause = _POLL_SECONDS
    while True:
        those = left()
        try:
            return files.read(f"{name}/{report_name(rank)}")
        except FileNotFoundError:
            if those and rank not in those:
                raise CheckpointError(
                    f"rank {rank} was lost before it had written its part of the checkpoint",
                    where=files.place(name),
                    next_step="--resume RUN goes on from the checkpoint before it",
                ) from None
            if time.monotonic() >= expires:
                raise DeadlineError(
                    f"rank {rank} has not written its part of the checkpoint in time",
                    where=files.place(name),
                    next_step="raise checkpoint.deadline_seconds, or check that all nodes share the folder",
                ) from None
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
