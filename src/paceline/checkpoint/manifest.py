"""What a manifest may say of an optimizer's lists and tables; `paceline.state.optimizer_state` puts them together.

Whether a manifest can be true: checked in full before anything that it names is opened.

Invariant: of what passes, every file lies in the folder of the checkpoint, every byte of every tensor is in
exactly one chunk, and no tensor is larger than the files that hold it. ValueError says what is wrong first.

The manifest: what makes a folder a checkpoint. It is written last, and it names every other file.

Invariant: a manifest that can be read is complete and unchanged (it carries its own SHA-256), and every byte
of the files that it names is covered by a checksum in it. It is JSON; no pickle is written or read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from paceline.checkpoint.disk.checksum import is_checksum
from paceline.checkpoint.safetensors_file import TensorChunk, chunk_keys, is_dtype_code
from paceline.checkpoint.strict_json import count, fields, listed, numeric, parse, table, text

_MAX_DEPTH = 64


def check_optimizer_value(value: Any, name: str) -> None:
    """A number, a word, nothing, or how a list or a table is put together.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, Mapping):
        _check_shape(value, name, _MAX_DEPTH)
    else:
        _check_plain(value, name, 0)


def _check_shape(value: Any, name: str, depth: int) -> None:
    found = table(value, name)
    word = next(iter(found), "")
    if len(found) != 1 or word not in _CHECKS or not depth:
        raise ValueError(f"'{name}' of the optimizer is put together in no known way")
    _CHECKS[word](found[word], name, depth - 1)


def _check_plain(value: Any, name: str, depth: int) -> None:
    if not isinstance(value, bool | int | float | str | None):
        raise ValueError(f"'{name}' of the optimizer is no number")


def _check_word(value: Any, name: str, depth: int) -> None:
    text(value, name)


def _check_rows(value: Any, name: str, depth: int) -> None:
    for one in listed(value, name):
        _check_shape(one, name, depth)


def _check_deque(value: Any, name: str, depth: int) -> None:
    longest, rows = _pair(value, name)
    if longest is not None:
        count(longest, name)
    _check_rows(rows, name, depth)


def _check_table(value: Any, name: str, depth: int) -> None:
    for entry in listed(value, name):
        key, one = _pair(entry, name)
        _check_plain(key, name, depth)
        _check_shape(one, name, depth)


def _pair(value: Any, name: str) -> tuple[Any, Any]:
    found = listed(value, name)
    if len(found) != 2:
        raise ValueError(f"'{name}' of the optimizer has {len(found)} where two belong")
    return found[0], found[1]


_CHECKS: Mapping[str, Callable[[Any, str, int], None]] = {
    "tensor": _check_word,
    "is": _check_plain,
    "list": _check_rows,
    "tuple": _check_rows,
    "deque": _check_deque,
    "table": _check_table,
}

_FILE_NAME_PATTERN = re.compile(r"rank-\d{5,9}(\.\d{1,4}-of-\d{1,4})?\.safetensors", re.ASCII)
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FILE_KEYS = frozenset({"name", "num_bytes", "checksum", "chunks"})
_CHUNK_KEYS = frozenset({"name", "dtype", "shape", "offsets", "sizes"})
_ORIGIN_KEYS = frozenset({"run", "recipe", "strategy", "world_size", "versions"})
_SCALAR_KEYS = frozenset(
    {
        "step",
        "updates",
        "updates_per_step",
        "scale",
        "optimizer",
        "optimizer_kind",
        "groups",
        "others",
        "tied",
    }
)
_DEFAULT_SCALARS: Mapping[str, Any] = {"others": {}, "updates_per_step": 1}  # older ones lack these
_MANIFEST_KEYS = frozenset(
    {"step", "serial", "saved_ns", "origin", "files", "scalars", "state_sha256", "losses"}
)
_MAX_AXES = 64
_LENGTH_BYTES = 8


def check_record(record: Any) -> None:
    """A whole manifest, without its seal and format."""
    found = fields(record, "the manifest", _MANIFEST_KEYS)
    for name in ("step", "serial", "saved_ns"):
        count(found[name], name)
    _match(_DIGEST_PATTERN, found["state_sha256"], "state_sha256")
    _check_origin(found["origin"])
    _check_scalars(found["scalars"])
    for step, loss in table(found["losses"], "losses").items():
        if not step.isdecimal():
            raise ValueError(f"losses has the step '{step[:40]}'")
        numeric(loss, "a loss")
    _check_files(found["files"])


def check_part(record: Any) -> None:
    """One rank's report, without its seal."""
    found = fields(record, "the report", frozenset({"files", "scalars"}))
    _check_scalars(found["scalars"])
    _check_files(found["files"])


