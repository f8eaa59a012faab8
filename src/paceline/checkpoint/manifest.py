"""The manifest: the file that makes a folder a checkpoint. It is written last, and names every other file.

A manifest is JSON with a SHA-256 of itself; no pickle is written or read. It is validated in full by strict
models before anything that it names is opened.

Invariant: a manifest that can be read is complete and unchanged, and every byte of the files that it names is
covered by a checksum in it. Every file lies in the folder of the checkpoint, every byte of every tensor is in
exactly one chunk, and no tensor is larger than the files that hold it.
Not done here: reading the optimizer's values, which `paceline.state.optimizer_state` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, Tag, TypeAdapter

from paceline.checkpoint.disk.checksum import is_checksum
from paceline.checkpoint.safetensors_file import TensorChunk, chunk_keys, is_dtype_code
from paceline.checkpoint.strict_json import Count, Number, StrictModel, parse, seal, validate

MANIFEST_FILE = "manifest.json"
_FORMAT, _OLDER_FORMAT = 3, 2
_SEAL = "manifest_sha256"
_MAX_AXES = 64
_MAX_TABLE_DEPTH = 64  # of the optimizer's values: reading them recurses
_LENGTH_BYTES = 8  # in front of the header of a safetensors file

# ------------------------------------------------------------- models of what a manifest can hold

Plain = bool | int | float | str | None


class _TensorValue(StrictModel):
    tensor: str


class _PlainValue(StrictModel):
    value: Plain = Field(alias="is")


class _ListValue(StrictModel):
    rows: list[OptimizerValue] = Field(alias="list")


class _TupleValue(StrictModel):
    rows: list[OptimizerValue] = Field(alias="tuple")


class _DequeValue(StrictModel):
    # JSON has no tuples, so these pairs are lists there: only their own type is not strict.
    length_and_rows: Annotated[tuple[Count | None, list[OptimizerValue]], Field(strict=False, alias="deque")]


class _TableValue(StrictModel):
    entries: list[Annotated[tuple[Plain, OptimizerValue], Field(strict=False)]] = Field(alias="table")


def _kind_of_value(value: Any) -> str | None:
    """Return the only key of a table, which names its kind."""
    return next(iter(value)) if isinstance(value, dict) and len(value) == 1 else None


OptimizerValue = Annotated[
    Annotated[_TensorValue, Tag("tensor")]
    | Annotated[_PlainValue, Tag("is")]
    | Annotated[_ListValue, Tag("list")]
    | Annotated[_TupleValue, Tag("tuple")]
    | Annotated[_DequeValue, Tag("deque")]
    | Annotated[_TableValue, Tag("table")],
    Discriminator(
        _kind_of_value,
        custom_error_type="optimizer_value",
        custom_error_message="an optimizer value has an unknown encoding",
    ),
]
"""A list, table or tensor of an optimizer, as `paceline.state.optimizer_state` encodes it."""


def _limit_depth(value: Any) -> Any:
    if isinstance(value, dict) and _is_deeper(value, _MAX_TABLE_DEPTH):
        raise ValueError(f"an optimizer value is nested more than {_MAX_TABLE_DEPTH} levels deep")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether tables are nested in more than `levels` levels."""
    if isinstance(value, dict):
        return levels == 0 or any(_is_deeper(child, levels - 1) for child in value.values())
    return isinstance(value, list) and any(_is_deeper(child, levels) for child in value)


def _plain_or_table(value: Any) -> str:
    return "table" if isinstance(value, dict) else "plain"


_SavedValue = Annotated[
    Annotated[Plain, Tag("plain")] | Annotated[OptimizerValue, Tag("table")], Discriminator(_plain_or_table)
]
_SAVED_VALUE: TypeAdapter[Any] = TypeAdapter(_SavedValue)


def check_optimizer_value(value: Any, name: str) -> None:
    """Check a number or word of an optimizer, or the encoding of a list or table.

    Raises:
        ValueError: it is something else; names it.
    """
    validate(_SAVED_VALUE, _limit_depth(value), f"optimizer.{name}")


def _known_dtype(code: str) -> str:
    if not is_dtype_code(code):
        raise ValueError(f"the type {code[:20]!r} is unknown")
    return code


def _known_checksum(text: str) -> str:
    if not is_checksum(text):
        raise ValueError(f"{text[:80]!r} is no checksum")
    return text


