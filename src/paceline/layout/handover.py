"""A whole state on its way from the ranks that hold pieces of it to those that go on from it, some at a time.

Beside what it held, a rank has what it goes on from, and the tensors that are just on their way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from paceline.comm import Net
from paceline.comm.text import gather_texts, share_text
from paceline.layout.whole import common_scalars, gather_whole, share_tensors, slices
from paceline.mesh import Mesh
from paceline.slot import Index, Piece
from paceline.state import TrainState

_MOST_TURNS, _FEWEST_BYTES = 256, 2**20
_WHOLE, _INSIDE, _APART = "whole", "inside", "apart"


def together(num_bytes: int) -> int:
    """How many bytes of so many travel at a time; a larger tensor is alone."""
    return max(_FEWEST_BYTES, num_bytes // _MOST_TURNS)


class _Entry(NamedTuple):
    """A tensor.

    Args:
        held: whole, in parts by ranks inside a replica, or in parts by ranks of replicas that are apart.
    """

    shape: Sequence[int]
    dtype: str
    num_bytes: int
    held: str


class Handover:
    """A state as rank 0 and those have it with whom it holds it: a `Source` for all; making it is collective.

    Pieces are not copied: they are those of the state as it is now, must stay until `read`, and are let go of
    as they travel.

    Args:
        state: of this rank, between two rounds.
    Wire: `read` takes, of n bytes of state, an all_gather of what ranks hold parts of, and a broadcast of n
        bytes to all ranks.
    """

    def __init__(self, state: TrainState, mesh: Mesh, net: Net) -> None:
        self._mesh, self._net, self._device = mesh, net, state.holding.device
        self._pieces: dict[str, list[Piece]] = {_WHOLE: [], _INSIDE: [], _APART: []}
        for piece in state.pieces():
            self._pieces[_held(piece)].append(piece)
        mine, scalars = self._table(), common_scalars(state, mesh, net)
        said = json.dumps([mine, scalars]) if mesh.world.rank == 0 else ""
        entries, self.scalars = json.loads(share_text(said, mesh.world, net, self._device))
        self._entries = {name: _Entry(*entry) for name, entry in entries.items()}

    def _table(self) -> dict[str, _Entry]:
        """Of all that this rank can have together with others; collective."""
        found: dict[str, _Entry] = {}
        groups = {_INSIDE: self._mesh.inside, _APART: self._mesh.world}
        for held, pieces in self._pieces.items():
            own = json.dumps({piece.slot.name: _entry(piece, held) for piece in pieces})
            told = gather_texts(own, groups[held], self._net) if held in groups else [own]
            found |= {name: _Entry(*entry) for text in told for name, entry in json.loads(text).items()}
        return dict(sorted(found.items()))

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `Source`."""
        return {name: tuple(entry.shape) for name, entry in self._entries.items()}

    def read(self, wanted: Mapping[str, Index]) -> Mapping[str, Tensor]:
        """See `Source`; collective, once, on all ranks. What is read has memory of its own."""
        found: dict[str, Tensor] = {}
        sizes = {name: entry.num_bytes for name, entry in self._entries.items()}
        for names in slices(sizes, together(sum(sizes.values()))):
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
        if _INSIDE in held and self._mesh.world.ranks[0] in self._mesh.inside.ranks:
            found |= gather_whole(pieces[_INSIDE], self._mesh.inside, self._net)
        if _APART in held:
            found |= gather_whole(pieces[_APART], self._mesh.world, self._net)
        return found


def _held(piece: Piece) -> str:
    axes = piece.slot.axes
    return _APART if "replica" in axes else _INSIDE if axes else _WHOLE


def _entry(piece: Piece, held: str) -> _Entry:
    shape, x = piece.slot.shape, piece.tensor
    return _Entry(shape, str(x.dtype), prod(shape) * x.element_size(), held)