def _check_files(files: Any) -> None:
    names: set[str] = set()
    for file in listed(files, "files"):
        found = fields(file, "a file", _FILE_KEYS)
        _match(_FILE_NAME_PATTERN, found["name"], "the name of a file")
        if not is_checksum(text(found["checksum"], "a checksum")):
            raise ValueError(f"a checksum is {found['checksum'][:80]!r}")
        chunks = [_check_chunk(chunk) for chunk in listed(found["chunks"], "chunks")]
        if found["name"] in names:
            raise ValueError(f"{found['name']} is there twice")
        if len({*chunk_keys(chunks)}) != len(chunks):
            raise ValueError(f"{found['name']} has two chunks of one tensor in one place")
        names.add(found["name"])
        if count(found["num_bytes"], "num_bytes") < _LENGTH_BYTES + sum(chunk.num_bytes for chunk in chunks):
            raise ValueError(f"{found['name']} is too short for its chunks")


def check_cover(chunks: Sequence[TensorChunk]) -> None:
    """Every byte of every tensor is in exactly one chunk."""
    by_name: dict[str, list[TensorChunk]] = {}
    for chunk in chunks:
        by_name.setdefault(chunk.name, []).append(chunk)
    for name, parts in by_name.items():
        if len({(part.dtype, part.shape) for part in parts}) != 1:
            raise ValueError(f"the chunks of '{name[:80]}' are of different tensors")
        if sum(prod(part.sizes) for part in parts) != prod(parts[0].shape):
            raise ValueError(f"the chunks of '{name[:80]}' do not fill it")
        _check_apart(name, parts)


def _check_apart(name: str, parts: Sequence[TensorChunk]) -> None:
    """No two boxes share a value; those that end before another one begins are left out."""
    boxes = [part for part in parts if prod(part.sizes)]
    open_boxes: list[TensorChunk] = []
    for box in sorted(boxes, key=lambda one: one.offsets):
        begin = box.offsets[0] if box.offsets else 0
        open_boxes = [one for one in open_boxes if one.offsets and one.offsets[0] + one.sizes[0] > begin]
        if any(_boxes_overlap(one, box) for one in open_boxes) or (not box.offsets and len(boxes) > 1):
            raise ValueError(f"two chunks of '{name[:80]}' overlap")
        open_boxes.append(box)


def _boxes_overlap(a: TensorChunk, b: TensorChunk) -> bool:
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _check_chunk(value: Any) -> TensorChunk:
    found = fields(value, "a chunk", _CHUNK_KEYS)
    name = text(found["name"], "the name of a tensor")
    if not is_dtype_code(text(found["dtype"], "dtype")):
        raise ValueError(f"'{name[:80]}' is of an unknown type")
    shape, offsets, sizes = (_counts(found[key], key) for key in ("shape", "offsets", "sizes"))
    inside = all(start + size <= whole for start, size, whole in zip(offsets, sizes, shape, strict=False))
    if not (len(shape) == len(offsets) == len(sizes) <= _MAX_AXES and inside):
        raise ValueError(f"a chunk lies outside of '{name[:80]}'")
    return TensorChunk(name, found["dtype"], shape, offsets, sizes)


def _check_origin(value: Any) -> None:
    found = fields(value, "the origin", _ORIGIN_KEYS)
    for name in ("run", "recipe", "strategy"):
        text(found[name], name)
    if count(found["world_size"], "world_size") == 0:
        raise ValueError("world_size is 0")
    for name, version in table(found["versions"], "versions").items():
        text(version, f"the version of {name[:40]}")


def _check_scalars(value: Any) -> None:
    given = table(value, "the scalars")
    found: Mapping[str, Any] = fields({**_DEFAULT_SCALARS, **given}, "the scalars", _SCALAR_KEYS)
    table(found["others"], "others")
    scale = fields(found["scale"], "scale", frozenset({"value", "clean_steps"}))
    for name in ("step", "updates"):
        count(found[name], name)
    if count(found["updates_per_step"], "updates_per_step") == 0:
        raise ValueError("updates_per_step is 0")
    numeric(scale["value"], "the loss scale")
    count(scale["clean_steps"], "clean_steps")
    text(found["optimizer_kind"], "optimizer_kind")
    for name, number in table(found["optimizer"], "the numbers of the optimizer").items():
        check_optimizer_value(number, name[:80])
    for group in listed(found["groups"], "groups"):
        for name, value in table(group, "what the optimizer has changed in a group").items():
            if not isinstance(value, bool | int | float | str | None):
                raise ValueError(f"'{name[:80]}' of a group of the optimizer is no number")
    for name, first in table(found["tied"], "tied").items():
        text(first, f"what '{name[:80]}' is tied to")


def _counts(value: Any, what: str) -> tuple[int, ...]:
    return tuple(count(one, what) for one in listed(value, what))


def _match(pattern: re.Pattern[str], value: Any, what: str) -> None:
    if not pattern.fullmatch(text(value, what)):
        raise ValueError(f"{what} is {value[:80]!r}")


MANIFEST_FILE = "manifest.json"
_FORMAT, _OLDER_FORMAT = 3, 2
_SEAL = "manifest_sha256"


