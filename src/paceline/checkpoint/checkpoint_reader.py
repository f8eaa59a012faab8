"""Reading a checkpoint with torch.distributed.checkpoint (DCP), from a manifest and safetensors instead of
pickles.

DCP plans how saved chunks are put together again, however they were cut. Any script can use the reader:
`torch.distributed.checkpoint.load(state, storage_reader=ManifestReader(...))` fills plain tensors, DTensors
and FSDP2 models, under any number of ranks.

Invariant: no byte is used before its file has the checksum of the manifest.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
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
from paceline.checkpoint.storage import MappedFile, StorageFolder
from paceline.errors import CheckpointError
from paceline.state.slot import SlotIndex, TensorPiece, TensorSlot, span_of_index


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint of which no tensor has been read yet; see `paceline.state.slot.TensorSource`."""

    files: StorageFolder
    name: str
    manifest: Manifest

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the whole tensors, by name."""
        return {chunk.name: chunk.shape for file in self.manifest.files for chunk in file.chunks}

    @property
    def scalars(self) -> Mapping[str, Any]:
        """Return everything that is not a tensor."""
        return self.manifest.scalars

    def read(self, wanted: Mapping[str, SlotIndex]) -> Mapping[str, Tensor]:
        """Read parts of some tensors into new memory.

        Args:
            wanted: the index of the part, by name; an empty index is the whole tensor.
        Raises:
            CheckpointError: a file is missing, cut short, or damaged.
        """
        reader = ManifestReader(self.files, self.name)
        types = {
            chunk.name: dtype_of_code(chunk.dtype) for file in self.manifest.files for chunk in file.chunks
        }
        slots = {name: _slot_of_part(name, self.shapes[name], index) for name, index in wanted.items()}
        tensors = {name: torch.empty(slot.sizes, dtype=types[name]) for name, slot in slots.items()}
        with warnings.catch_warnings():  # DCP warns that torch.distributed is off; here each rank reads alone
            warnings.simplefilter("ignore", UserWarning)
            _load_pieces(tensors, [TensorPiece(slot, tensors[name]) for name, slot in slots.items()], reader)
        return tensors


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The tensors and scalars of a checkpoint by name, as `TrainState.load` takes them."""

    name: str
    manifest: Manifest
    tensors: Mapping[str, Tensor]

    @property
    def scalars(self) -> Mapping[str, Any]:
        """Return everything that is not a tensor."""
        return self.manifest.scalars


