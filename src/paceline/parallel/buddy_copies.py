"""Copies of the state in memory: each rank has those of its own part and of its neighbour's.

Before every step a rank copies the part of the state that only it holds (its optimizer state and the
parameters that it updates) into one buffer of host memory, and sends it to the next rank. When a rank is
lost, its neighbour has what it held, so the remaining ranks make whole tensors of their copies without
reading from disk.

Invariant: every rank has complete copies of one step that all of them have. A rank overwrites its copies of
step s - 2 with those of step s, and only after the collectives of step s - 1, in which every rank has taken
part after its own copies of step s - 1 were complete. So copies of two steps are enough, wherever ranks were
interrupted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.routes.host_links import connect_single_host_group
from paceline.comm.routes.host_messages import HostMessenger
from paceline.job.mesh import RankGroup
from paceline.state.slot import TensorPiece, TensorSlot
from paceline.state.train_state import TrainState

_TAG = 1 << 29  # far from those of routes, which count upwards from 1
_ALIGNMENT = 64


@dataclass(frozen=True)
class StateCopy:
    """A copy of the part of the state that one rank holds.

    Args:
        step: number of steps taken.
        scalars: what `TrainState.scalars` returned.
        pieces: tensors that not all ranks hold; they are views of the buffer.
    """

    step: int
    scalars: Mapping[str, Any]
    pieces: Sequence[TensorPiece]


def divided_pieces(state: TrainState) -> tuple[list[TensorPiece], list[TensorPiece]]:
    """Return the pieces that this rank holds or updates and others do not, and those that are on all ranks.

    Of a parameter that is whole on every rank, as under zero=1, the first have the part that it updates.
    """
    sharded_model = state.sharded_model
    updated = [TensorPiece(slot, p.detach()).under("model") for slot, p in sharded_model.updates.items()]
    placed = {f"model/{name}" for name in sharded_model.held}
    pieces = updated + [piece for piece in state.pieces() if piece.slot.name not in placed]
    divided = [piece for piece in pieces if piece.slot.axes]
    return divided, [piece for piece in pieces if not piece.slot.axes]


def write_copy(state: TrainState, pieces: Sequence[TensorPiece], buffer: Tensor | None) -> Tensor:
    """Return a buffer with a copy of some pieces, and of all values that are no tensors.

    Args:
        buffer: uint8 [bytes], of an earlier copy, which is used again if its size fits.
    """
    entries, offset = [], 0
    for piece in pieces:
        slot, num_bytes = piece.slot, piece.tensor.numel() * piece.tensor.element_size()
        part = [list(span) for span in slot.part]
        dtype = str(piece.tensor.dtype).removeprefix("torch.")
        entries.append([slot.name, list(slot.shape), part, sorted(slot.axes), dtype, offset])
        offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    contents = json.dumps({"step": state.step, "scalars": state.scalars(), "entries": entries}).encode()
    begin = -(-(8 + len(contents)) // _ALIGNMENT) * _ALIGNMENT
    if buffer is None or buffer.numel() != begin + offset:
        buffer = torch.empty(begin + offset, dtype=torch.uint8)
    header = len(contents).to_bytes(8, "little") + contents
    buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for entry, piece in zip(entries, pieces, strict=True):
        _view(buffer, begin, entry).copy_(piece.tensor)
    return buffer


def read_copy(buffer: Tensor) -> StateCopy:
    """Return the copy in a buffer that `write_copy` has returned; nothing is copied."""
    length = int.from_bytes(buffer[:8].numpy().tobytes(), "little")
    contents = json.loads(buffer[8 : 8 + length].numpy().tobytes())
    begin = -(-(8 + length) // _ALIGNMENT) * _ALIGNMENT
    pieces = [
        TensorPiece(
            TensorSlot(entry[0], tuple(entry[1]), tuple(map(tuple, entry[2])), frozenset(entry[3])),
            _view(buffer, begin, entry),
        )
        for entry in contents["entries"]
    ]
    return StateCopy(contents["step"], contents["scalars"], pieces)


def _view(buffer: Tensor, begin: int, entry: Sequence[Any]) -> Tensor:
    """Return the memory of one entry in a buffer, in the shape of its part."""
    _, _, part, _, name, offset = entry
    dtype: torch.dtype = getattr(torch, name)
    sizes = [sum(span[1::2]) - sum(span[::2]) for span in part]
    num_bytes = prod(sizes) * dtype.itemsize
    return buffer[begin + offset : begin + offset + num_bytes].view(dtype).view(sizes)


@dataclass
class _Generation:
    """The copies of one step: this rank's part, its neighbour's, and what all ranks hold."""

    step: int
    own: Tensor
    neighbour: Tensor
    common: Sequence[TensorPiece]


class BuddyCopies:
    """The copies of one rank, renewed before every step.

    Args:
        group: all ranks of the job; each sends its copy to the next one.
        members: the numbers of their processes, by rank.
        net: this rank's collectives.
        messenger: for messages in the memory of the host, if all ranks are on one; `close` closes it.
    Attributes:
        num_updates, seconds, num_bytes: how often the copies were renewed, the time of all renewals, and the
            bytes of a copy.
    Wire: one message of the bytes of this rank's part, and one of 8 bytes, for each step; in the memory of a
        host only the first.
    """

    def __init__(
        self, group: RankGroup, members: Sequence[int], net: Net, messenger: HostMessenger | None = None
    ) -> None:
        self._group, self._members, self._net = group, tuple(members), net
        self._messenger = messenger
        self._generations: list[_Generation] = []
        self.num_updates, self.seconds, self.num_bytes = 0, 0.0, 0

    @property
    def steps(self) -> list[int]:
        """The steps of which this rank has complete copies."""
        return [one.step for one in self._generations]

    def update(self, state: TrainState) -> None:
        """Copy the present state, unless there is a copy of its step; collective, between two steps.

        Raises:
            CommunicationError: a neighbour is gone; the earlier copies are still whole.
        """
        if state.step in self.steps:
            return
        began = time.perf_counter()
        oldest = self._generations.pop(0) if len(self._generations) > 1 else None
        divided, common = divided_pieces(state)
        own = write_copy(state, divided, None if oldest is None else oldest.own)
        neighbour = self._exchange(own, None if oldest is None else oldest.neighbour)
        kept = _copy_pieces(common, () if oldest is None else oldest.common)
        self._generations.append(_Generation(state.step, own, neighbour, kept))
        self.num_updates, self.num_bytes = self.num_updates + 1, own.numel()
        self.seconds += time.perf_counter() - began

    def contribution(self, step: int, present: Collection[int]) -> tuple[list[StateCopy], list[TensorPiece]]:
        """Return what this rank has of the state of a step: copies of parts, and tensors that all ranks have.

        Args:
            present: numbers of the processes that continue; of the others their neighbours have the parts.
        """
        (found,) = (one for one in self._generations if one.step == step)
        copies = [read_copy(found.own)]
        if self._members[self._source] not in present:
            copies.append(read_copy(found.neighbour))
        return copies, list(found.common)

    def cost(self) -> dict[str, int | float]:
        """Return the bytes of this rank's copies and message, and the seconds that they take in each step."""
        num_bytes = sum(one.own.numel() + one.neighbour.numel() for one in self._generations)
        num_bytes += self.num_bytes if self._messenger is not None else 0
        return {"bytes": num_bytes, "seconds_per_step": self.seconds / max(1, self.num_updates)}

    @property
    def _source(self) -> int:
        """The rank of the group whose part this rank keeps."""
        return (self._group.rank - 1) % self._group.size

    def _exchange(self, own: Tensor, buffer: Tensor | None) -> Tensor:
        """Send this rank's copy to the next rank, and return that of the one before."""
        if self._group.size == 1:
            return own.new_empty(0)
        if self._messenger is not None:
            return self._exchange_in_memory(self._messenger, own, buffer)
        arriving = torch.zeros(1, dtype=torch.int64)
        self._pass_on(torch.tensor([own.numel()]), arriving)
        if buffer is None or buffer.numel() != int(arriving):
            buffer = own.new_empty(int(arriving))
        self._pass_on(own, buffer)
        return buffer

    def _exchange_in_memory(self, messenger: HostMessenger, own: Tensor, buffer: Tensor | None) -> Tensor:
        """Exchange as `_exchange`, in messages that begin with the size of the copy."""

        def write(memory: Tensor) -> None:
            memory[:_ALIGNMENT].view(torch.int64)[0] = own.numel()
            memory[_ALIGNMENT : _ALIGNMENT + own.numel()].copy_(own)

        def read(memory: Tensor) -> Tensor:
            size = int(memory[:_ALIGNMENT].view(torch.int64)[0])
            copy = own.new_empty(size) if buffer is None or buffer.numel() != size else buffer
            return copy.copy_(memory[_ALIGNMENT : _ALIGNMENT + size])

        messenger.send((self._group.rank + 1) % self._group.size, _ALIGNMENT + own.numel(), write)
        copy = messenger.take(self._source, read)
        # At once, so that the other rank writes its next copy into the same memory.
        messenger.acknowledge_read()
        return copy

    def close(self) -> None:
        """Release the memory and the connections of messages; the copies can still be read."""
        if self._messenger is not None:
            self._messenger.close()

    def _pass_on(self, x: Tensor, out: Tensor) -> None:
        receiving = self._net.receive(out, self._group, self._source, _TAG)
        sending = self._net.send(x, self._group, (self._group.rank + 1) % self._group.size, _TAG)
        receiving.wait()
        sending.wait()