@dataclass(frozen=True)
class TensorFileRecord:
    """A file of tensors, as it was written."""

    name: str
    num_bytes: int
    checksum: str
    chunks: tuple[TensorChunk, ...]


@dataclass(frozen=True)
class CheckpointOrigin:
    """Where a checkpoint comes from.

    Args:
        run: names the run; a checkpoint of another run is foreign.
        recipe: as TOML, with every value.
        strategy: as text, replicas filled in.
        world_size: number of ranks.
        versions: of Paceline, torch and Python.
    """

    run: str
    recipe: str
    strategy: str
    world_size: int
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """One checkpoint.

    Args:
        step: steps taken.
        serial: counts the checkpoints of a run; a higher one was saved later.
        saved_ns: nanoseconds since the epoch.
        files: by rank; a rank that had nothing to write has none, one that had much has several.
        scalars: what `TrainState.load` takes beside tensors.
        state_sha256: of all that is loaded; equal states, saved by equally many ranks, have equal ones.
        losses: the evaluation losses that were known, by step as text: what chooses which checkpoints stay.
    """

    step: int
    serial: int
    saved_ns: int
    origin: CheckpointOrigin
    files: tuple[TensorFileRecord, ...]
    scalars: Mapping[str, Any]
    state_sha256: str
    losses: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The text of the file."""
        record = {"format": _FORMAT, **asdict(self)}
        return (json.dumps({**record, _SEAL: _seal(record)}, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """The inverse of `to_json`.

        Raises:
            ValueError: it is not what was written, or another format; says which.
        """
        try:
            record = parse(data)
            seal = record.pop(_SEAL)
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{MANIFEST_FILE} is damaged or is not Paceline's") from None
        if seal != _seal(record):
            raise ValueError(f"{MANIFEST_FILE} is damaged: its SHA-256 does not fit")
        form = record.pop("format", None)
        if form == _OLDER_FORMAT:
            _upgrade_format(record)
        elif form != _FORMAT:
            raise ValueError(f"{MANIFEST_FILE} is of another format than {_FORMAT}")
        record.setdefault("losses", {})
        try:
            return cls._checked(record)
        except ValueError as error:
            raise ValueError(f"{MANIFEST_FILE} cannot be true: {error}") from error

    @classmethod
    def _checked(cls, record: dict[str, Any]) -> Manifest:
        check_record(record)
        files = tuple(_parse_file(**entry) for entry in record.pop("files"))
        check_cover([chunk for file in files for chunk in file.chunks])
        return cls(origin=CheckpointOrigin(**record.pop("origin")), files=files, **record)


def hash_state(files: Sequence[TensorFileRecord], scalars: Mapping[str, Any]) -> str:
    """SHA-256 over the checksums of the files and the scalars."""
    return _seal({"files": sorted(file.checksum for file in files), "scalars": scalars})


def missing_tensors(files: Sequence[TensorFileRecord]) -> list[str]:
    """Names of tensors that the chunks of all files do not fill; chunks never overlap."""
    filled: dict[str, int] = {}
    whole: dict[str, int] = {}
    for chunk in (chunk for file in files for chunk in file.chunks):
        filled[chunk.name] = filled.get(chunk.name, 0) + prod(chunk.sizes)
        whole[chunk.name] = prod(chunk.shape)
    return sorted(name for name, count in whole.items() if filled[name] != count)


def _parse_file(
    name: str, num_bytes: int, checksum: str, chunks: Sequence[Mapping[str, Any]]
) -> TensorFileRecord:
    return TensorFileRecord(name, num_bytes, checksum, tuple(_parse_chunk(**chunk) for chunk in chunks))


def _upgrade_format(record: Mapping[str, Any]) -> None:
    """Say it as the present format does: the one before knew no other checksum than SHA-256."""
    files = record.get("files")
    for file in files if isinstance(files, list) else []:
        if isinstance(file, dict) and "sha256" in file:
            file["checksum"] = f"sha256:{file.pop('sha256')}"


def _parse_chunk(
    name: str, dtype: str, shape: list[int], offsets: list[int], sizes: list[int]
) -> TensorChunk:
    return TensorChunk(name, dtype, tuple(shape), tuple(offsets), tuple(sizes))


def _seal(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def encode_part(files: Sequence[TensorFileRecord], scalars: Mapping[str, Any]) -> bytes:
    """What one rank reports when its files are written: the first phase of publishing."""
    record = {"files": [asdict(file) for file in files], "scalars": scalars}
    return (json.dumps({**record, _SEAL: _seal(record)}) + "\n").encode()


def decode_part(data: bytes) -> tuple[list[TensorFileRecord], Mapping[str, Any]]:
    """The inverse of `encode_part`; ValueError if it is not what was written."""
    record = parse(data)
    if not isinstance(record, dict) or record.pop(_SEAL, None) != _seal(record):
        raise ValueError("the report of a rank is damaged")
    check_part(record)
    return [_parse_file(**file) for file in record["files"]], record["scalars"]
