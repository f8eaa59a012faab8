"""Transfer of the training state: gather whole tensors, broadcast them, or move them to another layout.

`gather_whole` makes whole tensors of the pieces that the ranks of one replica hold. `StateTransfer` moves a
whole state from the ranks that hold pieces of it to ranks with another placement, some tensors at a time:
besides what it held before, a rank holds what it continues with and the tensors in flight. Everything here
is collective and exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.group_collectives import all_gather_texts, broadcast_text
from paceline.comm.net import Net, group_device
from paceline.errors import CommunicationError
from paceline.job.mesh import Mesh, RankGroup
from paceline.models.module_copy import deep_copy
from paceline.parallel.tensor.module_swap import restore_module
from paceline.state.slot import SlotIndex, TensorPiece, TensorSlot, span_length
from paceline.state.train_state import TrainState

_SLICE_BYTES = 2**25
# name, shape of the whole, part, dtype
_PieceEntry = tuple[str, list[int], list[list[int]], str]


@dataclass(frozen=True)
class StateSnapshot:
    """Whole state, as one process would hold it. Tensors may share memory with the model.

    Args:
        step: number of steps taken.
        whole: tensors by name.
        numbers: the rest, as JSON values.
    """

    step: int
    whole: Mapping[str, Tensor]
    numbers: Mapping[str, Any]

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors as `TrainState.load` expects them."""
        return self.whole

    def scalars(self) -> Mapping[str, Any]:
        """Return the other values as `TrainState.load` expects them."""
        return self.numbers

    def copied(self) -> StateSnapshot:
        """Return a snapshot with memory of its own."""
        return StateSnapshot(self.step, {n: t.detach().clone() for n, t in self.whole.items()}, self.numbers)


def take_snapshot(state: TrainState, mesh: Mesh, net: Net) -> StateSnapshot:
    """Gather the whole state; collective, equal on every rank."""
    whole = gather_over_mesh(state.pieces(), mesh, net)
    return StateSnapshot(state.step, whole, common_scalars(state, mesh, net))


def gather_over_mesh(pieces: Sequence[TensorPiece], mesh: Mesh, net: Net) -> dict[str, Tensor]:
    """Return whole tensors by name, equal on every rank; see `gather_whole`."""
    # Servers hold parts of a tensor on several replicas, so these are gathered over all ranks.
    split_over_replicas = [piece for piece in pieces if "replica" in piece.slot.axes]
    inside = [piece for piece in pieces if "replica" not in piece.slot.axes]
    return gather_whole(inside, mesh.inside, net) | gather_whole(split_over_replicas, mesh.world, net)


def common_scalars(state: TrainState, mesh: Mesh, net: Net) -> dict[str, Any]:
    """Return the whole state except for tensors, merged over ranks; collective, equal in a replica."""
    scalars = state.scalars()
    updating = mesh.world if state.sharded_model.is_on_servers else mesh.inside
    for text in all_gather_texts(json.dumps(scalars["optimizer"]), updating, net):
        # Each rank has the step counts of the parameters that it updates.
        scalars["optimizer"].update(json.loads(text))
    return scalars


