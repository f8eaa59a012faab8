"""Weights and data that mean the same pieces of text by the same numbers, as far as both say it.

What the bytes of weight files should be, where somebody says so.

Invariant: who says it is one of these, the first that there is: the user (`#sha256=` behind the place), a
file `SHA256SUMS` beside the weights, as `sha256sum *.safetensors > SHA256SUMS` writes it, and what Hugging
Face's library has noted when it downloaded: a link to a blob that is named by its hash, or a note in
`.cache`.

One safetensors file of a folder, read tensor by tensor: into a model, through a checksum, or both.

Invariant: beside the model there is a block of the file in memory (`BLOCK_BYTES`; of a remote one a few
copies); where a tensor of the model does not lie in one piece, that tensor once more.

First weights of a model: safetensors files of a folder, an HTTP server or a store of objects.

Invariant: values are taken over as they come, so that a model is in memory once. Nothing is unpickled, and no
code of a folder is run. Names and shapes are compared before the first value, and so are checksums of local
files: what does not fit leaves the model as it was. A remote file is read once, and compared on the way: then
a model that got damaged bytes is spoilt.

Source of the format of folders: Hugging Face's `save_pretrained`, one `model.safetensors`, or several files
and a `model.safetensors.index.json` that names them.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter
from torch import Tensor, nn

from paceline.checkpoint.safetensors_file import HeaderEntry, parse_entries, parse_metadata
from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.strict_json import parse, validate
from paceline.data.tokenizer import TOKENIZER_FILE, vocabulary_of
from paceline.errors import CheckpointError
from paceline.state.slot import first_tied_names

VOCABULARY_KEY = "vocabulary"
"""In the manifest of a checkpoint and in the header of an export: see `Task.vocabulary`."""


def require_same_vocabulary(own: str, theirs: str, place: str) -> None:
    """Compare two hashes; an empty one says nothing.

    Raises:
        CheckpointError: both are known, and differ.
    """
    if own and theirs and own != theirs:
        raise CheckpointError(
            "the task's tokenizer is not the one that these weights were trained with: the same numbers stand"
            " for other pieces of text",
            where=place,
            next_step="name the tokenizer.json of the weights (options.tokenizer of byte-gpt), or begin from"
            " weights of this vocabulary",
        )


CHECKSUMS_FILE = "SHA256SUMS"
CHECKSUM_PIN = "#sha256="
_HEX = re.compile(r"[0-9a-f]{64}")
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")
_DOWNLOAD_NOTES = Path(".cache/huggingface/download")  # huggingface_hub/_local_folder.py
_MAX_SMALL_FILE_BYTES = 2**26


@dataclass(frozen=True)
class KnownChecksum:
    """The SHA-256 of a file, in hexadecimal, and who says so."""

    sha256: str
    by: str


def known_checksums(files: StorageFolder, names: Sequence[str], pin: str | None) -> dict[str, KnownChecksum]:
    """Of those files of a folder of which somebody says it.

    Args:
        pin: the user's.
    Raises:
        ValueError: what is said makes no sense, or is said of some files only.
    """
    if pin is not None:
        return {names[0]: KnownChecksum(_check_pin(pin, names), "the user")}
    if files.size(CHECKSUMS_FILE) is not None:
        return _parse_checksums(read_small_file(files, CHECKSUMS_FILE).decode(), names)
    noted = {name: _downloaded_checksum(files.local_path(name)) for name in names}
    return {
        name: KnownChecksum(sha256, "Hugging Face's download") for name, sha256 in noted.items() if sha256
    }


def read_small_file(files: StorageFolder, name: str) -> bytes:
    """All of a file that describes others.

    Raises:
        ValueError: it is too long for one.
    """
    ranges = files.ranges(name)
    try:
        if ranges.num_bytes > _MAX_SMALL_FILE_BYTES:
            raise ValueError(f"{name} has more than {_MAX_SMALL_FILE_BYTES} bytes")
        return b"".join(ranges.blocks(0, ranges.num_bytes))
    finally:
        ranges.close()


def _check_pin(pin: str, names: Sequence[str]) -> str:
    if not _HEX.fullmatch(pin.lower()):
        raise ValueError(f"'{pin[:80]}' is no SHA-256 in hexadecimal")
    if len(names) > 1:
        raise ValueError(
            f"{CHECKSUM_PIN} is of one file, and these are {len(names)}: put a {CHECKSUMS_FILE} beside them"
        )
    return pin.lower()


def _parse_checksums(text: str, names: Sequence[str]) -> dict[str, KnownChecksum]:
    lines = [_LINE.fullmatch(line.rstrip("\r")) for line in text.split("\n")]
    said = {line[2]: line[1].lower() for line in lines if line}
    missing = [name for name in names if name not in said]
    if missing:
        raise ValueError(f"{CHECKSUMS_FILE} does not name {missing[0]}")
    return {name: KnownChecksum(said[name], CHECKSUMS_FILE) for name in names}


def _downloaded_checksum(path: Path | None) -> str | None:
    """What Hugging Face's library knows of a file: files in its large storage have their SHA-256 as tag."""
    if path is None:
        return None
    if path.is_symlink() and _HEX.fullmatch(path.readlink().name):
        return path.readlink().name
    note = path.parent / _DOWNLOAD_NOTES / f"{path.name}.metadata"
    if not note.is_file():
        return None
    tags = note.read_text(encoding="utf-8").splitlines()[1:2]
    return tags[0] if tags and _HEX.fullmatch(tags[0]) else None


