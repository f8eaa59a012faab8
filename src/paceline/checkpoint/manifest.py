"""The manifest: what makes a folder a checkpoint. It is written last, and it names every other file.

Invariant: a manifest that can be read is complete and unchanged (it carries its own SHA-256), and every byte
of the files that it names is covered by a checksum in it. It is JSON; no pickle is written or read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from paceline.checkpoint.strict_json import parse
from paceline.checkpoint.tensor_file import Chunk
from paceline.checkpoint.validate import check_cover, check_part, check_record

MANIFEST = "manifest.json"
_FORMAT, _OLDER_FORMAT = 3, 2
_SEAL = "manifest_sha256"


@dataclass(frozen=True)
class File:
    """A file of tensors, as it was written."""

    name: str
    num_bytes: int
    checksum: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Origin:
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
    origin: Origin
    files: tuple[File, ...]
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
            raise ValueError(f"{MANIFEST} is damaged or is not Paceline's") from None
        if seal != _seal(record):
            raise ValueError(f"{MANIFEST} is damaged: its SHA-256 does not fit")
        form = record.pop("format", None)
        if form == _OLDER_FORMAT:
            _renew(record)
        elif form != _FORMAT:
            raise ValueError(f"{MANIFEST} is of another format than {_FORMAT}")
        record.setdefault("losses", {})
        try:
            return cls._checked(record)
        except ValueError as error:
            raise ValueError(f"{MANIFEST} cannot be true: {error}") from error

    @classmethod
    def _checked(cls, record: dict[str, Any]) -> Manifest:
        check_record(record)
        files = tuple(_file(**entry) for entry in record.pop("files"))
        check_cover([chunk for file in files for chunk in file.chunks])
        return cls(origin=Origin(**record.pop("origin")), files=files, **record)


def hash_state(files: Sequence[File], scalars: Mapping[str, Any]) -> str:
    """SHA-256 over the checksums of the files and the scalars."""
    return _seal({"files": sorted(file.checksum for file in files), "scalars": scalars})


def missing_tensors(files: Sequence[File]) -> list[str]:
    """Names of tensors that the chunks of all files do not fill; chunks never overlap."""
    filled: dict[str, int] = {}
    whole: dict[str, int] = {}
    for chunk in (chunk for file in files for chunk in file.chunks):
        filled[chunk.name] = filled.get(chunk.name, 0) + prod(chunk.sizes)
        whole[chunk.name] = prod(chunk.shape)
    return sorted(name for name, count in whole.items() if filled[name] != count)


def _file(name: str, num_bytes: int, checksum: str, chunks: Sequence[Mapping[str, Any]]) -> File:
    return File(name, num_bytes, checksum, tuple(_chunk(**chunk) for chunk in chunks))


def _renew(record: Mapping[str, Any]) -> None:
    """Say it as the present format does: the one before knew no other checksum than SHA-256."""
    files = record.get("files")
    for file in files if isinstance(files, list) else []:
        if isinstance(file, dict) and "sha256" in file:
            file["checksum"] = f"sha256:{file.pop('sha256')}"


def _chunk(name: str, dtype: str, shape: list[int], offsets: list[int], sizes: list[int]) -> Chunk:
    return Chunk(name, dtype, tuple(shape), tuple(offsets), tuple(sizes))


def _seal(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def encode_part(files: Sequence[File], scalars: Mapping[str, Any]) -> bytes:
    """What one rank reports when its files are written: the first phase of publishing."""
    record = {"files": [asdict(file) for file in files], "scalars": scalars}
    return (json.dumps({**record, _SEAL: _seal(record)}) + "\n").encode()


def decode_part(data: bytes) -> tuple[list[File], Mapping[str, Any]]:
    """The inverse of `encode_part`; ValueError if it is not what was written."""
    record = parse(data)
    if not isinstance(record, dict) or record.pop(_SEAL, None) != _seal(record):
        raise ValueError("the report of a rank is damaged")
    check_part(record)
    return [_file(**file) for file in record["files"]], record["scalars"]