class _ChunkModel(StrictModel):
    name: str
    dtype: Annotated[str, AfterValidator(_known_dtype)]
    shape: list[Count]
    offsets: list[Count]
    sizes: list[Count]

    def to_chunk(self) -> TensorChunk:
        return TensorChunk(self.name, self.dtype, tuple(self.shape), tuple(self.offsets), tuple(self.sizes))


def _check_chunk(model: _ChunkModel) -> _ChunkModel:
    shape, offsets, sizes = model.shape, model.offsets, model.sizes
    inside = all(start + size <= whole for start, size, whole in zip(offsets, sizes, shape, strict=False))
    if not (len(shape) == len(offsets) == len(sizes) <= _MAX_AXES and inside):
        raise ValueError(f"the chunk lies outside of '{model.name[:80]}'")
    return model


class _FileModel(StrictModel):
    # Only names in this form: a name with a slash would lead out of the folder.
    name: Annotated[str, Field(pattern=r"\Arank-[0-9]{5,9}(\.[0-9]{1,4}-of-[0-9]{1,4})?\.safetensors\z")]
    num_bytes: Count
    checksum: Annotated[str, AfterValidator(_known_checksum)]
    chunks: list[Annotated[_ChunkModel, AfterValidator(_check_chunk)]]

    def to_record(self) -> TensorFileRecord:
        chunks = tuple(chunk.to_chunk() for chunk in self.chunks)
        return TensorFileRecord(self.name, self.num_bytes, self.checksum, chunks)


def _check_file(model: _FileModel) -> _FileModel:
    chunks = model.to_record().chunks
    if len({*chunk_keys(chunks)}) != len(chunks):
        raise ValueError(f"{model.name} has two chunks at one place of a tensor")
    if model.num_bytes < _LENGTH_BYTES + sum(chunk.num_bytes for chunk in chunks):
        raise ValueError(f"{model.name} is too short for its chunks")
    return model


def _unique_names(files: list[_FileModel]) -> list[_FileModel]:
    names = [file.name for file in files]
    if len({*names}) != len(names):
        raise ValueError("two files have the same name")
    return files


_Files = Annotated[list[Annotated[_FileModel, AfterValidator(_check_file)]], AfterValidator(_unique_names)]


class _ScaleModel(StrictModel):
    value: Number
    clean_steps: Count


class _ScalarsModel(StrictModel):
    step: Count
    updates: Count
    updates_per_step: Annotated[Count, Field(gt=0)] = 1  # older manifests lack this key, and `others`
    scale: _ScaleModel
    optimizer: dict[str, Annotated[_SavedValue, Field()]]
    optimizer_kind: str
    groups: list[dict[str, Plain]]
    others: dict[str, Any] = Field(default_factory=dict)
    tied: dict[str, str]


class _OriginModel(StrictModel):
    run: str
    recipe: str
    strategy: str
    world_size: Annotated[Count, Field(gt=0)]
    versions: dict[str, str]


_Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
_Step = Annotated[str, Field(pattern=r"\A[0-9]+\z")]


class _ManifestModel(StrictModel):
    step: Count
    serial: Count
    saved_ns: Count
    origin: _OriginModel
    files: _Files
    scalars: _ScalarsModel
    state_sha256: _Digest
    losses: dict[_Step, Number]


class _PartModel(StrictModel):
    files: _Files
    scalars: _ScalarsModel
    tensors: dict[str, dict[str, str]] = Field(default_factory=dict)


def check_cover(chunks: Sequence[TensorChunk]) -> None:
    """Check that every byte of every tensor is in exactly one chunk."""
    by_name: dict[str, list[TensorChunk]] = {}
    for chunk in chunks:
        by_name.setdefault(chunk.name, []).append(chunk)
    for name, same_name in by_name.items():
        if len({(chunk.dtype, chunk.shape) for chunk in same_name}) != 1:
            raise ValueError(f"the chunks of '{name[:80]}' are of different tensors")
        if sum(prod(chunk.sizes) for chunk in same_name) != prod(same_name[0].shape):
            raise ValueError(f"the chunks of '{name[:80]}' do not fill it")
        _check_apart(name, same_name)


def _check_apart(name: str, parts: Sequence[TensorChunk]) -> None:
    """Check that no two boxes share a value. Boxes that end before the next one begins are not compared."""
    boxes = [part for part in parts if prod(part.sizes)]
    open_boxes: list[TensorChunk] = []
    for box in sorted(boxes, key=lambda chunk: chunk.offsets):
        begin = box.offsets[0] if box.offsets else 0
        open_boxes = [b for b in open_boxes if b.offsets and b.offsets[0] + b.sizes[0] > begin]
        if any(_boxes_overlap(other, box) for other in open_boxes) or (not box.offsets and len(boxes) > 1):
            raise ValueError(f"two chunks of '{name[:80]}' overlap")
        open_boxes.append(box)


