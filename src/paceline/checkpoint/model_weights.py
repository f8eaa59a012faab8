"""The weights of a model alone, read from a checkpoint and exported as one safetensors file.

Invariant: a file that `export_weights` wrote loads with `safetensors.torch.load_file` and a strict
`load_state_dict`: it has every name of the state dict, tied ones included. It carries a SHA-256 of all
values, which `pretrained` checks. No processes are started, and no user code runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import LoadedCheckpoint, StoredCheckpoint, load_checkpoint
from paceline.checkpoint.pretrained import VALUES_KEY, VOCABULARY_KEY
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import CheckpointError
from paceline.recipe.toml_text import parse_toml
from paceline.state.slot import SlotIndex

_MODEL_PREFIX, _AVERAGE_PREFIX, _MASK_PREFIX = "model/", "average/values/", "sparsity/"
_NORMALIZERS_PREFIX = "normalizers/"  # those of the observations of a policy
_MODEL_PREFIXES = (_MODEL_PREFIX, _AVERAGE_PREFIX, _MASK_PREFIX)
WhichWeights = Literal["last", "average"]


@dataclass(frozen=True)
class ExportedWeights:
    """The result of an export.

    Args:
        path: of the file.
        checkpoint: name of the checkpoint that it was read from.
        step: steps taken.
        num_tensors: tensors in the file.
        num_values: numbers in all parameters and buffers, tied ones once.
        masks: the file of the masks, bool, by the names of their tensors; None: the run has none.
        num_masked: numbers that are masked, and so are zero.
    """

    path: Path
    checkpoint: str
    step: int
    num_tensors: int
    num_values: int
    masks: Path | None = None
    num_masked: int = 0


def find_checkpoint(
    files: StorageFolder,
    warn: Callable[[str], None],
    name: str | None = None,
    load: Callable[[StorageFolder, str, tuple[str, ...]], LoadedCheckpoint] = load_checkpoint,
) -> LoadedCheckpoint:
    """Load the model's part of a checkpoint.

    Args:
        files: the folder of the checkpoints.
        warn: called with the reason for each checkpoint that cannot be used.
        name: the checkpoint; "best": by evaluation; None: the newest valid one.
        load: reads one; `map_checkpoint` maps its files instead.
    Raises:
        CheckpointError: the named one is damaged, or there is no valid one.
    """
    if name is not None:
        return load(files, CheckpointCatalog.read(files).resolve_name(name), _MODEL_PREFIXES)
    catalog = CheckpointCatalog.read(files)
    for error in catalog.broken.values():
        warn(error.what)
    for entry in reversed(catalog.whole):
        try:
            return load(files, entry.name, _MODEL_PREFIXES)
        except CheckpointError as error:
            warn(f"{error.what}; trying the one before it")
    raise CheckpointError(
        "there is no valid checkpoint", where=files.url, next_step="name a run folder with a checkpoint in it"
    )


@dataclass(frozen=True)
class ModelWeightsSource:
    """The model's part of a stored state, with the moments that normalize its inputs; see
    `paceline.state.slot.TensorSource`.

    Args:
        stored: the checkpoint.
        which: "last" reads the weights, "average" their average; None: the average, if there is one.
    Raises:
        CheckpointError: the average is requested, and there is none.
    """

    stored: StoredCheckpoint
    which: WhichWeights | None = None

    def __post_init__(self) -> None:
        if self.which == "average" and not any(
            name.startswith(_AVERAGE_PREFIX) for name in self.stored.shapes
        ):
            raise _no_average_error(self.stored.name)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the whole tensors, by name."""
        prefixes = _MODEL_PREFIX, _NORMALIZERS_PREFIX
        return {name: shape for name, shape in self.stored.shapes.items() if name.startswith(prefixes)}

    def read(self, wanted: Mapping[str, SlotIndex]) -> Mapping[str, Tensor]:
        """Read parts of some tensors into new memory."""
        stored = {name: self._stored_name(name) for name in wanted}
        tensors = self.stored.read({stored[name]: index for name, index in wanted.items()})
        return {name: tensors[stored[name]] for name in wanted}

    def _stored_name(self, name: str) -> str:
        average = _AVERAGE_PREFIX + name.removeprefix(_MODEL_PREFIX)
        return average if self.which != "last" and average in self.stored.shapes else name


