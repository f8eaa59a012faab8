"""The weights of a model alone, as one safetensors file: out of a checkpoint, and into a model.

Invariant: a file that `export_weights` wrote loads with `safetensors.torch.load_file` and a strict
`load_state_dict`: it has every name of the state dict, tied ones too. It carries a SHA-256 of all values,
and what does not have it is not taken over. Neither side starts processes, runs user code or unpickles.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.checkpoint.files import Files
from paceline.checkpoint.reader import Loaded, load
from paceline.checkpoint.shelf import Shelf
from paceline.checkpoint.strict_json import parse, text
from paceline.errors import CheckpointError
from paceline.slot import first_names

_MODEL, _AVERAGE = "model/", "average/values/"
_WANTED = (_MODEL, _AVERAGE)
_DIGEST = "values_sha256"
Weights = Literal["last", "average"]
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


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
        raise CheckpointError(
            f"the checkpoint {found.name} holds no average of the weights",
            next_step="set average.decay in the recipe before training, or take the last weights",
        )
    if which == "last":
        return own
    return own | {name: value.to(own[name].dtype) for name, value in average.items()}


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
        _DIGEST: _digest(sorted(named.items())),
    }


def load_weights(model: nn.Module, place: str | os.PathLike[str]) -> None:
    """Take over the values of a file into a model, one memory-mapped tensor after the other.

    Args:
        model: its parameters and persistent buffers are overwritten; types are converted.
        place: a safetensors file, or a folder with `model.safetensors` or with the files that a
            `model.safetensors.index.json` names. Of tied tensors one name is enough.
    Raises:
        CheckpointError: it cannot be read, is damaged, or its names or shapes are not those of the model.
    """
    own = model.state_dict()
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(path, "pt")) for path in _files_of(Path(place))]
            holders = {name: file for file in opened for name in file.keys()}  # noqa: SIM118, no mapping
            shapes = {name: file.get_slice(name).get_shape() for name, file in holders.items()}
            _refuse_others(own, shapes, place)
            _refuse_damaged(opened, holders, place)
            with torch.no_grad():
                for name in sorted(holders):  # all is right: from here on the model changes
                    own[name].copy_(holders[name].get_tensor(name))
        except (OSError, ValueError, SafetensorError) as error:
            raise _unreadable(place, str(error)) from error


def _refuse_damaged(opened: Sequence[Any], holders: Mapping[str, Any], place: str | os.PathLike[str]) -> None:
    """Read all values of a file that says what their SHA-256 is."""
    written = (opened[0].metadata() or {}).get(_DIGEST) if len(opened) == 1 else None
    if written is None:
        return
    found = _digest((name, holders[name].get_tensor(name)) for name in sorted(holders))
    if written != found:
        raise _unreadable(place, f"damaged: SHA-256 {found[:12]}..., written was {written[:12]}...")


def _files_of(place: Path) -> list[Path]:
    """The files that belong together; ValueError if an index is none."""
    index = place / _INDEX
    if not index.exists():
        return [_regular(place / _WHOLE if place.is_dir() else place)]
    found = parse(_regular(index).read_bytes())
    if type(found) is not dict or type(found.get("weight_map")) is not dict:
        raise ValueError(f"{_INDEX} has no weight_map")
    names = [text(name, "a name") for name in found["weight_map"].values()]
    if not all(name == Path(name).name for name in names):
        raise ValueError(f"{_INDEX} names what is no file beside it")
    return [_regular(place / name) for name in sorted(set(names))]


def _regular(path: Path) -> Path:
    """The same path; OSError if it is a pipe or a device, which might have no end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path


def _refuse_others(
    own: Mapping[str, Tensor], given: Mapping[str, list[int]], place: str | os.PathLike[str]
) -> None:
    first = first_names(own)
    filled = {first[name] for name in given if name in own}
    wrong = [f"{name} is missing" for name in own if first[name] not in filled]
    wrong += [f"{name} is not in the model" for name in given if name not in own]
    wrong += [
        f"{name} has the shape {shape}, the model's has {list(own[name].shape)}"
        for name, shape in given.items()
        if name in own and shape != list(own[name].shape)
    ]
    if wrong:
        raise CheckpointError(
            f"the weights are not those of this model: {len(wrong)} entries differ, the first: {wrong[0]}",
            where=str(place),
            next_step="give the task the options of the run that wrote them; an export holds its recipe",
        )


def _digest(values: Iterable[tuple[str, Any]]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in values:
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _unreadable(place: str | os.PathLike[str], reason: str) -> CheckpointError:
    return CheckpointError(
        f"cannot read the weights: {reason}",
        where=str(place),
        next_step="check init_from; `paceline export RUN --to FILE` writes such a file",
    )
