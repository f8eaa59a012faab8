"""First weights of a model: safetensors files of a folder, an HTTP server or an object store.

Values are copied block by block, so the model is in memory once: in addition there is one block of the file
(`BLOCK_BYTES`; of a remote file a few copies), and a copy of a tensor that is not contiguous in the model.
Nothing is unpickled, and no code of the folder runs.

The expected SHA-256 of a file is the first of: `#sha256=` after the place, a file `SHA256SUMS` next to the
weights (as `sha256sum *.safetensors > SHA256SUMS` writes it), and what Hugging Face's library has recorded at
the download: a link to a blob that is named by its hash, or a note in `.cache`. Vocabularies are compared if
both are known.

Invariant: names and shapes are compared before the first value is copied, and so are checksums of local
files, so weights that do not fit leave the model unchanged. A remote file is read once and verified on the
way: then a model that received damaged bytes is unusable.

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
from paceline.errors import CheckpointError, format_count
from paceline.state.slot import first_tied_names

VOCABULARY_KEY = "vocabulary"
"""Key of the vocabulary hash in a manifest and in the header of an export; see `Task.vocabulary`."""


def require_same_vocabulary(data_vocabulary: str, weights_vocabulary: str, source: str) -> None:
    """Compare two vocabulary hashes; an empty hash is unknown.

    Raises:
        CheckpointError: both are known, and differ.
    """
    if data_vocabulary and weights_vocabulary and data_vocabulary != weights_vocabulary:
        raise CheckpointError(
            "the task's tokenizer is not the one that these weights were trained with: token ids mean"
            " other text",
            where=source,
            next_step="use the tokenizer.json of the weights (options.tokenizer of byte-gpt), or start from"
            " weights with this vocabulary",
        )


CHECKSUMS_FILE = "SHA256SUMS"
CHECKSUM_PIN = "#sha256="
_HEX = re.compile(r"[0-9a-f]{64}")
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")
_DOWNLOAD_NOTES = Path(".cache/huggingface/download")  # huggingface_hub/_local_folder.py
_MAX_SMALL_FILE_BYTES = 2**26


@dataclass(frozen=True)
class KnownChecksum:
    """The expected SHA-256 of a file, in hexadecimal, and where it was found."""

    sha256: str
    by: str


def known_checksums(files: StorageFolder, names: Sequence[str], pin: str | None) -> dict[str, KnownChecksum]:
    """Return the expected checksums of files in a folder, as far as they are known.

    Args:
        files: the folder.
        names: the files.
        pin: the SHA-256 that the user gave after the location, if any.
    Raises:
        ValueError: a checksum is not valid, or is given for some files only.
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
    """Return all bytes of a file that describes others.

    Raises:
        ValueError: it is too long for such a file.
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
        raise ValueError(f"'{pin[:80]}' is not a SHA-256 in hexadecimal")
    if len(names) > 1:
        raise ValueError(
            f"{CHECKSUM_PIN} is for one file, but these are {len(names)}: put a {CHECKSUMS_FILE} next to them"
        )
    return pin.lower()


def _parse_checksums(text: str, names: Sequence[str]) -> dict[str, KnownChecksum]:
    lines = [_LINE.fullmatch(line.rstrip("\r")) for line in text.split("\n")]
    checksums = {line[2]: line[1].lower() for line in lines if line}
    missing = [name for name in names if name not in checksums]
    if missing:
        raise ValueError(f"{CHECKSUMS_FILE} does not name {missing[0]}")
    return {name: KnownChecksum(checksums[name], CHECKSUMS_FILE) for name in names}


def _downloaded_checksum(path: Path | None) -> str | None:
    """Return the SHA-256 that Hugging Face's library has recorded: it is the tag of large files."""
    if path is None:
        return None
    if path.is_symlink() and _HEX.fullmatch(path.readlink().name):
        return path.readlink().name
    note = path.parent / _DOWNLOAD_NOTES / f"{path.name}.metadata"
    if not note.is_file():
        return None
    tags = note.read_text(encoding="utf-8").splitlines()[1:2]
    return tags[0] if tags and _HEX.fullmatch(tags[0]) else None