def model_weights_of(checkpoint: LoadedCheckpoint, which: WhichWeights | None = None) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones once, with averages in place of their
    parameters.

    Args:
        checkpoint: a checkpoint.
        which: "last" ignores an average; None: the average, if the checkpoint has one.
    Raises:
        CheckpointError: the average is requested, and there is none.
    """
    weights = _without_prefix(_MODEL_PREFIX, checkpoint.tensors)
    average = _without_prefix(_AVERAGE_PREFIX, checkpoint.tensors)
    if which == "average" and not average:
        raise _no_average_error(checkpoint.name)
    if which == "last":
        return weights
    return weights | {name: value.to(weights[name].dtype) for name, value in average.items()}


def _no_average_error(name: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {name} has no average of the weights",
        next_step="set average.decay in the recipe before training, or use the last weights",
    )


def with_tied_names(weights: Mapping[str, Tensor], checkpoint: LoadedCheckpoint) -> dict[str, Tensor]:
    """Return the weights under every name of the model's state dict."""
    tied: Mapping[str, str] = checkpoint.scalars["tied"]
    # Clones, because safetensors refuses tensors that share memory.
    return {**weights, **{name: weights[first].clone() for name, first in tied.items()}}


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): value for n, value in tensors.items() if n.startswith(prefix)}


def export_weights(
    checkpoint: LoadedCheckpoint, path: Path, which: WhichWeights | None = None
) -> ExportedWeights:
    """Write parameters and persistent buffers under the names of the model's state dict.

    The masks of a run with `[sparsity]` go into a file of their own, NAME.masks.safetensors.

    Args:
        checkpoint: a checkpoint.
        path: of the file; an existing file is replaced atomically, or stays as it is if the write fails.
        which: as for `model_weights_of`.
    Raises:
        CheckpointError: the file cannot be written, or the checkpoint's recipe is damaged.
    """
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"cannot export to '{path}': its name does not end in .safetensors",
            next_step=f"--to {path.with_suffix('.safetensors')}",
        )
    weights = model_weights_of(checkpoint, which)
    named = with_tied_names(weights, checkpoint)
    _save_atomically(named, path, {"format": "pt", **_export_metadata(checkpoint, named)})
    masks, masks_path = _without_prefix(_MASK_PREFIX, checkpoint.tensors), None
    if masks:
        masks_path = path.with_suffix(".masks.safetensors")
        _save_atomically(masks, masks_path, {"format": "pt", "checkpoint": checkpoint.name})
    num_masked = sum(int((~mask).sum()) for mask in masks.values())
    count = sum(value.numel() for value in weights.values())
    step = checkpoint.manifest.step
    return ExportedWeights(path, checkpoint.name, step, len(named), count, masks_path, num_masked)


def _save_atomically(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    # In the same folder, because a rename is atomic only within one file system.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, draft, metadata)
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the weights: {error}",
            where=str(path),
            next_step="free space, or choose another place",
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def _export_metadata(checkpoint: LoadedCheckpoint, named: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the origin of the weights as texts, which is all that safetensors keeps."""
    origin = checkpoint.manifest.origin
    return {
        "task": _task_of(checkpoint),
        "step": str(checkpoint.manifest.step),
        "run": origin.run,
        "checkpoint": checkpoint.name,
        "strategy": origin.strategy,
        "recipe": origin.recipe,
        "recipe_sha256": hashlib.sha256(origin.recipe.encode()).hexdigest(),
        "versions": json.dumps(origin.versions),
        "tied": json.dumps(checkpoint.scalars["tied"]),
        VALUES_KEY: _digest(sorted(named.items())),
        **{key: value for key, value in origin.versions.items() if key == VOCABULARY_KEY},
    }


def _task_of(checkpoint: LoadedCheckpoint) -> str:
    """Return the task of the recipe in a checkpoint, which can be any text."""
    try:
        return str(parse_toml(checkpoint.manifest.origin.recipe)["task"])
    except (tomllib.TOMLDecodeError, KeyError) as error:
        what = "it names no task" if isinstance(error, KeyError) else f"it is not TOML: {error}"
        raise CheckpointError(
            f"the checkpoint {checkpoint.name} cannot be exported: its recipe is damaged: {what}",
            next_step="name another checkpoint of the run",
        ) from error


def _digest(values: Iterable[tuple[str, Any]]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in values:
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
