"""First weights of a model: safetensors files of a folder, an HTTP server or a store of objects.

Invariant: values are taken over as they come, so that a model is in memory once. Nothing is unpickled, and no
code of a folder is run. Names and shapes are compared before the first value, and so are checksums of local
files: what does not fit leaves the model as it was. A remote file is read once, and compared on the way: then
a model that got damaged bytes is spoilt.

Source of the format of folders: Hugging Face's `save_pretrained`, one `model.safetensors`, or several files
and a `model.safetensors.index.json` that names them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import torch
from torch import Tensor, nn

from paceline.checkpoint.checksums import PIN, SUMS, known_checksums, read_small
from paceline.checkpoint.files import Files
from paceline.checkpoint.same_vocabulary import refuse_other_vocabulary
from paceline.checkpoint.strict_json import parse, text
from paceline.checkpoint.weight_file import WeightFile
from paceline.data.tokenizer_file import TOKENIZER
from paceline.data.vocabulary import vocabulary_of
from paceline.errors import CheckpointError
from paceline.slot import first_names

_WHOLE, _INDEX, _SUFFIX = "model.safetensors", "model.safetensors.index.json", ".safetensors"


@dataclass(frozen=True)
class Taken:
    """What was taken over.

    Args:
        unvouched: names of files of which nobody says what their bytes should be.
    """

    num_tensors: int
    unvouched: tuple[str, ...]

    def warning(self, place: str) -> str | None:
        """For the user; None if all files were checked."""
        if not self.unvouched:
            return None
        few = ", ".join(self.unvouched[:3])
        return (
            f"nobody says what the bytes of the first weights should be ({few} of {place}): damage would not"
            f" be seen. `sha256sum *{_SUFFIX} > {SUMS}` beside them, or {PIN}... behind one, has them checked"
        )


def load_weights(model: nn.Module, place: str | os.PathLike[str], *, vocabulary: str = "") -> Taken:
    """Take over the values of files into a model, one block after the other.

    Args:
        model: its parameters and persistent buffers are overwritten; types are converted.
        place: a safetensors file, or a folder with `model.safetensors` or with the files that a
            `model.safetensors.index.json` names: a path or a URL (`https://`, `s3://`, `file://` and what
            else fsspec knows). A file may be followed by `#sha256=` and its SHA-256. Of tied tensors one name
            is enough.
        vocabulary: of the data, see `Task`; compared with that of the weights, if both are known.
    Raises:
        CheckpointError: it cannot be read, is damaged, or its names, shapes or vocabulary are others.
    """
    own = model.state_dict()
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(closing(file)) for file in _opened(os.fspath(place))]
            shapes = {name: [*entry.shape] for file in files for name, entry in file.entries.items()}
            _refuse_others(own, shapes, place)
            refuse_other_vocabulary(vocabulary, _vocabulary_beside(os.fspath(place), files), str(place))
            for file in files:
                file.verify()
            with torch.no_grad():
                for file in files:  # all is right: from here on the model changes
                    file.fill(own)
        except (OSError, ValueError) as error:
            raise _unreadable(place, str(error)) from error
        return Taken(len(shapes), tuple(file.name.partition("?")[0] for file in files if not file.vouched))


def _opened(place: str) -> Sequence[WeightFile]:
    """The files that belong together; ValueError if an index is none, or a checksum is."""
    place, _, pin = place.partition(PIN)
    folder, name = _folder_of(place)
    files = Files(folder)
    names = [name] if name else _names_in(files)
    known = known_checksums(files, names, pin or None)
    with ExitStack() as stack:
        opened = []
        for one in names:
            opened.append(WeightFile(files, one, known.get(one)))
            stack.callback(opened[-1].close)
        stack.pop_all()
        return opened


def _folder_of(place: str) -> tuple[str, str | None]:
    """A folder, and the file in it; None: the folder is meant."""
    if place.startswith("file://"):
        place = unquote(urlsplit(place).path)
    if "://" not in place:
        path = Path(place)
        return (place, None) if path.is_dir() else (str(path.parent), path.name)
    path_part, mark, query = place.partition("?")
    if not path_part.endswith(_SUFFIX):
        return place, None
    folder, _, name = path_part.rpartition("/")
    return folder, name + mark + query


def _names_in(files: Files) -> list[str]:
    if files.size(_INDEX) is None:
        return [_WHOLE]
    found = parse(read_small(files, _INDEX))
    if type(found) is not dict or type(found.get("weight_map")) is not dict:
        raise ValueError(f"{_INDEX} has no weight_map")
    names = {text(name, "a name") for name in found["weight_map"].values()}
    if not names or not all(name == Path(name).name for name in names):
        raise ValueError(f"{_INDEX} names what is no file beside it")
    return sorted(names)


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


def _vocabulary_beside(place: str, files: Sequence[WeightFile]) -> str:
    """Of the weights, by their own header or by a `tokenizer.json` in their folder; empty: nobody says."""
    said = next((file.vocabulary for file in files if file.vocabulary), "")
    folder, name = _folder_of(place.partition(PIN)[0])
    if said or (name and "://" in folder):  # of one file behind a URL, others may not be asked for
        return said
    beside = Files(folder)
    if beside.size(TOKENIZER) is None:
        return ""
    return vocabulary_of(read_small(beside, TOKENIZER).decode())


def _unreadable(place: str | os.PathLike[str], reason: str) -> CheckpointError:
    return CheckpointError(
        f"cannot read the weights: {reason}",
        where=str(place),
        next_step="check init_from; `paceline export RUN --to FILE` writes such a file",
    )