VALUES_KEY = "values_sha256"  # in the header of an own export: of names, types, shapes and bytes, by name
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it


class WeightFile:
    """An open file.

    Args:
        checksum: of the whole file, if anybody knows it.

    Attributes:
        vocabulary: of the weights, if an export says it.
    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """

    def __init__(self, files: StorageFolder, name: str, checksum: KnownChecksum | None) -> None:
        self._ranges, self.name = files.ranges(name), name
        with ExitStack() as stack:
            stack.callback(self._ranges.close)
            self._head = self._read_head()
            header = self._head[_LENGTH_BYTES:]
            self.entries = parse_entries(header, self._ranges.num_bytes - len(self._head))
            self._require_no_gaps()
            said = parse_metadata(header)
            self._checksum, self._values = checksum, said.get(VALUES_KEY)
            self.vocabulary = said.get(VOCABULARY_KEY, "")
            stack.pop_all()
        self.vouched = checksum.by if checksum else "the export" if self._values else None

    def close(self) -> None:
        """Nothing can be read any more."""
        self._ranges.close()

    def verify(self) -> None:
        """Read it once, if that is cheap and there is something to compare with.

        Raises:
            ValueError: it is not what was written.
        """
        if self._ranges.local and self.vouched:
            self._stream_tensors({}, check=True)

    def fill(self, own: Mapping[str, Tensor]) -> None:
        """Take over all values; what was not verified before is verified on the way.

        Args:
            own: the tensors of the model, by name, of the shapes of the file.
        Raises:
            ValueError: it is not what was written; then the model is spoilt.
        """
        self._stream_tensors(own, check=not self._ranges.local)

    def _stream_tensors(self, own: Mapping[str, Tensor], *, check: bool) -> None:
        whole = hashlib.sha256(self._head) if check and self._checksum else None
        values = hashlib.sha256() if check and self._values and not whole else None
        digest = whole or values
        for name, entry in self._in_order(by_name=values is not None):
            if values is not None:
                values.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
            target = _TensorTarget(own[name], entry) if name in own else None
            for block in self._ranges.blocks(len(self._head) + entry.begin, len(self._head) + entry.end):
                if digest is not None:
                    digest.update(block)
                if target is not None:
                    target.take(block)
            if target is not None:
                target.finish()
        if digest is not None:
            self._compare(digest.hexdigest())

    def _compare(self, found: str) -> None:
        written = self._checksum.sha256 if self._checksum else self._values
        if found != written:
            by = f" (by {self.vouched})" if self._checksum else ""
            said = f"SHA-256 {found[:12]}..., written was {str(written)[:12]}...{by}"
            raise ValueError(f"{self.name.partition('?')[0]} is damaged: {said}")

    def _in_order(self, *, by_name: bool) -> list[tuple[str, HeaderEntry]]:
        """By name as an export is hashed, else as they lie in the file."""
        if by_name:
            return sorted(self.entries.items())
        return sorted(self.entries.items(), key=lambda item: item[1].begin)

    def _read_head(self) -> bytes:
        length = int.from_bytes(b"".join(self._part(0, _LENGTH_BYTES)), "little")
        if length > min(_MAX_HEADER_BYTES, self._ranges.num_bytes - _LENGTH_BYTES):
            raise ValueError(f"it is no safetensors file: a header of {length} bytes")
        return b"".join(self._part(0, _LENGTH_BYTES + length))

    def _part(self, begin: int, end: int) -> Iterator[bytes]:
        return map(bytes, self._ranges.blocks(begin, end))

    def _require_no_gaps(self) -> None:
        """What no tensor covers would be in no checksum."""
        end = 0
        for name, entry in self._in_order(by_name=False):
            if entry.begin != end:
                raise ValueError(f"it is no safetensors file: a gap or an overlap before '{name[:80]}'")
            end = entry.end
        if end != self._ranges.num_bytes - len(self._head):
            raise ValueError("it is no safetensors file: bytes at its end belong to no tensor")