VALUES_KEY = "values_sha256"  # in the header of an export: over names, dtypes, shapes and bytes, by name
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


class WeightFile:
    """An open safetensors file, read tensor by tensor: into a model, through a checksum, or both.

    Args:
        files: the folder.
        name: of the file.
        checksum: the expected one, if it is known.

    Attributes:
        vocabulary: hash of the vocabulary, if the header has it.
        checksum_source: where the expected checksum was found; None: it is unknown.
    Raises:
        OSError: it cannot be read.
        ValueError: it is not a safetensors file.
    """

    def __init__(self, files: StorageFolder, name: str, checksum: KnownChecksum | None) -> None:
        self._ranges, self.name = files.ranges(name), name
        with ExitStack() as stack:
            stack.callback(self._ranges.close)
            self._head = self._read_head()
            header = self._head[_LENGTH_BYTES:]
            self.entries = parse_entries(header, self._ranges.num_bytes - len(self._head))
            self._require_no_gaps()
            texts = parse_metadata(header)
            self._checksum, self._values = checksum, texts.get(VALUES_KEY)
            self.vocabulary = texts.get(VOCABULARY_KEY, "")
            # Everything was opened, so from here on the caller closes the file.
            stack.pop_all()
        self.checksum_source = checksum.by if checksum else "the export" if self._values else None

    def close(self) -> None:
        """Close the file."""
        self._ranges.close()

    def verify(self) -> None:
        """Verify the file if it is local and its checksum is known.

        Raises:
            ValueError: it is damaged.
        """
        # A remote file would be transferred twice, so `fill` verifies it on the way.
        if self._ranges.local and self.checksum_source:
            self._stream_tensors({}, check=True)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy all values into a model; a remote file is verified on the way.

        Args:
            tensors: of the model, by name, with the shapes of the file.
        Raises:
            ValueError: the file is damaged; then the model is unusable.
        """
        self._stream_tensors(tensors, check=not self._ranges.local)

    def _stream_tensors(self, tensors: Mapping[str, Tensor], *, check: bool) -> None:
        whole = hashlib.sha256(self._head) if check and self._checksum else None
        values = hashlib.sha256() if check and self._values and not whole else None
        digest = whole or values
        for name, entry in self._in_order(by_name=values is not None):
            if values is not None:
                values.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
            target = _TensorTarget(tensors[name], entry) if name in tensors else None
            for block in self._ranges.blocks(len(self._head) + entry.begin, len(self._head) + entry.end):
                if digest is not None:
                    digest.update(block)
                if target is not None:
                    target.copy_block(block)
            if target is not None:
                target.finish()
        if digest is not None:
            self._compare(digest.hexdigest())

    def _compare(self, digest: str) -> None:
        written = self._checksum.sha256 if self._checksum else self._values
        if digest != written:
            by = f" (by {self.checksum_source})" if self._checksum else ""
            checksums = f"SHA-256 {digest[:12]}..., expected {str(written)[:12]}...{by}"
            raise ValueError(f"{self.name.partition('?')[0]} is damaged: {checksums}")

    def _in_order(self, *, by_name: bool) -> list[tuple[str, HeaderEntry]]:
        """Return the tensors by name, as an export is hashed, or in the order of the file."""
        if by_name:
            return sorted(self.entries.items())
        return sorted(self.entries.items(), key=lambda item: item[1].begin)

    def _read_head(self) -> bytes:
        length = int.from_bytes(b"".join(self._part(0, _LENGTH_BYTES)), "little")
        if length > min(_MAX_HEADER_BYTES, self._ranges.num_bytes - _LENGTH_BYTES):
            raise ValueError(f"it is not a safetensors file: a header of {length} bytes")
        return b"".join(self._part(0, _LENGTH_BYTES + length))

    def _part(self, begin: int, end: int) -> Iterator[bytes]:
        return map(bytes, self._ranges.blocks(begin, end))

    def _require_no_gaps(self) -> None:
        """Check that tensors cover all bytes; a gap would be in no checksum."""
        end = 0
        for name, entry in self._in_order(by_name=False):
            if entry.begin != end:
                raise ValueError(f"it is not a safetensors file: a gap or an overlap before '{name[:80]}'")
            end = entry.end
        if end != self._ranges.num_bytes - len(self._head):
            raise ValueError("it is not a safetensors file: bytes at its end belong to no tensor")


@dataclass
class _TensorTarget:
    """A tensor of the model that is filled block by block, in the order of its values."""

    tensor: Tensor
    entry: HeaderEntry
    num_filled: int = 0

    def __post_init__(self) -> None:
        self._flat = self._room().view(-1)

    def _room(self) -> Tensor:
        if self.tensor.is_contiguous():
            return self.tensor
        return torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device=self.tensor.device)

    def copy_block(self, block: memoryview) -> None:
        """Copy the values that follow."""
        values = torch.frombuffer(block, dtype=self.entry.dtype)
        self._flat[self.num_filled : self.num_filled + len(values)].copy_(values)
        self.num_filled += len(values)

    def finish(self) -> None:
        """Copy a tensor that is not contiguous back into the model."""
        if not self.tensor.is_contiguous():
            self.tensor.copy_(self._flat.view(self.tensor.shape))


_WHOLE, _INDEX, _SUFFIX = "model.safetensors", "model.safetensors.index.json", ".safetensors"


@dataclass(frozen=True)
class LoadedWeights:
    """The result of loading weights.

    Args:
        num_tensors: tensors in the files.
        unverified_files: names of files without a known checksum.
    """

    num_tensors: int
    unverified_files: tuple[str, ...]

    def warning(self, source: str) -> str | None:
        """Return a warning about files that were not verified, or None."""
        if not self.unverified_files:
            return None
        few = ", ".join(self.unverified_files[:3])
        return (
            f"the first weights have no checksum ({few} of {source}), so damage would not be noticed."
            f" Run `sha256sum *{_SUFFIX} > {CHECKSUMS_FILE}` next to them,"
            f" or add {CHECKSUM_PIN}... to the place"
        )


def load_weights(model: nn.Module, place: str | os.PathLike[str], *, vocabulary: str = "") -> LoadedWeights:
    """Copy the values of safetensors files into a model.

    Args:
        model: its parameters and persistent buffers are overwritten; dtypes are converted.
        place: a safetensors file, or a folder with `model.safetensors` or with the files that a
            `model.safetensors.index.json` names: a path or a URL (`https://`, `s3://`, `file://` or another
            one of fsspec). A file can be followed by `#sha256=` and its SHA-256. One name of tied tensors is
            enough.
        vocabulary: of the data, see `Task`; compared with that of the weights if both are known.
    Raises:
        CheckpointError: the files cannot be read, are damaged, or have other names, shapes or another
            vocabulary.
    """
    tensors = model.state_dict()
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(closing(file)) for file in open_weight_files(os.fspath(place))]
            shapes = {name: [*entry.shape] for file in files for name, entry in file.entries.items()}
            require_same_tensors(tensors, shapes, place)
            require_same_vocabulary(vocabulary, find_vocabulary(os.fspath(place), files), str(place))
            for file in files:
                file.verify()
            with torch.no_grad():
                for file in files:  # everything fits, so the model can change
                    file.fill(tensors)
        except (OSError, ValueError) as error:
            raise _unreadable_error(place, str(error)) from error
        return LoadedWeights(
            len(shapes), tuple(file.name.partition("?")[0] for file in files if not file.checksum_source)
        )


def open_weight_files(source: str) -> Sequence[WeightFile]:
    """Open the files of a place, as for `load_weights`; the caller closes them.

    Raises:
        OSError: one cannot be read.
        ValueError: one is not a safetensors file, or an index or a checksum is not valid.
    """
    source, _, pin = source.partition(CHECKSUM_PIN)
    folder, name = _split_source(source)
    files = StorageFolder(folder)
    names = [name] if name else _list_weight_files(files)
    known = known_checksums(files, names, pin or None)
    with ExitStack() as stack:
        opened = []
        for file_name in names:
            opened.append(WeightFile(files, file_name, known.get(file_name)))
            stack.callback(opened[-1].close)
        stack.pop_all()
        return opened


def _split_source(source: str) -> tuple[str, str | None]:
    """Return a folder and the file in it; None if the source is a folder."""
    if source.startswith("file://"):
        source = unquote(urlsplit(source).path)
    if "://" not in source:
        path = Path(source)
        return (source, None) if path.is_dir() else (str(path.parent), path.name)
    path_part, mark, query = source.partition("?")
    if not path_part.endswith(_SUFFIX):
        return source, None
    folder, _, name = path_part.rpartition("/")
    return folder, name + mark + query


TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
)
"""Files that the tokenizers of transformers read."""


def find_tokenizer_files(source: str) -> dict[str, bytes]:
    """Return the tokenizer files in a folder, or next to a file, by name; empty if there are none.

    Args:
        source: a place as `init_from` has it. The server of a single file may have no other files, so none
            are looked for there.
    """
    folder, name = _split_source(source.partition(CHECKSUM_PIN)[0])
    if name and "://" in folder:
        return {}
    files = StorageFolder(folder)
    return {file: read_small_file(files, file) for file in TOKENIZER_FILES if files.size(file) is not None}


class _WeightIndex(BaseModel):
    """The part of an index that is read: the file of each tensor."""

    model_config = ConfigDict(strict=True)

    weight_map: dict[str, str]


_WEIGHT_INDEX = TypeAdapter(_WeightIndex)


def _list_weight_files(files: StorageFolder) -> list[str]:
    if files.size(_INDEX) is None:
        return [_WHOLE]
    try:
        index = validate(_WEIGHT_INDEX, parse(read_small_file(files, _INDEX)))
    except ValueError as error:
        raise ValueError(f"{_INDEX} has no weight_map of file names: {error}") from error
    names = {*index.weight_map.values()}
    # A path in an index could lead out of the folder.
    if not names or not all(name == Path(name).name for name in names):
        raise ValueError(f"{_INDEX} names a file that is not next to it")
    return sorted(names)


def require_same_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, list[int]], source: str | os.PathLike[str]
) -> None:
    """Compare the names and shapes of a model with those of weights; one name of tied tensors is enough.

    Raises:
        CheckpointError: they differ; names the first difference.
    """
    first = first_tied_names(tensors)
    filled = {first[name] for name in shapes if name in tensors}
    differences = [f"{name} is missing" for name in tensors if first[name] not in filled]
    differences += [f"{name} is not in the model" for name in shapes if name not in tensors]
    differences += [
        f"{name} has the shape {shape}, the model's has {list(tensors[name].shape)}"
        for name, shape in shapes.items()
        if name in tensors and shape != list(tensors[name].shape)
    ]
    if differences:
        raise CheckpointError(
            f"the weights do not fit this model: {format_count(len(differences), 'difference')}, first"
            f" {differences[0]}",
            where=str(source),
            next_step="give the task the options of the run that wrote them; an export holds its recipe",
        )


def find_vocabulary(source: str, files: Sequence[WeightFile]) -> str:
    """Return the vocabulary hash of a file's header, or of a `tokenizer.json` next to it; empty: unknown."""
    vocabulary = next((file.vocabulary for file in files if file.vocabulary), "")
    folder, name = _split_source(source.partition(CHECKSUM_PIN)[0])
    if vocabulary or (name and "://" in folder):  # the server of a single file may have no other files
        return vocabulary
    weight_folder = StorageFolder(folder)
    if weight_folder.size(TOKENIZER_FILE) is None:
        return ""
    return vocabulary_of(read_small_file(weight_folder, TOKENIZER_FILE).decode())


def _unreadable_error(source: str | os.PathLike[str], reason: str) -> CheckpointError:
    return CheckpointError(
        f"cannot read the weights: {reason}",
        where=str(source),
        next_step="check init_from; `paceline export RUN --to FILE` writes such a file",
    )