class ManifestReader(StorageReader):
    """The storage reader of DCP for one checkpoint.

    Args:
        files: the folder of the checkpoints.
        name: of the checkpoint in it.
    Raises:
        CheckpointError: there is no complete checkpoint of this name.
    """

    def __init__(self, files: StorageFolder, name: str) -> None:
        self.files, self.name = files, name
        self.manifest = open_manifest(files, name)

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Do nothing: there is no state to reset."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest as DCP's metadata."""
        tensors: dict[str, TensorStorageMetadata] = {}
        chunk_places: dict[MetadataIndex, tuple[TensorFileRecord, str]] = {}
        for file in self.manifest.files:
            for chunk, key in zip(file.chunks, chunk_keys(file.chunks), strict=True):
                properties = TensorProperties(dtype=dtype_of_code(chunk.dtype))
                whole = TensorStorageMetadata(properties, torch.Size(chunk.shape), [])
                box = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                tensors.setdefault(chunk.name, whole).chunks.append(box)
                chunk_places[MetadataIndex(chunk.name, chunk.offsets)] = file, key
        return Metadata(dict(tensors), storage_data=chunk_places, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        """Store where each chunk is."""
        self._chunk_places: dict[MetadataIndex, tuple[TensorFileRecord, str]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan, one file after the other."""
        by_file: dict[str, list[ReadItem]] = {}
        known = {file.name: file for file in self.manifest.files}
        for item in plan.items:
            by_file.setdefault(self._chunk_places[item.storage_index][0].name, []).append(item)
        for name, items in by_file.items():
            tensors = self._verified(known[name])
            for item in items:
                _fill(item, tensors[self._chunk_places[item.storage_index][1]], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _verified(self, file: TensorFileRecord) -> Mapping[str, Tensor]:
        try:
            # A bytearray, because `torch.frombuffer` warns about memory that cannot be written to.
            data = bytearray(self.files.read(f"{self.name}/{file.name}"))
        except OSError as error:
            raise unusable_checkpoint_error(self.files, self.name, f"{file.name}: {error}") from error
        return self.decode(file, data)

    def decode(self, file: TensorFileRecord, data: bytearray | mmap) -> Mapping[str, Tensor]:
        """Return the chunks of a file, as views of its bytes.

        Raises:
            CheckpointError: it is damaged.
        """
        checksum = recompute_checksum(memoryview(data), file.checksum)
        if checksum != file.checksum:
            reason = f"{file.name} is damaged: its checksum is {checksum}, expected {file.checksum}"
            raise unusable_checkpoint_error(self.files, self.name, reason)
        try:
            tensors = decode_tensors(data)
            for chunk, key in zip(file.chunks, chunk_keys(file.chunks), strict=True):
                _check_tensor(chunk, tensors.get(key))
        except ValueError as error:
            raise unusable_checkpoint_error(self.files, self.name, f"{file.name}: {error}") from error
        return tensors

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return whether a name can be that of a checkpoint."""
        return bool(str(checkpoint_id))


def _check_tensor(chunk: TensorChunk, tensor: Tensor | None) -> None:
    """Raise if a tensor differs from what the manifest says."""
    if tensor is None or tensor.dtype != dtype_of_code(chunk.dtype) or tuple(tensor.shape) != chunk.sizes:
        raise ValueError(f"'{chunk.name[:80]}' is not what the manifest says")


def _fill(item: ReadItem, saved: Tensor, planner: LoadPlanner) -> None:
    box = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
    target = planner.resolve_tensor(item).detach()
    target.copy_(saved[box])
    planner.commit_tensor(item, target)


def load_checkpoint(files: StorageFolder, name: str, prefix: str | tuple[str, ...] = "") -> LoadedCheckpoint:
    """Read a checkpoint into new, whole tensors, on this rank alone.

    Args:
        files: the folder of the checkpoints.
        name: of the checkpoint.
        prefix: of the names of the tensors to read, or several; "model/" leaves out the moments.
    Raises:
        CheckpointError: it is missing, cut short, or damaged.
    """
    stored = open_checkpoint(files, name)
    wanted = {name: () for name in stored.shapes if name.startswith(prefix)}
    return LoadedCheckpoint(name, stored.manifest, stored.read(wanted))


def map_checkpoint(files: StorageFolder, name: str, prefix: str | tuple[str, ...] = "") -> LoadedCheckpoint:
    """Map the tensors of a checkpoint into memory, after the checksums of their files were compared.

    Pages are shared with other processes and are not a copy of the file. Tensors that were saved in several
    chunks, and those of a remote store, are read into new memory. Arguments and errors are those of
    `load_checkpoint`.
    """
    stored = open_checkpoint(files, name)
    reader, tensors = ManifestReader(files, name), dict[str, Tensor]()
    for file in stored.manifest.files:
        whole = {
            key: chunk.name
            for chunk, key in zip(file.chunks, chunk_keys(file.chunks), strict=True)
            if chunk.name.startswith(prefix) and chunk.sizes == chunk.shape
        }
        path = files.local_path(f"{name}/{file.name}")
        if not whole or path is None:
            continue
        try:
            mapped = MappedFile(path)
        except (OSError, ValueError) as error:
            raise unusable_checkpoint_error(files, name, f"{file.name}: {error}") from error
        views = reader.decode(file, mapped.data)
        tensors |= {tensor: views[key] for key, tensor in whole.items()}
    others = {tensor: () for tensor in stored.shapes if tensor.startswith(prefix) and tensor not in tensors}
    return LoadedCheckpoint(name, stored.manifest, {**tensors, **stored.read(others)} if others else tensors)


def open_checkpoint(files: StorageFolder, name: str) -> StoredCheckpoint:
    """Open a checkpoint to read parts of it.

    Raises:
        CheckpointError: there is no complete checkpoint of this name.
    """
    return StoredCheckpoint(files, name, open_manifest(files, name))


class _PieceLoadPlanner(DefaultLoadPlanner):
    """A planner that reads the boxes of one piece of each tensor.

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
        """Return the parts of the saved chunks that lie in the boxes."""
        assert self.metadata is not None
        known: dict[str, Any] = self.metadata.state_dict_metadata
        items = [
            item
            for name, boxes in self._boxes.items()
            for item in create_read_items_for_chunk_list(name, known[name], [*map(_chunk_metadata, boxes)])
        ]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor that takes a box."""
        return self._filled[MetadataIndex(index.fqn, index.offset)]


def _slot_of_part(name: str, shape: tuple[int, ...], index: SlotIndex) -> TensorSlot:
    whole = index or tuple(slice(None) for _ in shape)
    return TensorSlot(name, shape, tuple(span_of_index(i, n) for i, n in zip(whole, shape, strict=True)))


def _chunk_metadata(piece: TensorPiece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(span[0] for span in piece.slot.part), torch.Size(piece.slot.sizes))


def _load_pieces(tensors: dict[str, Tensor], pieces: Sequence[TensorPiece], reader: ManifestReader) -> None:
    try:
        load_with(tensors, storage_reader=reader, planner=_PieceLoadPlanner(pieces), no_dist=True)
    except CheckpointException as error:  # a BaseException that carries what was raised
        # DCP wraps what was raised; our own error names the file, so it is the better one.
        original = next((e for e, _ in error.failures.values() if isinstance(e, CheckpointError)), None)
        raise original or unusable_checkpoint_error(reader.files, reader.name, str(error)) from error