@dataclass
class _TensorTarget:
    """A tensor of the model that is filled block by block, in the order of its values."""

    tensor: Tensor
    entry: HeaderEntry
    taken: int = 0

    def __post_init__(self) -> None:
        self._flat = self._room().view(-1)

    def _room(self) -> Tensor:
        if self.tensor.is_contiguous():
            return self.tensor
        return torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device=self.tensor.device)

    def take(self, block: memoryview) -> None:
        """The values that follow."""
        values = torch.frombuffer(block, dtype=self.entry.dtype)
        self._flat[self.taken : self.taken + len(values)].copy_(values)
        self.taken += len(values)

    def finish(self) -> None:
        """All are there."""
        if not self.tensor.is_contiguous():
            self.tensor.copy_(self._flat.view(self.tensor.shape))


_WHOLE, _INDEX, _SUFFIX = "model.safetensors", "model.safetensors.index.json", ".safetensors"


@dataclass(frozen=True)
class LoadedWeights:
    """What was taken over.

    Args:
        unverified_files: names of files of which nobody says what their bytes should be.
    """

    num_tensors: int
    unverified_files: tuple[str, ...]

    def warning(self, place: str) -> str | None:
        """For the user; None if all files were checked."""
        if not self.unverified_files:
            return None
        few = ", ".join(self.unverified_files[:3])
        return (
            f"nobody says what the bytes of the first weights should be ({few} of {place}): damage would not"
            f" be seen. `sha256sum *{_SUFFIX} > {CHECKSUMS_FILE}` beside them, or {CHECKSUM_PIN}... behind one, has them checked"
        )


def load_weights(model: nn.Module, place: str | os.PathLike[str], *, vocabulary: str = "") -> LoadedWeights:
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
            files = [stack.enter_context(closing(file)) for file in _open_files(os.fspath(place))]
            shapes = {name: [*entry.shape] for file in files for name, entry in file.entries.items()}
            _require_same_tensors(own, shapes, place)
            require_same_vocabulary(vocabulary, _find_vocabulary(os.fspath(place), files), str(place))
            for file in files:
                file.verify()
            with torch.no_grad():
                for file in files:  # all is right: from here on the model changes
                    file.fill(own)
        except (OSError, ValueError) as error:
            raise _unreadable_error(place, str(error)) from error
        return LoadedWeights(
            len(shapes), tuple(file.name.partition("?")[0] for file in files if not file.vouched)
        )


def _open_files(place: str) -> Sequence[WeightFile]:
    """The files that belong together; ValueError if an index is none, or a checksum is."""
    place, _, pin = place.partition(CHECKSUM_PIN)
    folder, name = _split_place(place)
    files = StorageFolder(folder)
    names = [name] if name else _list_weight_files(files)
    known = known_checksums(files, names, pin or None)
    with ExitStack() as stack:
        opened = []
        for one in names:
            opened.append(WeightFile(files, one, known.get(one)))
            stack.callback(opened[-1].close)
        stack.pop_all()
        return opened


def _split_place(place: str) -> tuple[str, str | None]:
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


class _WeightIndex(BaseModel):
    """The part of an index that is read: the file of each tensor."""

    model_config = ConfigDict(strict=True)

    weight_map: dict[str, str]


_WEIGHT_INDEX = TypeAdapter(_WeightIndex)


def _list_weight_files(files: StorageFolder) -> list[str]:
    if files.size(_INDEX) is None:
        return [_WHOLE]
    index = validate(_WEIGHT_INDEX, parse(read_small_file(files, _INDEX)), _INDEX)
    names = {*index.weight_map.values()}
    if not names or not all(name == Path(name).name for name in names):
        raise ValueError(f"{_INDEX} names what is no file beside it")
    return sorted(names)


def _require_same_tensors(
    own: Mapping[str, Tensor], given: Mapping[str, list[int]], place: str | os.PathLike[str]
) -> None:
    first = first_tied_names(own)
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


def _find_vocabulary(place: str, files: Sequence[WeightFile]) -> str:
    """Of the weights, by their own header or by a `tokenizer.json` in their folder; empty: nobody says."""
    said = next((file.vocabulary for file in files if file.vocabulary), "")
    folder, name = _split_place(place.partition(CHECKSUM_PIN)[0])
    if said or (name and "://" in folder):  # of one file behind a URL, others may not be asked for
        return said
    beside = StorageFolder(folder)
    if beside.size(TOKENIZER_FILE) is None:
        return ""
    return vocabulary_of(read_small_file(beside, TOKENIZER_FILE).decode())


def _unreadable_error(place: str | os.PathLike[str], reason: str) -> CheckpointError:
    return CheckpointError(
        f"cannot read the weights: {reason}",
        where=str(place),
        next_step="check init_from; `paceline export RUN --to FILE` writes such a file",
    )
