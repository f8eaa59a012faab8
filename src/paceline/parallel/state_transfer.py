"""Make whole tensors of the pieces that the ranks of one replica hold; collective.

A whole state on its way from the ranks that hold pieces of it to those that go on from it, some at a time.

Beside what it held, a rank has what it goes on from, and the tensors that are just on their way.
"""

from __future__ import annotations

import copy
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
from paceline.parallel.tensor.module_swap import restore_module
from paceline.state.slot import SlotIndex, TensorPiece, TensorSlot, span_length
from paceline.state.train_state import TrainState

_SLICE_BYTES = 2**25
_PieceEntry = tuple[str, list[int], list[list[int]], str]  # name, whole shape, part, dtype


@dataclass(frozen=True)
class StateSnapshot:
    """A whole state: what one process would hold. Tensors may share memory with the model.

    Args:
        step: steps taken.
        whole: tensors by name.
        numbers: the rest, as JSON values.
    """

    step: int
    whole: Mapping[str, Tensor]
    numbers: Mapping[str, Any]

    def tensors(self) -> Mapping[str, Tensor]:
        """As `TrainState.load` takes them."""
        return self.whole

    def scalars(self) -> Mapping[str, Any]:
        """As `TrainState.load` takes them."""
        return self.numbers

    def copied(self) -> StateSnapshot:
        """The same in memory of its own."""
        return StateSnapshot(self.step, {n: t.detach().clone() for n, t in self.whole.items()}, self.numbers)


def take_snapshot(state: TrainState, mesh: Mesh, net: Net) -> StateSnapshot:
    """Gather the whole state; collective, equal on every rank."""
    pieces = state.pieces()
    apart = [piece for piece in pieces if "replica" in piece.slot.axes]
    whole = gather_whole([piece for piece in pieces if "replica" not in piece.slot.axes], mesh.inside, net)
    scalars = common_scalars(state, mesh, net)
    return StateSnapshot(state.step, whole | gather_whole(apart, mesh.world, net), scalars)


def common_scalars(state: TrainState, mesh: Mesh, net: Net) -> dict[str, Any]:
    """Everything that is not a tensor, of all ranks; collective, equal on every rank of a replica."""
    scalars = state.scalars()
    updating = mesh.world if _has_servers(state) else mesh.inside
    for text in all_gather_texts(json.dumps(scalars["optimizer"]), updating, net):
        scalars["optimizer"].update(json.loads(text))  # numbers of parameters that another rank updates
    return scalars


def _has_servers(state: TrainState) -> bool:
    """Whether several servers update other parts of a tensor each; equal on all ranks."""
    parts = (part for held in state.sharded_model.held.values() for part in held.parts)
    return any(part is not None and "replica" in part.axes for part in parts)