def share_snapshot(
    snapshot: StateSnapshot | None, group: RankGroup, net: Net, device: torch.device, source: int = 0
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Broadcast the snapshot of the group's rank `source` as tensors and scalars; collective.

    Wire: two small broadcasts, and one for each dtype.
    """
    mine = snapshot if group.rank == source else None
    contents = None
    if mine is not None:
        entries = [(name, list(t.shape), str(t.dtype)) for name, t in mine.tensors().items()]
        contents = json.dumps([entries, mine.scalars()])
    entries, scalars = json.loads(broadcast_text(contents or "", group, net, device, source))
    tensors = None if mine is None else mine.tensors()
    return share_tensors(entries, tensors, group, net, device, source), scalars


def share_tensors(
    entries: Iterable[tuple[str, Sequence[int], str]],
    mine: Mapping[str, Tensor] | None,
    group: RankGroup,
    net: Net,
    device: torch.device,
    source: int = 0,
) -> dict[str, Tensor]:
    """Broadcast tensors of the group's rank `source`; collective.

    Args:
        entries: name, shape and dtype of each, equal on all ranks.
        mine: the tensors by name, on rank `source` only.
    Wire: one broadcast for each dtype.
    """
    by_type: dict[str, list[tuple[str, Sequence[int]]]] = {}
    for name, shape, dtype in entries:
        by_type.setdefault(dtype, []).append((name, shape))
    tensors: dict[str, Tensor] = {}
    for dtype, entries_of_dtype in sorted(by_type.items()):
        sizes = [prod(shape) for _, shape in entries_of_dtype]
        if mine is None:
            kind = getattr(torch, dtype.removeprefix("torch."))
            flat = torch.zeros(sum(sizes), dtype=kind, device=device)
        else:
            flat = torch.cat([mine[name].detach().reshape(-1).to(device) for name, _ in entries_of_dtype])
        pieces = net.broadcast(flat, group, source).wait().split(sizes)
        tensors |= {
            name: piece.view(shape) for (name, shape), piece in zip(entries_of_dtype, pieces, strict=True)
        }
    return tensors


def gather_whole(pieces: Sequence[TensorPiece], group: RankGroup, net: Net) -> dict[str, Tensor]:
    """Return whole tensors by name, equal on every rank of the group; what a rank holds whole is not copied.

    Args:
        pieces: of this rank; names may differ between ranks. Only pieces of split tensors are sent.
    Raises:
        CommunicationError: no rank of the group holds some part of a tensor.
    Wire: one all_gather of the table of contents, and one for each dtype.
    """
    tensors = {piece.slot.name: piece.tensor for piece in pieces if not piece.slot.axes}
    split = [piece for piece in pieces if piece.slot.axes]
    tables = [
        json.loads(text)
        for text in all_gather_texts(json.dumps([_piece_entry(p) for p in split]), group, net)
    ]
    _require_complete_tensors([entry for table in tables for entry in table], group)
    device = group_device(group)
    for dtype in sorted({entry[3] for table in tables for entry in table}):
        mine = [p.tensor.detach().reshape(-1) for p in split if str(p.tensor.dtype) == dtype]
        empty = torch.zeros(0, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        # Some optimizers keep counts on the host.
        flat = torch.cat([empty, *(x.to(device) for x in mine)])
        for table, values in zip(tables, net.all_gather(flat, group).wait(), strict=True):
            _write_pieces([entry for entry in table if entry[3] == dtype], values, tensors)
    return tensors


def gather_in_slices(
    pieces: Sequence[TensorPiece], group: RankGroup, net: Net
) -> Iterator[dict[str, Tensor]]:
    """Yield whole tensors as `gather_whole` returns them, some at a time; every step is collective.

    A slice is no larger than the largest tensor, or `_SLICE_BYTES` if that is more.
    """
    local_sizes = [(p.slot.name, prod(p.slot.shape) * p.tensor.element_size()) for p in pieces if p.slot.axes]
    tables = [json.loads(text) for text in all_gather_texts(json.dumps(local_sizes), group, net)]
    # Sorted, since the slices must be equal on all ranks.
    sizes = dict(sorted((name, size) for table in tables for name, size in table))
    yield {piece.slot.name: piece.tensor for piece in pieces if piece.slot.name not in sizes}
    for names in split_by_bytes(sizes, _SLICE_BYTES):
        yield gather_whole([piece for piece in pieces if piece.slot.name in names], group, net)


def split_by_bytes(sizes: Mapping[str, int], most: int) -> Iterator[set[str]]:
    """Yield sets of names, in order, that have at most `most` bytes together or are a single name."""
    names, total = set[str](), 0
    for name, size in sizes.items():
        if names and total + size > most:
            yield names
            names, total = set(), 0
        names.add(name)
        total += size
    if names:
        yield names


def _piece_entry(piece: TensorPiece) -> _PieceEntry:
    slot = piece.slot
    return slot.name, list(slot.shape), [list(span) for span in slot.part], str(piece.tensor.dtype)


def _require_complete_tensors(entries: Sequence[_PieceEntry], group: RankGroup) -> None:
    """Raise CommunicationError if the pieces of all ranks do not fill a tensor."""
    sizes: dict[str, dict[tuple[tuple[int, ...], ...], int]] = {}
    # Parts are equal or disjoint, so they fill a tensor if the sizes of different parts add up to its own.
    for name, _, box, _ in entries:
        sizes.setdefault(name, {})[tuple(map(tuple, box))] = prod(map(span_length, map(tuple, box)))
    for name, shape, *_ in entries:
        num_values, total = sum(sizes[name].values()), prod(shape)
        if num_values < total:
            raise CommunicationError(
                f"{total - num_values} of {total} values of '{name}' are on no rank of {group.name}",
                next_step="a rank that held them was lost: resume from the newest checkpoint",
            )


def _write_pieces(entries: Sequence[_PieceEntry], values: Tensor, tensors: dict[str, Tensor]) -> None:
    """Write the pieces of one rank into the whole tensors."""
    slots = [TensorSlot(name, tuple(shape), tuple(map(tuple, box))) for name, shape, box, _ in entries]
    for slot, piece in zip(slots, values.split([slot.numel for slot in slots]), strict=True):
        if slot.name not in tensors:
            tensors[slot.name] = values.new_zeros(slot.shape)
        tensors[slot.name][slot.index] = piece.view(slot.sizes)


_GATHER_MODULE = "paceline.parallel.zero"


def whole_model(model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Return a copy of a partitioned model with whole tensors in it.

    The modules are those that the rank runs; changes of tensor parallelism and hooks of gathers are undone.

    Args:
        tensors: whole tensors by `model/NAME`.
    """
    # Reversed, so that the first name of a tied tensor remains.
    first = {id(value): (name, value) for name, value in reversed([*_named_tensors(model)])}
    filled = {
        key: _as_parameter_like(value, tensors[f"model/{name}"].to(device))
        for key, (name, value) in first.items()
        if f"model/{name}" in tensors
    }
    # The memo keeps tensors from being copied: some of them have no memory at all.
    twin = deep_copy(model, filled)
    for module in twin.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook.__module__ == _GATHER_MODULE]:
                # Whole tensors need no gather.
                del hooks[key]
        restore_module(module)
    return twin


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _as_parameter_like(value: Tensor, whole: Tensor) -> Tensor:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(whole.detach().clone(), value.requires_grad)
    return whole.clone()