def _copy_pieces(pieces: Sequence[TensorPiece], earlier: Sequence[TensorPiece]) -> list[TensorPiece]:
    """Return copies of pieces, in the memory of those that an earlier call has returned where these fit."""
    memory = {piece.slot.name: piece.tensor for piece in earlier}
    copies = []
    for slot, tensor in ((piece.slot, piece.tensor.detach()) for piece in pieces):
        copy = memory.get(slot.name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty_like(tensor)
        copies.append(TensorPiece(slot, copy.copy_(tensor)))
    return copies


def build_buddy_copies(group: RankGroup, members: Sequence[int], net: Net, *, in_memory: bool) -> BuddyCopies:
    """Build the copies of this rank; collective.

    Args:
        group, members, net: as for `BuddyCopies`.
        in_memory: whether ranks of one host may exchange them in shared memory.
    """
    links = connect_single_host_group(group, net) if group.size > 1 and in_memory else None
    return BuddyCopies(group, members, net, None if links is None else HostMessenger(net, group, links))


def as_held_by_one(pieces: Sequence[TensorPiece]) -> list[TensorPiece]:
    """Return tensors that all ranks hold as pieces that others receive from this one."""
    return [TensorPiece(replace(piece.slot, axes=frozenset({"replica"})), piece.tensor) for piece in pieces]
