"""Load a checkpoint with torch.distributed.checkpoint, from a manifest and safetensors instead of pickles.

Invariant: not a byte is handed on before the file that it is in has the checksum of the manifest. How the
saved chunks are put together again, whatever cut them, is DCP's planning.

Any script may use the reader: `torch.distributed.checkpoint.load(state, storage_reader=ManifestReader(...))`
fills plain tensors, DTensors and FSDP2 models, under any number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_with
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from paceline.checkpoint.catalog import open_manifest, unusable_checkpoint_error
from paceline.checkpoint.disk.checksum import recompute_checksum
from paceline.checkpoint.manifest import Manifest, TensorFileRecord
from paceline.checkpoint.safetensors_file import TensorChunk, chunk_keys, decode_tensors, dtype_of_code
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import CheckpointError
from paceline.state.slot import SlotIndex, TensorPiece, TensorSlot, span_of_index


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint of which nothing has been read yet; see `paceline.state.slot.TensorSource`."""

    files: StorageFolder
    name: str
    manifest: Manifest

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of the whole tensors, by name."""
        return {chunk.name: chunk.shape for file in self.manifest.files for chunk in file.chunks}

    @property
    def scalars(self) -> Mapping[str, Any]:
        """Everything that is not a tensor."""
        return self.manifest.scalars

    def read(self, wanted: Mapping[str, SlotIndex]) -> Mapping[str, Tensor]:
        """Parts of some tensors, in new memory.

        Raises:
            CheckpointError: a file is missing, cut short, or its bytes are not those that were written.
        """
        reader = ManifestReader(self.files, self.name)
        types = {
            chunk.name: dtype_of_code(chunk.dtype) for file in self.manifest.files for chunk in file.chunks
        }
        parts = {name: _slot_of_part(name, self.shapes[name], index) for name, index in wanted.items()}
        tensors = {name: torch.empty(part.sizes, dtype=types[name]) for name, part in parts.items()}
        with warnings.catch_warnings():  # "torch.distributed is disabled": it is not, each rank reads alone
            warnings.simplefilter("ignore", UserWarning)
            _load_pieces(tensors, [TensorPiece(part, tensors[name]) for name, part in parts.items()], reader)
        return tensors


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was read: whole tensors and scalars by name, as `TrainState.load` takes them."""

    name: str
    manifest: Manifest
    tensors: Mapping[str, Tensor]

    @property
    def scalars(self) -> Mapping[str, Any]:
        """Everything that is not a tensor."""
        return self.manifest.scalars


