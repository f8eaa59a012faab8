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
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import CheckpointError

_TENSORS, _SCALARS = "state.safetensors", "state.json"
_SEAL = "record_sha256"


@dataclass(frozen=True)
class Checkpoint:
    """What was read: tensors and scalars by name, as `TrainState.load` takes them."""

    path: Path
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, Any]


class Saved(Protocol):
    """A whole state."""

    @property
    def step(self) -> int:
        """Steps taken."""

    def tensors(self) -> Mapping[str, Tensor]:
        """By name."""

    def scalars(self) -> Mapping[str, Any]:
        """JSON values."""


def save(folder: Path, state: Saved, keep: int) -> Path:
    """Write `folder/step-NNNNNNNN`, and remove all but the `keep` that were saved last.

    Raises:
        CheckpointError: the disk refused; what was saved before is untouched.
    """
    place = folder / name_of(state.step)
    draft = folder / f".{place.name}.{os.getpid()}"
    try:
        draft.mkdir(parents=True, exist_ok=True)
        _write(draft, state)
        if place.exists():
            place.rename(folder / f"{place.name}.replaced")  # still a whole checkpoint until the next line
        draft.rename(place)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"cannot write a checkpoint: {error}", where=str(place), next_step="free space, or change run_dir"
        ) from error
    _remove_old(folder, keep)
    return place


def _write(draft: Path, state: Saved) -> None:
    save_file(_separate(state.tensors()), draft / _TENSORS)
    record = {
        "format": 1,
        "sha256": _digest(draft / _TENSORS),
        "saved_ns": time.time_ns(),
        **state.scalars(),
    }
    text = json.dumps({**record, _SEAL: _seal(record)}, indent=1)
    (draft / _SCALARS).write_text(text + "\n", encoding="utf-8")
    for name in (_TENSORS, _SCALARS):
        _flush(draft / name)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous on the host, none of them sharing memory with another."""
    storages: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        t = tensor.detach().cpu().contiguous()
        place = t.untyped_storage().data_ptr()
        found[name] = t.clone() if place in storages else t
        storages.add(place)
    return found


def _remove_old(folder: Path, keep: int) -> None:
    """Checkpoints beyond `keep`, replaced ones, and drafts that a crash left."""
    kept = _all(folder)[-max(1, keep) :]
    for path in [*folder.glob("step-*"), *folder.glob(".step-*")]:
        if path.is_dir() and (path not in kept or path.suffix == ".replaced"):
            shutil.rmtree(path, ignore_errors=True)


def load(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        CheckpointError: missing, cut short, or its bytes are not those that were written.
    """
    try:
        record = _read(path)
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
    """The whole checkpoint in a folder that was saved last, or None.

    Not the one of the highest step: a run that went back to an early checkpoint has left that behind.
    """
    found = _all(folder)
    return found[-1] if found else None


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint; sorts by step."""
    return f"step-{step:08d}"


def _all(folder: Path) -> list[Path]:
    """Whole checkpoints, in the order in which they were saved."""
    found = []
    for path in folder.glob("step-*"):
        try:
            found.append((int(_read(path)["saved_ns"]), path))
        except (OSError, ValueError, KeyError):
            continue  # not whole: `load` says why to who asks for it by name
    return [path for _, path in sorted(found)]


def _read(path: Path) -> dict[str, Any]:
    """The record of a checkpoint, if it is the one that was written."""
    record = json.loads((path / _SCALARS).read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.pop(_SEAL, None) != _seal(record):
        raise ValueError(f"{_SCALARS} is damaged")
    return record


def _seal(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
