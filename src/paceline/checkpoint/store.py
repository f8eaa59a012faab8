"""Save and load a training state as safetensors and JSON, one folder a step.

A checkpoint is written beside its place and renamed into it, so a folder with the final name is whole;
its tensors carry a SHA-256 that is checked before anything is loaded. Older ones are removed only after
a newer one is in place. No pickle is written or read. Replicas are equal, so one rank writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.state import TrainState

_TENSORS, _SCALARS = "state.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """What was read: tensors and scalars by name, as `TrainState.load` takes them."""

    path: Path
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, Any]


def save(folder: Path, state: TrainState, keep: int) -> Path:
    """Write `folder/step-NNNNNNNN` and remove all but the newest `keep`.

    Raises:
        CheckpointError: the disk refused; what was saved before is untouched.
    """
    place = folder / name_of(state.step)
    draft = folder / f".{place.name}.{os.getpid()}"
    try:
        draft.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().cpu().contiguous() for name, t in state.tensors().items()}
        save_file(tensors, draft / _TENSORS)
        record = {"format": 1, "sha256": _digest(draft / _TENSORS), **state.scalars()}
        (draft / _SCALARS).write_text(json.dumps(record, indent=1) + "\n")
        for name in (_TENSORS, _SCALARS):
            _flush(draft / name)
        if place.exists():
            shutil.rmtree(place)
        draft.rename(place)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"cannot write a checkpoint: {error}", where=str(place), next_step="free space, or change run_dir"
        ) from error
    for old in _all(folder)[: -max(1, keep)]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def load(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        CheckpointError: missing, cut short, or its bytes are not those that were written.
    """
    try:
        record = json.loads((path / _SCALARS).read_text())
        found = _digest(path / _TENSORS)
        if found != record["sha256"]:
            raise CheckpointError(
                f"{_TENSORS} is damaged: SHA-256 {found[:12]}..., written was {record['sha256'][:12]}...",
                where=str(path),
                next_step="remove this folder; the checkpoint before it is used",
            )
        return Checkpoint(path, load_file(path / _TENSORS), record)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the checkpoint: {error}",
            where=str(path),
            next_step="name a run folder, or a folder step-NNNNNNNN inside its checkpoints",
        ) from error


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder, or None."""
    found = _all(folder)
    return found[-1] if found else None


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint; sorts by step."""
    return f"step-{step:08d}"


def _all(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if (p / _SCALARS).exists())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