def share_snapshot(
    snapshot: StateSnapshot | None, group: RankGroup, net: Net, device: torch.device, source: int = 0
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The snapshot of the group's rank `source` on every rank, as tensors and scalars; collective.

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
    """Tensors of the group's rank `source` on every rank; collective.

    Args:
        entries: name, shape and type of each, equal on all ranks.
        mine: by name, on rank `source`.
    Wire: a broadcast for each dtype.
    """
    by_type: dict[str, list[tuple[str, Sequence[int]]]] = {}
    for name, shape, dtype in entries:
        by_type.setdefault(dtype, []).append((name, shape))
    found: dict[str, Tensor] = {}
    for dtype, alike in sorted(by_type.items()):
        sizes = [prod(shape) for _, shape in alike]
        if mine is None:
            kind = getattr(torch, dtype.removeprefix("torch."))
            flat = torch.zeros(sum(sizes), dtype=kind, device=device)
        else:
            flat = torch.cat([mine[name].detach().reshape(-1).to(device) for name, _ in alike])
        pieces = net.broadcast(flat, group, source).wait().split(sizes)
        found |= {name: piece.view(shape) for (name, shape), piece in zip(alike, pieces, strict=True)}
    return found


def gather_whole(pieces: Sequence[TensorPiece], group: RankGroup, net: Net) -> dict[str, Tensor]:
    """Whole tensors by name, equal on every rank of the group; what a rank holds whole is not copied.

    Args:
        pieces: of this rank; names may differ between ranks. Only those with split axes travel.
    Raises:
        CommunicationError: no rank of the group holds some part of a tensor.
    Wire: one all_gather of the table of contents, and one for each dtype.
    """
    found = {piece.slot.name: piece.tensor for piece in pieces if not piece.slot.axes}
    split = [piece for piece in pieces if piece.slot.axes]
    tables = [
        json.loads(text)
        for text in all_gather_texts(json.dumps([_piece_entry(p) for p in split]), group, net)
    ]
    _require_complete_tensors([entry for table in tables for entry in table], group)
    device = group_device(group)
    for dtype in sorted({entry[3] for table in tables for entry in table}):
        mine = [p.tensor.detach().reshape(-1) for p in split if str(p.tensor.dtype) == dtype]
        none = torch.zeros(0, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        flat = torch.cat([none, *(x.to(device) for x in mine)])  # some optimizers count on the host
        for table, values in zip(tables, net.all_gather(flat, group).wait(), strict=True):
            _write_pieces([entry for entry in table if entry[3] == dtype], values, found)
    return found


def gather_in_slices(
    pieces: Sequence[TensorPiece], group: RankGroup, net: Net
) -> Iterator[dict[str, Tensor]]:
    """Whole tensors as `gather_whole` makes them, some at a time; collective for every one that is taken.

    A slice is no larger than the largest tensor, or `_SLICE_BYTES` if that is more.
    """
    own = [(p.slot.name, prod(p.slot.shape) * p.tensor.element_size()) for p in pieces if p.slot.axes]
    tables = [json.loads(text) for text in all_gather_texts(json.dumps(own), group, net)]
    sizes = dict(sorted((name, size) for table in tables for name, size in table))
    yield {piece.slot.name: piece.tensor for piece in pieces if piece.slot.name not in sizes}
    for names in split_by_bytes(sizes, _SLICE_BYTES):
        yield gather_whole([piece for piece in pieces if piece.slot.name in names], group, net)


def split_by_bytes(sizes: Mapping[str, int], most: int) -> Iterator[set[str]]:
    """Names in turn, by their bytes: together at most `most`, and at least one name."""
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
    """Parts are equal or disjoint, so those that are there fill a tensor if their sizes add up to its own."""
    sizes: dict[str, dict[tuple[tuple[int, ...], ...], int]] = {}
    for name, _, part, _ in entries:
        sizes.setdefault(name, {})[tuple(map(tuple, part))] = prod(map(span_length, map(tuple, part)))
    for name, shape, *_ in entries:
        there, all_of_it = sum(sizes[name].values()), prod(shape)
        if there < all_of_it:
            raise CommunicationError(
                f"of '{name}', {all_of_it - there} of {all_of_it} values are on no rank of {group.name}",
                next_step="a rank that held them is gone: resume from the newest checkpoint",
            )


def _write_pieces(entries: Sequence[_PieceEntry], values: Tensor, found: dict[str, Tensor]) -> None:
    """Write one rank's parts into the whole tensors."""
    slots = [TensorSlot(name, tuple(shape), tuple(map(tuple, part))) for name, shape, part, _ in entries]
    for slot, piece in zip(slots, values.split([slot.numel for slot in slots]), strict=True):
        if slot.name not in found:
            found[slot.name] = values.new_zeros(slot.shape)
        found[slot.name][slot.index] = piece.view(slot.sizes)


_GATHER_MODULE = "paceline.parallel.zero"


def whole_model(model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """A copy of a model of which a rank holds a part, with whole tensors by `model/NAME` in it.

    The modules are those that the rank runs; what tensor shards and gathers have put into them is undone.
    """
    first = {id(value): (name, value) for name, value in reversed([*_named_tensors(model)])}
    filled = {
        key: _as_parameter_like(value, tensors[f"model/{name}"].to(device))
        for key, (name, value) in first.items()
        if f"model/{name}" in tensors
    }
    twin = copy.deepcopy(model, dict(filled))  # these are not copied: some have no memory at all
    for module in twin.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook.__module__ == _GATHER_MODULE]:
                del hooks[key]  # nothing is to be gathered for the use of whole tensors
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
    """How many bytes of so many travel at a time; a larger tensor is alone."""
    return max(_MIN_TRANSFER_BYTES, num_bytes // _MAX_TRANSFERS)


class _TensorEntry(NamedTuple):
    """A tensor.

    Args:
        held: whole, in parts by ranks inside a replica, or in parts by ranks of replicas that are apart.
    """

    shape: Sequence[int]
    dtype: str
    num_bytes: int
    held: str


class StateTransfer:
    """A state as rank 0 and those have it with whom it holds it: a `Source` for all; making it is collective.

    Pieces are not copied: they are those of the state as it is now, must stay until `read`, and are let go of
    as they travel.

    Args:
        state: of this rank, between two rounds.
    Wire: `read` takes, of n bytes of state, an all_gather of what ranks hold parts of, and a broadcast of n
        bytes to all ranks.
    """

    def __init__(self, state: TrainState, mesh: Mesh, net: Net) -> None:
        self._mesh, self._net, self._device = mesh, net, state.sharded_model.device
        self._pieces: dict[str, list[TensorPiece]] = {_WHOLE: [], _INSIDE_REPLICA: [], _ACROSS_REPLICAS: []}
        for piece in state.pieces():
            self._pieces[_spread_of(piece)].append(piece)
        mine, scalars = self._table(), common_scalars(state, mesh, net)
        said = json.dumps([mine, scalars]) if mesh.world.rank == 0 else ""
        entries, self.scalars = json.loads(broadcast_text(said, mesh.world, net, self._device))
        self._entries = {name: _TensorEntry(*entry) for name, entry in entries.items()}

    def _table(self) -> dict[str, _TensorEntry]:
        """Of all that this rank can have together with others; collective."""
        found: dict[str, _TensorEntry] = {}
        groups = {_INSIDE_REPLICA: self._mesh.inside, _ACROSS_REPLICAS: self._mesh.world}
        for held, pieces in self._pieces.items():
            own = json.dumps({piece.slot.name: _tensor_entry(piece, held) for piece in pieces})
            told = all_gather_texts(own, groups[held], self._net) if held in groups else [own]
            found |= {name: _TensorEntry(*entry) for text in told for name, entry in json.loads(text).items()}
        return dict(sorted(found.items()))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `Source`."""
        return {name: tuple(entry.shape) for name, entry in self._entries.items()}

    def read(self, wanted: Mapping[str, SlotIndex]) -> Mapping[str, Tensor]:
        """See `Source`; collective, once, on all ranks. What is read has memory of its own."""
        found: dict[str, Tensor] = {}
        sizes = {name: entry.num_bytes for name, entry in self._entries.items()}
        for names in split_by_bytes(sizes, bytes_per_transfer(sum(sizes.values()))):
            there = self._shared(names)
            found |= {name: there[name][wanted[name]].clone() for name in names if name in wanted}
            del there  # before there are others
            for held, pieces in self._pieces.items():
                self._pieces[held] = [piece for piece in pieces if piece.slot.name not in names]
        return found

    def _shared(self, names: set[str]) -> dict[str, Tensor]:
        """Some tensors, whole, as rank 0 has them."""
        there, world = self._gathered(names), self._mesh.world
        mine = there if world.rank == 0 else None
        del there
        entries = [(name, one.shape, one.dtype) for name, one in self._entries.items() if name in names]
        return share_tensors(entries, mine, world, self._net, self._device)

    def _gathered(self, names: set[str]) -> dict[str, Tensor]:
        """The same on rank 0; other ranks have a part in that."""
        held = {self._entries[name].held for name in names}
        pieces = {how: [p for p in own if p.slot.name in names] for how, own in self._pieces.items()}
        found = {piece.slot.name: piece.tensor for piece in pieces[_WHOLE]}
        if _INSIDE_REPLICA in held and self._mesh.world.ranks[0] in self._mesh.inside.ranks:
            found |= gather_whole(pieces[_INSIDE_REPLICA], self._mesh.inside, self._net)
        if _ACROSS_REPLICAS in held:
            found |= gather_whole(pieces[_ACROSS_REPLICAS], self._mesh.world, self._net)
        return found


def _spread_of(piece: TensorPiece) -> str:
    axes = piece.slot.axes
    return _ACROSS_REPLICAS if "replica" in axes else _INSIDE_REPLICA if axes else _WHOLE


def _tensor_entry(piece: TensorPiece, held: str) -> _TensorEntry:
    shape, x = piece.slot.shape, piece.tensor
    return _TensorEntry(shape, str(x.dtype), prod(shape) * x.element_size(), held)
