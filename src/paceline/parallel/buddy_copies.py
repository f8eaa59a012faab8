"""Copies of the state in memory: each rank has those of its own part and of its neighbour's.

Before every step a rank copies the part of the state that only it holds (its optimizer state and the
parameters that it updates) into one buffer of host memory. If all ranks are on one host, the next rank maps
that buffer, which outlives the rank that wrote it; otherwise the copy is sent to the next rank. When a rank
is lost, its neighbour has what it held, so the remaining ranks make whole tensors of their copies without
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
from functools import lru_cache
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
_ALIGNMENT, _HEADER_ALIGNMENT = 64, 4096
_NUM_GENERATIONS = _NUM_KEPT = 2  # their messages are kept


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


@dataclass(frozen=True)
class CopyPlan:
    """The layout of a copy in one buffer.

    Args:
        header: number of bytes of the contents, and these as JSON: step, scalars and entries.
        begin, num_bytes: where the tensors begin, and where the copy ends.
        entries: slot, dtype and offset of each piece.
        pieces: what is copied.
    """

    header: bytes
    begin: int
    num_bytes: int
    entries: Sequence[Sequence[Any]]
    pieces: Sequence[TensorPiece]

    def write(self, buffer: Tensor) -> None:
        """Write the copy to the beginning of a buffer, uint8 [n] with n >= `num_bytes`."""
        buffer[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for entry, piece in zip(self.entries, self.pieces, strict=True):
            _view(buffer, self.begin, entry).copy_(piece.tensor)


def plan_copy(state: TrainState, pieces: Sequence[TensorPiece]) -> CopyPlan:
    """Return the layout of a copy of some pieces, and of all values that are no tensors."""
    entries, text, num_bytes = _describe_entries(
        tuple(piece.slot for piece in pieces), tuple(piece.tensor.dtype for piece in pieces)
    )
    scalars = json.dumps(state.scalars())
    contents = f'{{"step": {state.step}, "scalars": {scalars}, "entries": {text}}}'.encode()
    header = len(contents).to_bytes(8, "little") + contents
    begin = _begin_after(len(header))
    return CopyPlan(header, begin, begin + num_bytes, entries, pieces)


@lru_cache(4)  # they are the same before every step
def _describe_entries(
    slots: tuple[TensorSlot, ...], dtypes: tuple[torch.dtype, ...]
) -> tuple[Sequence[Sequence[Any]], str, int]:
    """Return slot, dtype and offset of each piece, the same as JSON, and the bytes of all pieces."""
    entries, offset = [], 0
    for slot, dtype in zip(slots, dtypes, strict=True):
        name = str(dtype).removeprefix("torch.")
        part = [list(span) for span in slot.part]
        entries.append([slot.name, list(slot.shape), part, sorted(slot.axes), name, offset])
        offset += -(-slot.numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return entries, json.dumps(entries), offset


def _begin_after(num_header_bytes: int) -> int:
    """Return where tensors begin: a copy keeps its size when a number in the header gets another digit."""
    return -(-num_header_bytes // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT


def read_copy(buffer: Tensor) -> StateCopy:
    """Return the copy in a buffer that `CopyPlan.write` has written; nothing is copied."""
    length = int.from_bytes(buffer[:8].numpy().tobytes(), "little")
    contents = json.loads(buffer[8 : 8 + length].numpy().tobytes())
    begin = _begin_after(8 + length)
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
        oldest = self._generations.pop(0) if len(self._generations) == _NUM_GENERATIONS else None
        divided, common = divided_pieces(state)
        plan = plan_copy(state, divided)
        if self._messenger is not None:
            own, neighbour = self._exchange_in_memory(self._messenger, plan)
        else:
            own = _buffer_of(plan.num_bytes, None if oldest is None else oldest.own)
            plan.write(own)
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
        num_bytes = sum(one.own.numel() for one in self._generations)
        if self._messenger is None:
            num_bytes += sum(one.neighbour.numel() for one in self._generations)
        else:
            num_bytes += self.num_bytes  # the next copy is written before the oldest one is free
        return {"bytes": num_bytes, "seconds_per_step": self.seconds / max(1, self.num_updates)}

    @property
    def _source(self) -> int:
        """The rank of the group whose part this rank keeps."""
        return (self._group.rank - 1) % self._group.size

    def _exchange(self, own: Tensor, buffer: Tensor | None) -> Tensor:
        """Send this rank's copy to the next rank, and return that of the one before."""
        if self._group.size == 1:
            return own.new_empty(0)
        arriving = torch.zeros(1, dtype=torch.int64)
        self._pass_on(torch.tensor([own.numel()]), arriving)
        buffer = _buffer_of(int(arriving), buffer)
        self._pass_on(own, buffer)
        return buffer

    def _exchange_in_memory(self, messenger: HostMessenger, plan: CopyPlan) -> tuple[Tensor, Tensor]:
        """Write this rank's copy where the next rank reads it; return it and that of the rank before.

        Both lie in the buffers of the messages, of which the newest ones are kept.
        """
        written: list[Tensor] = []

        def write(memory: Tensor) -> None:
            plan.write(memory)
            written.append(memory[: plan.num_bytes])

        messenger.send((self._group.rank + 1) % self._group.size, plan.num_bytes, write)
        neighbour = messenger.take(self._source, lambda memory: memory)
        messenger.acknowledge_read()
        return written[0], neighbour

    def close(self) -> None:
        """Release the memory and the connections of messages; the copies can still be read."""
        if self._messenger is not None:
            self._messenger.close()

    def _pass_on(self, x: Tensor, out: Tensor) -> None:
        receiving = self._net.receive(out, self._group, self._source, _TAG)
        sending = self._net.send(x, self._group, (self._group.rank + 1) % self._group.size, _TAG)
        receiving.wait()
        sending.wait()


def _buffer_of(num_bytes: int, earlier: Tensor | None) -> Tensor:
    """Return an earlier buffer if it has the size, else a new one, uint8 [num_bytes]."""
    fits = earlier is not None and earlier.numel() == num_bytes
    return earlier if fits and earlier is not None else torch.empty(num_bytes, dtype=torch.uint8)


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
    messenger = None if links is None else HostMessenger(net, group, links, num_kept=_NUM_KEPT)
    return BuddyCopies(group, members, net, messenger)


def as_held_by_one(pieces: Sequence[TensorPiece]) -> list[TensorPiece]:
    """Return tensors that all ranks hold as pieces that others receive from this one."""
    return [TensorPiece(replace(piece.slot, axes=frozenset({"replica"})), piece.tensor) for piece in pieces]
