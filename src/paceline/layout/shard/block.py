"""Parameters that come and go together: whole while they are used, parts of them otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import Collective, Handle
from paceline.comm.reduction import PartBuffer
from paceline.comm.reduction.part_buffer import Parts, plan_buckets
from paceline.comm.reduction.reducer import drain
from paceline.comm.workspace import Workspace
from paceline.slot import Slot


class Block:
    """The parameters of one block of a model.

    Args:
        tensors: whole-shaped parameters, in memory or without.
        updates: this rank's parts.
        parts: of every rank of the shard group.
        collective: over the shard group; exact.
        name: of its buffers.
        away: the class of a parameter that has no memory.
        memory: where gathers arrive, of which one is under way at a time; None: each has memory of its own.
    """

    def __init__(
        self,
        tensors: Mapping[Slot, nn.Parameter],
        updates: Mapping[Slot, nn.Parameter],
        parts: Parts,
        collective: Collective,
        name: str,
        away: type[nn.Parameter],
        memory: Workspace | None = None,
    ) -> None:
        self.tensors, self._updates, self._parts = tensors, updates, parts
        self._collective, self._name, self._memory = collective, name, memory
        self._groups: Sequence[Sequence[Slot]] = plan_buckets(tensors, 2**62)
        self._away, self._kinds = away, {slot: type(p) for slot, p in tensors.items()}
        self.is_here, self.stays = True, False
        self._arriving: list[tuple[PartBuffer, Handle]] = []
        self._waited_for: set[Slot] | None = None  # None: no backward has begun
        for p in tensors.values():
            if p.untyped_storage().size():
                p.data = torch.empty_like(p).copy_(p.detach())  # memory of its own, that can be given back

    def _rows(self, number: int, num_values: int, like: Tensor) -> Tensor:
        """What arrives, by rank; beyond the parts it may be anything."""
        if self._memory is None:
            return like.new_empty(num_values)
        return self._memory.take(f"gathered.{number}", (num_values,), like.dtype, like.device)

    @property
    def num_bytes(self) -> int:
        """Of its parameters, whole."""
        return sum(p.numel() * p.element_size() for p in self.tensors.values())

    def start(self) -> None:
        """Begin to gather, unless it is on its way; collective."""
        if self._arriving:
            return
        place = self._collective.group.rank
        with torch.no_grad():
            for number, slots in enumerate(self._groups):
                buffer = PartBuffer(slots, self.tensors, self._parts, partial(self._rows, number))
                buffer.write_row(place, self._updates)
                rows = self._collective.all_gather(buffer.rows[place], f"{self._name}.{number}", buffer.rows)
                self._arriving.append((buffer, rows))

    def gather(self) -> None:
        """Bring everything here; collective, unless it is here."""
        if self.is_here:
            return
        self.start()
        with torch.no_grad():
            for buffer, rows in self._arriving:
                rows.wait()
                for slot in buffer.slots:
                    p = self.tensors[slot]
                    p.__class__ = self._kinds[slot]
                    p.untyped_storage().resize_(p.numel() * p.element_size())
                    buffer.read(slot, p.data)
        self._arriving, self.is_here = [], True

    def join(self) -> None:
        """Take part in a gather whose result nobody needs here; collective."""
        self.start()
        for _, rows in self._arriving:
            rows.wait()
        self._arriving = []

    def release(self) -> None:
        """Give the memory back, also of what is on its way."""
        drain(rows for _, rows in self._arriving)
        if self.is_here:
            for p in self.tensors.values():
                p.untyped_storage().resize_(0)
                p.__class__ = self._away
        self._arriving, self._waited_for = [], None
        self.is_here = self.stays = False

    def waits_for_gradients(self) -> None:
        """A backward begins: once all gradients are there, hardly anybody needs the parameters."""
        self._waited_for = set(self.tensors)

    def has_gradient(self, slot: Slot, _p: Any) -> None:
        """A gradient is complete."""
        if self._waited_for is not None:
            self._waited_for.discard(slot)

    @property
    def is_done(self) -> bool:
        """Whether it may go once another block computes: all its gradients are there."""
        return self.is_here and self._waited_for == set() and not self.stays
