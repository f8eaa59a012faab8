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

from paceline.checkpoint.files import Files
from paceline.checkpoint.reader import Loaded, Stored, load
from paceline.checkpoint.same_vocabulary import VOCABULARY
from paceline.checkpoint.shelf import Shelf
from paceline.checkpoint.weight_file import VALUES
from paceline.errors import CheckpointError
from paceline.slot import Index

_MODEL, _AVERAGE = "model/", "average/values/"
_WANTED = (_MODEL, _AVERAGE)
Weights = Literal["last", "average"]


@dataclass(frozen=True)
class Exported:
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


def find_checkpoint(files: Files, warn: Callable[[str], None], name: str | None = None) -> Loaded:
    """The model's part of a checkpoint.

    Args:
        name: which one; "best": by evaluation; None: the newest that is valid.
        warn: is told which ones cannot be used and why.
    Raises:
        CheckpointError: the named one is damaged, or there is no valid one.
    """
    if name is not None:
        return load(files, Shelf.look(files).named(name), _WANTED)
    shelf = Shelf.look(files)
    for error in shelf.broken.values():
        warn(error.what)
    for kept in reversed(shelf.whole):
        try:
            return load(files, kept.name, _WANTED)
        except CheckpointError as error:
            warn(f"{error.what}; the one before it is used")
    raise CheckpointError(
        "there is no valid checkpoint", where=files.url, next_step="name a run folder with a checkpoint in it"
    )


@dataclass(frozen=True)
class WeightsAlone:
    """The model's part of a stored state, the average in place of what it is of; see `paceline.slot.Source`.

    Args:
        which: see `weights_of`.
    Raises:
        CheckpointError: an average is wanted, and there is none.
    """

    stored: Stored
    which: Weights | None = None

    def __post_init__(self) -> None:
        if self.which == "average" and not any(name.startswith(_AVERAGE) for name in self.stored.shapes):
            raise _no_average(self.stored.name)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the whole tensors, by name."""
        return {name: shape for name, shape in self.stored.shapes.items() if name.startswith(_MODEL)}

    def read(self, wanted: Mapping[str, Index]) -> Mapping[str, Tensor]:
        """Parts of some tensors, in new memory."""
        stored = {name: self._place(name) for name in wanted}
        found = self.stored.read({stored[name]: index for name, index in wanted.items()})
        return {name: found[stored[name]] for name in wanted}

    def _place(self, name: str) -> str:
        average = _AVERAGE + name.removeprefix(_MODEL)
        return average if self.which != "last" and average in self.stored.shapes else name


def weights_of(found: Loaded, which: Weights | None = None) -> dict[str, Tensor]:
    """Parameters and persistent buffers, by name, tied ones once; the average in place of what it is of.

    Args:
        which: "last" leaves an average out; None: the average, if the checkpoint has one.
    Raises:
        CheckpointError: an average is wanted, and there is none.
    """
    own = _under(_MODEL, found.tensors)
    average = _under(_AVERAGE, found.tensors)
    if which == "average" and not average:
        raise _no_average(found.name)
    if which == "last":
        return own
    return own | {name: value.to(own[name].dtype) for name, value in average.items()}


def _no_average(name: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {name} holds no average of the weights",
        next_step="set average.decay in the recipe before training, or take the last weights",
    )


def with_tied_names(own: Mapping[str, Tensor], found: Loaded) -> dict[str, Tensor]:
    """Weights under every name that the model's state dict has."""
    tied: Mapping[str, str] = found.scalars["tied"]
    return {**own, **{name: own[first].clone() for name, first in tied.items()}}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): value for n, value in tensors.items() if n.startswith(prefix)}


def export_weights(found: Loaded, path: Path, which: Weights | None = None) -> Exported:
    """Write parameters and persistent buffers under the names of the model's state dict.

    Args:
        which: see `weights_of`.
    Raises:
        CheckpointError: the file cannot be written; one that was there before is untouched.
    """
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"cannot export to '{path}': its name does not end in .safetensors",
            next_step=f"--to {path.with_suffix('.safetensors')}",
        )
    own = weights_of(found, which)
    named = with_tied_names(own, found)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(named, draft, {"format": "pt", **_origin(found, named)})
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
    return Exported(path, found.name, found.manifest.step, len(named), count)


def _origin(found: Loaded, named: Mapping[str, Tensor]) -> dict[str, str]:
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
        VALUES: _digest(sorted(named.items())),
        **{key: said for key, said in origin.versions.items() if key == VOCABULARY},
    }


def _digest(values: Iterable[tuple[str, Any]]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in values:
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