def _boxes_overlap(a: TensorChunk, b: TensorChunk) -> bool:
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


# --------------------------------------------------------------------------------- the manifest


@dataclass(frozen=True)
class TensorFileRecord:
    """A file of tensors as it was written."""

    name: str
    num_bytes: int
    checksum: str
    chunks: tuple[TensorChunk, ...]


@dataclass(frozen=True)
class CheckpointOrigin:
    """The run that a checkpoint belongs to.

    Args:
        run: id of the run; a checkpoint of another run is foreign.
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
        """Return the bytes of the manifest file."""
        record = {"format": _FORMAT, **asdict(self)}
        return (json.dumps({**record, _SEAL: seal(record)}, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse and validate the bytes of a manifest file.

        Raises:
            ValueError: it is damaged, has another format, or contradicts itself; says which.
        """
        try:
            record = parse(data)
            written_seal = record.pop(_SEAL)
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{MANIFEST_FILE} is damaged or is not Paceline's") from None
        if written_seal != seal(record):
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
        # Before validation: a model would recurse into nested values.
        _limit_optimizer_depth(record)
        files = tuple(file.to_record() for file in validate(_MANIFEST, record).files)
        check_cover([chunk for file in files for chunk in file.chunks])
        # Everything but the files is kept as it was written, so that a copy has the same seal.
        return cls(**{**record, "origin": CheckpointOrigin(**record["origin"]), "files": files})


def hash_state(files: Sequence[TensorFileRecord], scalars: Mapping[str, Any]) -> str:
    """Return the SHA-256 over the checksums of the files and the scalars."""
    return seal({"files": sorted(file.checksum for file in files), "scalars": scalars})


def missing_tensors(files: Sequence[TensorFileRecord]) -> list[str]:
    """Return the names of tensors that the chunks of all files do not fill; chunks never overlap."""
    filled: dict[str, int] = {}
    whole: dict[str, int] = {}
    for chunk in (chunk for file in files for chunk in file.chunks):
        filled[chunk.name] = filled.get(chunk.name, 0) + prod(chunk.sizes)
        whole[chunk.name] = prod(chunk.shape)
    return sorted(name for name, count in whole.items() if filled[name] != count)


def _limit_optimizer_depth(record: Mapping[str, Any]) -> None:
    """Raise if a value of the optimizer is nested too deeply, before a model recurses into it."""
    scalars = record.get("scalars")
    optimizer = scalars.get("optimizer") if isinstance(scalars, dict) else None
    for value in optimizer.values() if isinstance(optimizer, dict) else ():
        _limit_depth(value)


def _upgrade_format(record: Mapping[str, Any]) -> None:
    """Convert a record to the present format; the previous one knew only SHA-256 checksums."""
    files = record.get("files")
    for file in files if isinstance(files, list) else []:
        if isinstance(file, dict) and "sha256" in file:
            file["checksum"] = f"sha256:{file.pop('sha256')}"


@dataclass(frozen=True)
class RankPart:
    """The report of one rank when its files are written.

    Args:
        files: its files.
        scalars: its values that are not tensors.
        tensors: the checksum of each chunk, by file and by its name there; they go into the certificate.
    """

    files: Sequence[TensorFileRecord]
    scalars: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def encode_part(part: RankPart) -> bytes:
    """Encode the report of one rank whose files are written: the first phase of publishing."""
    record = {
        "files": [asdict(file) for file in part.files],
        "scalars": part.scalars,
        "tensors": part.tensors,
    }
    return (json.dumps({**record, _SEAL: seal(record)}) + "\n").encode()


def decode_part(data: bytes) -> RankPart:
    """Decode the report of `encode_part`; ValueError if it is not what was written."""
    record = parse(data)
    if not isinstance(record, dict) or record.pop(_SEAL, None) != seal(record):
        raise ValueError("the report of a rank is damaged")
    _limit_optimizer_depth(record)
    checked = validate(_PART, record)
    return RankPart([file.to_record() for file in checked.files], record["scalars"], checked.tensors)


_MANIFEST, _PART = TypeAdapter(_ManifestModel), TypeAdapter(_PartModel)
