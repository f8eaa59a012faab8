"""Make whole tensors of the pieces that the ranks of one replica hold; collective."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import Net
from paceline.comm.net import device_of
from paceline.comm.text import gather_texts, share_text
from paceline.errors import CommunicationError
from paceline.layout.tensor.become import make_whole
from paceline.mesh import Group, Mesh
from paceline.slot import Piece, Slot
from paceline.spans import length_of
from paceline.state import TrainState

_SLICE_BYTES = 2**25
_Entry = tuple[str, list[int], list[list[int]], str]  # name, whole shape, part, dtype


@dataclass(frozen=True)
class Snapshot:
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

    def copied(self) -> Snapshot:
        """The same in memory of its own."""
        return Snapshot(self.step, {n: t.detach().clone() for n, t in self.whole.items()}, self.numbers)


def take_snapshot(state: TrainState, mesh: Mesh, net: Net) -> Snapshot:
    """Gather the whole state; collective, equal on every rank."""
    pieces = state.pieces()
    apart = [piece for piece in pieces if "replica" in piece.slot.axes]
    whole = gather_whole([piece for piece in pieces if "replica" not in piece.slot.axes], mesh.inside, net)
    scalars = common_scalars(state, mesh, net)
    return Snapshot(state.step, whole | gather_whole(apart, mesh.world, net), scalars)


def common_scalars(state: TrainState, mesh: Mesh, net: Net) -> dict[str, Any]:
    """Everything that is not a tensor, of all ranks; collective, equal on every rank of a replica."""
    scalars = state.scalars()
    updating = mesh.world if _has_servers(state) else mesh.inside
    for text in gather_texts(json.dumps(scalars["optimizer"]), updating, net):
        scalars["optimizer"].update(json.loads(text))  # numbers of parameters that another rank updates
    return scalars


def _has_servers(state: TrainState) -> bool:
    """Whether several servers update other parts of a tensor each; equal on all ranks."""
    parts = (part for held in state.holding.held.values() for part in held.parts)
    return any(part is not None and "replica" in part.axes for part in parts)


def share_snapshot(
    snapshot: Snapshot | None, group: Group, net: Net, device: torch.device, source: int = 0
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The snapshot of the group's rank `source` on every rank, as tensors and scalars; collective.

    Wire: two small broadcasts, and one for each dtype.
    """
    mine = snapshot if group.rank == source else None
    contents = None
    if mine is not None:
        entries = [(name, list(t.shape), str(t.dtype)) for name, t in mine.tensors().items()]
        contents = json.dumps([entries, mine.scalars()])
    entries, scalars = json.loads(share_text(contents or "", group, net, device, source))
    tensors = None if mine is None else mine.tensors()
    return share_tensors(entries, tensors, group, net, device, source), scalars


def share_tensors(
    entries: Iterable[tuple[str, Sequence[int], str]],
    mine: Mapping[str, Tensor] | None,
    group: Group,
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


def gather_whole(pieces: Sequence[Piece], group: Group, net: Net) -> dict[str, Tensor]:
    """Whole tensors by name, equal on every rank of the group; what a rank holds whole is not copied.

    Args:
        pieces: of this rank; names may differ between ranks. Only those with split axes travel.
    Raises:
        CommunicationError: no rank of the group holds some part of a tensor.
    Wire: one all_gather of the table of contents, and one for each dtype.
    """
    found = {piece.slot.name: piece.tensor for piece in pieces if not piece.slot.axes}
    split = [piece for piece in pieces if piece.slot.axes]
    tables = [json.loads(text) for text in gather_texts(json.dumps([_entry(p) for p in split]), group, net)]
    _require_all([entry for table in tables for entry in table], group)
    device = device_of(group)
    for dtype in sorted({entry[3] for table in tables for entry in table}):
        mine = [p.tensor.detach().reshape(-1) for p in split if str(p.tensor.dtype) == dtype]
        none = torch.zeros(0, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        flat = torch.cat([none, *(x.to(device) for x in mine)])  # some optimizers count on the host
        for table, values in zip(tables, net.all_gather(flat, group).wait(), strict=True):
            _place([entry for entry in table if entry[3] == dtype], values, found)
    return found


def gather_in_slices(pieces: Sequence[Piece], group: Group, net: Net) -> Iterator[dict[str, Tensor]]:
    """Whole tensors as `gather_whole` makes them, some at a time; collective for every one that is taken.

    A slice is no larger than the largest tensor, or `_SLICE_BYTES` if that is more.
    """
    own = [(p.slot.name, prod(p.slot.shape) * p.tensor.element_size()) for p in pieces if p.slot.axes]
    tables = [json.loads(text) for text in gather_texts(json.dumps(own), group, net)]
    sizes = dict(sorted((name, size) for table in tables for name, size in table))
    yield {piece.slot.name: piece.tensor for piece in pieces if piece.slot.name not in sizes}
    for names in slices(sizes, _SLICE_BYTES):
        yield gather_whole([piece for piece in pieces if piece.slot.name in names], group, net)


def slices(sizes: Mapping[str, int], most: int) -> Iterator[set[str]]:
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


def _entry(piece: Piece) -> _Entry:
    slot = piece.slot
    return slot.name, list(slot.shape), [list(span) for span in slot.part], str(piece.tensor.dtype)


def _require_all(entries: Sequence[_Entry], group: Group) -> None:
    """Parts are equal or disjoint, so those that are there fill a tensor if their sizes add up to its own."""
    sizes: dict[str, dict[tuple[tuple[int, ...], ...], int]] = {}
    for name, _, part, _ in entries:
        sizes.setdefault(name, {})[tuple(map(tuple, part))] = prod(map(length_of, map(tuple, part)))
    for name, shape, *_ in entries:
        there, all_of_it = sum(sizes[name].values()), prod(shape)
        if there < all_of_it:
            raise CommunicationError(
                f"of '{name}', {all_of_it - there} of {all_of_it} values are on no rank of {group.name}",
                next_step="a rank that held them is gone: resume from the newest checkpoint",
            )


def _place(entries: Sequence[_Entry], values: Tensor, found: dict[str, Tensor]) -> None:
    """Write one rank's parts into the whole tensors."""
    slots = [Slot(name, tuple(shape), tuple(map(tuple, part))) for name, shape, part, _ in entries]
    for slot, piece in zip(slots, values.split([slot.numel for slot in slots]), strict=True):
        if slot.name not in found:
            found[slot.name] = values.new_zeros(slot.shape)
        found[slot.name][slot.index] = piece.view(slot.sizes)


_GATHERS = "paceline.layout.shard.on_use"


def whole_model(model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """A copy of a model of which a rank holds a part, with whole tensors by `model/NAME` in it.

    The modules are those that the rank runs; what tensor shards and gathers have put into them is undone.
    """
    first = {id(value): (name, value) for name, value in reversed([*_named(model)])}
    filled = {
        key: _like(value, tensors[f"model/{name}"].to(device))
        for key, (name, value) in first.items()
        if f"model/{name}" in tensors
    }
    twin = copy.deepcopy(model, dict(filled))  # these are not copied: some have no memory at all
    for module in twin.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook.__module__ == _GATHERS]:
                del hooks[key]  # nothing is to be gathered for the use of whole tensors
        make_whole(module)
    return twin


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _like(value: Tensor, whole: Tensor) -> Tensor:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(whole.detach().clone(), value.requires_grad)
    return whole.clone()
