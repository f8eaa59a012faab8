"""The weights of a model alone, out of a checkpoint, as one safetensors file.

Invariant: a file that `export_weights` wrote loads with `safetensors.torch.load_file` and a strict
`load_state_dict`: it has every name of the state dict, tied ones too. It carries a SHA-256 of all values, by
which `paceline.checkpoint.pretrained` checks it. No processes are started, no user code is run.
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
from paceline.state.slot import SlotIndex

_MODEL_PREFIX, _AVERAGE_PREFIX = "model/", "average/values/"
_MODEL_PREFIXES = (_MODEL_PREFIX, _AVERAGE_PREFIX)
WhichWeights = Literal["last", "average"]


@dataclass(frozen=True)
class ExportedWeights:
    """What was written.

    Args:
        checkpoint: name of the checkpoint that it comes from.
        num_values: numbers in all parameters and buffers, tied ones once.
    """

    path: Path
    checkpoint: str
    step: int
    num_tensors: int
    num_values: int


def find_checkpoint(
    files: StorageFolder, warn: Callable[[str], None], name: str | None = None
) -> LoadedCheckpoint:
    """The model's part of a checkpoint.

    Args:
        name: which one; "best": by evaluation; None: the newest that is valid.
        warn: is told which ones cannot be used and why.
    Raises:
        CheckpointError: the named one is damaged, or there is no valid one.
    """
    if name is not None:
        return load_checkpoint(files, CheckpointCatalog.look(files).named(name), _MODEL_PREFIXES)
    shelf = CheckpointCatalog.look(files)
    for error in shelf.broken.values():
        warn(error.what)
    for kept in reversed(shelf.whole):
        try:
            return load_checkpoint(files, kept.name, _MODEL_PREFIXES)
        except CheckpointError as error:
            warn(f"{error.what}; the one before it is used")
    raise CheckpointError(
        "there is no valid checkpoint", where=files.url, next_step="name a run folder with a checkpoint in it"
    )


@dataclass(frozen=True)
class ModelWeightsSource:
    """The model's part of a stored state, the average in place of what it is of; see `paceline.state.slot.TensorSource`.

    Args:
        which: see `model_weights_of`.
    Raises:
        CheckpointError: an average is wanted, and there is none.
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
        """Of the whole tensors, by name."""
        return {name: shape for name, shape in self.stored.shapes.items() if name.startswith(_MODEL_PREFIX)}

    def read(self, wanted: Mapping[str, SlotIndex]) -> Mapping[str, Tensor]:
        """Parts of some tensors, in new memory."""
        stored = {name: self._place(name) for name in wanted}
        found = self.stored.read({stored[name]: index for name, index in wanted.items()})
        return {name: found[stored[name]] for name in wanted}

    def _place(self, name: str) -> str:
        average = _AVERAGE_PREFIX + name.removeprefix(_MODEL_PREFIX)
        return average if self.which != "last" and average in self.stored.shapes else name


def model_weights_of(found: LoadedCheckpoint, which: WhichWeights | None = None) -> dict[str, Tensor]:
    """Parameters and persistent buffers, by name, tied ones once; the average in place of what it is of.

    Args:
        which: "last" leaves an average out; None: the average, if the checkpoint has one.
    Raises:
        CheckpointError: an average is wanted, and there is none.
    """
    own = _without_prefix(_MODEL_PREFIX, found.tensors)
    average = _without_prefix(_AVERAGE_PREFIX, found.tensors)
    if which == "average" and not average:
        raise _no_average_error(found.name)
    if which == "last":
        return own
    return own | {name: value.to(own[name].dtype) for name, value in average.items()}


def _no_average_error(name: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {name} holds no average of the weights",
        next_step="set average.decay in the recipe before training, or take the last weights",
    )


def with_tied_names(own: Mapping[str, Tensor], found: LoadedCheckpoint) -> dict[str, Tensor]:
    """Weights under every name that the model's state dict has."""
    tied: Mapping[str, str] = found.scalars["tied"]
    return {**own, **{name: own[first].clone() for name, first in tied.items()}}


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): value for n, value in tensors.items() if n.startswith(prefix)}


def export_weights(found: LoadedCheckpoint, path: Path, which: WhichWeights | None = None) -> ExportedWeights:
    """Write parameters and persistent buffers under the names of the model's state dict.

    Args:
        which: see `model_weights_of`.
    Raises:
        CheckpointError: the file cannot be written; one that was there before is untouched.
    """
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"cannot export to '{path}': its name does not end in .safetensors",
            next_step=f"--to {path.with_suffix('.safetensors')}",
        )
    own = model_weights_of(found, which)
    named = with_tied_names(own, found)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(named, draft, {"format": "pt", **_export_metadata(found, named)})
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the weights: {error}",
            where=str(path),
            next_step="free space, or choose another place",
        ) from error
    finally:
        draft.unlink(missing_ok=True)
    count = sum(value.numel() for value in own.values())
    return ExportedWeights(path, found.name, found.manifest.step, len(named), count)


def _export_metadata(found: LoadedCheckpoint, named: Mapping[str, Tensor]) -> dict[str, str]:
    """Where the weights come from; safetensors keeps texts only."""
    origin = found.manifest.origin
    return {
        "task": str(tomllib.loads(origin.recipe)["task"]),
        "step": str(found.manifest.step),
        "run": origin.run,
        "checkpoint": found.name,
        "strategy": origin.strategy,
        "recipe": origin.recipe,
        "recipe_sha256": hashlib.sha256(origin.recipe.encode()).hexdigest(),
        "versions": json.dumps(origin.versions),
        "tied": json.dumps(found.scalars["tied"]),
        VALUES_KEY: _digest(sorted(named.items())),
        **{key: said for key, said in origin.versions.items() if key == VOCABULARY_KEY},
    }


def _digest(values: Iterable[tuple[str, Any]]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in values:
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