_MAX_TRANSFERS, _MIN_TRANSFER_BYTES = 256, 2**20
_WHOLE, _INSIDE_REPLICA, _ACROSS_REPLICAS = "whole", "inside", "apart"


def bytes_per_transfer(num_bytes: int) -> int:
    """Return how many bytes of a state travel at a time; a larger tensor travels alone."""
    return max(_MIN_TRANSFER_BYTES, num_bytes // _MAX_TRANSFERS)


class _TensorEntry(NamedTuple):
    """Entry of the table of contents of a state.

    Args:
        held: whole, in parts on ranks of one replica, or in parts on ranks of several replicas.
    """

    shape: Sequence[int]
    dtype: str
    num_bytes: int
    held: str


class StateTransfer:
    """State of rank 0's replica as a `Source` for all ranks; constructing it is collective.

    Pieces are not copied: they are those of the present state, must stay until `read`, and are freed as they
    travel.

    Args:
        state: of this rank, between two rounds.
    Wire: for n bytes of state, `read` takes an all_gather of the tensors that are split, and a broadcast of
        n bytes to all ranks.
    """

    def __init__(self, state: TrainState, mesh: Mesh, net: Net) -> None:
        self._mesh, self._net, self._device = mesh, net, state.sharded_model.device
        self._pieces: dict[str, list[TensorPiece]] = {_WHOLE: [], _INSIDE_REPLICA: [], _ACROSS_REPLICAS: []}
        for piece in state.pieces():
            self._pieces[_spread_of(piece)].append(piece)
        table, scalars = self._table(), common_scalars(state, mesh, net)
        text = json.dumps([table, scalars]) if mesh.world.rank == 0 else ""
        entries, self.scalars = json.loads(broadcast_text(text, mesh.world, net, self._device))
        self._entries = {name: _TensorEntry(*entry) for name, entry in entries.items()}

    def _table(self) -> dict[str, _TensorEntry]:
        """Return the entries of all tensors that this rank can gather with others; collective."""
        entries_by_name: dict[str, _TensorEntry] = {}
        groups = {_INSIDE_REPLICA: self._mesh.inside, _ACROSS_REPLICAS: self._mesh.world}
        for spread, pieces in self._pieces.items():
            text = json.dumps({piece.slot.name: _tensor_entry(piece, spread) for piece in pieces})
            texts = all_gather_texts(text, groups[spread], self._net) if spread in groups else [text]
            entries_by_name |= {
                name: _TensorEntry(*entry)
                for entry_text in texts
                for name, entry in json.loads(entry_text).items()
            }
        return dict(sorted(entries_by_name.items()))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(entry.shape) for name, entry in self._entries.items()}

    def read(self, wanted: Mapping[str, SlotIndex]) -> Mapping[str, Tensor]:
        """Return parts of tensors in memory of their own; collective, once, on all ranks."""
        parts: dict[str, Tensor] = {}
        sizes = {name: entry.num_bytes for name, entry in self._entries.items()}
        for names in split_by_bytes(sizes, bytes_per_transfer(sum(sizes.values()))):
            whole = self._shared(names)
            parts |= {name: whole[name][wanted[name]].clone() for name in names if name in wanted}
            # Freed before the next tensors arrive.
            del whole
            for spread, pieces in self._pieces.items():
                self._pieces[spread] = [piece for piece in pieces if piece.slot.name not in names]
        return parts

    def _shared(self, names: set[str]) -> dict[str, Tensor]:
        """Return some whole tensors, as rank 0 has them."""
        whole, world = self._gathered(names), self._mesh.world
        mine = whole if world.rank == 0 else None
        # Only rank 0 needs them: the others free them before the broadcast.
        del whole
        entries = [(name, entry.shape, entry.dtype) for name, entry in self._entries.items() if name in names]
        return share_tensors(entries, mine, world, self._net, self._device)

    def _gathered(self, names: set[str]) -> dict[str, Tensor]:
        """Gather some whole tensors on rank 0; other ranks take part."""
        spreads = {self._entries[name].held for name in names}
        pieces = {
            spread: [p for p in local_pieces if p.slot.name in names]
            for spread, local_pieces in self._pieces.items()
        }
        tensors = {piece.slot.name: piece.tensor for piece in pieces[_WHOLE]}
        # Replicas hold equal values, so only that of rank 0 gathers.
        if _INSIDE_REPLICA in spreads and self._mesh.world.ranks[0] in self._mesh.inside.ranks:
            tensors |= gather_whole(pieces[_INSIDE_REPLICA], self._mesh.inside, self._net)
        if _ACROSS_REPLICAS in spreads:
            tensors |= gather_whole(pieces[_ACROSS_REPLICAS], self._mesh.world, self._net)
        return tensors


def _spread_of(piece: TensorPiece) -> str:
    axes = piece.slot.axes
    return _ACROSS_REPLICAS if "replica" in axes else _INSIDE_REPLICA if axes else _WHOLE


def _tensor_entry(piece: TensorPiece, held: str) -> _TensorEntry:
    shape, x = piece.slot.shape, piece.tensor
    return _TensorEntry(shape, str(x.dtype), prod(shape) * x.element_size(), held)