class ManifestReader(StorageReader):
    """DCP's view of one checkpoint.

    Args:
        files: the folder of the checkpoints.
        name: of the checkpoint in it.
    Raises:
        CheckpointError: there is no whole checkpoint of this name.
    """

    def __init__(self, files: StorageFolder, name: str) -> None:
        self.files, self.name = files, name
        self.manifest = open_manifest(files, name)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """There is nothing to forget."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest in DCP's words."""
        tensors: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, tuple[TensorFileRecord, str]] = {}
        for file in self.manifest.files:
            for chunk, key in zip(file.chunks, chunk_keys(file.chunks), strict=True):
                properties = TensorProperties(dtype=dtype_of_code(chunk.dtype))
                whole = TensorStorageMetadata(properties, torch.Size(chunk.shape), [])
                box = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                tensors.setdefault(chunk.name, whole).chunks.append(box)
                places[MetadataIndex(chunk.name, chunk.offsets)] = file, key
        return Metadata(dict(tensors), storage_data=places, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        """Take over where each chunk is."""
        self._places: dict[MetadataIndex, tuple[TensorFileRecord, str]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan, one file after the other."""
        by_file: dict[str, list[ReadItem]] = {}
        known = {file.name: file for file in self.manifest.files}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index][0].name, []).append(item)
        for name, items in by_file.items():
            tensors = self._verified(known[name])
            for item in items:
                _fill(item, tensors[self._places[item.storage_index][1]], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _verified(self, file: TensorFileRecord) -> Mapping[str, Tensor]:
        try:
            data = bytearray(self.files.read(f"{self.name}/{file.name}"))
        except OSError as error:
            raise unusable_checkpoint_error(self.files, self.name, f"{file.name}: {error}") from error
        found = recompute_checksum(data, file.checksum)
        if found != file.checksum:
            reason = f"{file.name} is damaged: its checksum is {found}, written was {file.checksum}"
            raise unusable_checkpoint_error(self.files, self.name, reason)
        try:
            found_tensors = decode_tensors(data)
            for chunk, key in zip(file.chunks, chunk_keys(file.chunks), strict=True):
                _check_tensor(chunk, found_tensors.get(key))
        except ValueError as error:
            raise unusable_checkpoint_error(self.files, self.name, f"{file.name}: {error}") from error
        return found_tensors

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether a name could be that of a checkpoint."""
        return bool(str(checkpoint_id))


def _check_tensor(chunk: TensorChunk, found: Tensor | None) -> None:
    """What the manifest says of a tensor must be what its file holds."""
    if found is None or found.dtype != dtype_of_code(chunk.dtype) or tuple(found.shape) != chunk.sizes:
        raise ValueError(f"'{chunk.name[:80]}' is not what the manifest says")


def _fill(item: ReadItem, saved: Tensor, planner: LoadPlanner) -> None:
    box = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
    target = planner.resolve_tensor(item).detach()
    target.copy_(saved[box])
    planner.commit_tensor(item, target)


def load_checkpoint(files: StorageFolder, name: str, prefix: str | tuple[str, ...] = "") -> LoadedCheckpoint:
    """Read one checkpoint into new, whole tensors, on this rank alone.

    Args:
        prefix: of the names of the tensors that are wanted, or several; "model/" leaves the moments out.
    Raises:
        CheckpointError: missing, cut short, or its bytes are not those that were written.
    """
    stored = open_checkpoint(files, name)
    wanted = {name: () for name in stored.shapes if name.startswith(prefix)}
    return LoadedCheckpoint(name, stored.manifest, stored.read(wanted))


def open_checkpoint(files: StorageFolder, name: str) -> StoredCheckpoint:
    """A checkpoint, to read parts of.

    Raises:
        CheckpointError: there is no whole checkpoint of this name.
    """
    return StoredCheckpoint(files, name, open_manifest(files, name))


class _PieceLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of the boxes of one piece of each tensor.

    Args:
        pieces: with the tensors to fill.
    """

    def __init__(self, pieces: Sequence[TensorPiece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._boxes = {piece.slot.name: [*piece.boxes()] for piece in pieces}
        self._filled = {
            MetadataIndex(name, _chunk_metadata(box).offsets): box.tensor
            for name, boxes in self._boxes.items()
            for box in boxes
        }

    def create_local_plan(self) -> LoadPlan:
        """What of the saved chunks lies in the boxes."""
        assert self.metadata is not None
        known: dict[str, Any] = self.metadata.state_dict_metadata
        items = [
            item
            for name, boxes in self._boxes.items()
            for item in create_read_items_for_chunk_list(name, known[name], [*map(_chunk_metadata, boxes)])
        ]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor that takes a box."""
        return self._filled[MetadataIndex(index.fqn, index.offset)]


def _slot_of_part(name: str, shape: tuple[int, ...], index: SlotIndex) -> TensorSlot:
    whole = index or tuple(slice(None) for _ in shape)
    return TensorSlot(name, shape, tuple(span_of_index(one, n) for one, n in zip(whole, shape, strict=True)))


def _chunk_metadata(piece: TensorPiece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(span[0] for span in piece.slot.part), torch.Size(piece.slot.sizes))


def _load_pieces(tensors: dict[str, Tensor], pieces: Sequence[TensorPiece], reader: ManifestReader) -> None:
    try:
        load_with(tensors, storage_reader=reader, planner=_PieceLoadPlanner(pieces), no_dist=True)
    except CheckpointException as error:  # a BaseException that carries what was raised
        own = next((e for e, _ in error.failures.values() if isinstance(e, CheckpointError)), None)
        raise own or unusable_checkpoint_error(reader.files, reader.name, str(error)) from error
