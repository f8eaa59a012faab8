"""What tensors look like between a server and its workers: as they are (`touched_rows`), or through a codec,
in both directions.

Up, a worker codes each gradient with what coding lost of it before; a push that the server has dropped
leaves that as it was. Down, the server codes how its parameters differ from those that the worker has; so
what is lost is part of the next difference. Between two rounds all hold the exact parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm import Codec
from paceline.comm.codecs import Keys
from paceline.comm.reduction import all_lost
from paceline.comm.workspace import Workspace
from paceline.keys import key
from paceline.slot import Slot

Place = tuple[int, int]
"""Step and part of a ticket."""


class Traffic(Protocol):
    """Both ends use one of the same kind.

    Attributes:
        lasts: what `push` and `ticket` return is not changed afterwards; else it is good until the next one.
    """

    lasts: bool

    def push(self, grads: Mapping[Slot, Tensor], place: Place, weight: float = 1.0) -> list[Tensor]:
        """A worker's gradients, unscaled, as they travel.

        Args:
            weight: see `Given`; what was lost of them counts in another push as it would have in its own.
        """

    def pushed(self, tensors: Sequence[Tensor], likes: Mapping[Slot, Tensor], place: Place) -> list[Tensor]:
        """The inverse, on the server."""

    def settle(self, *, dropped: bool) -> None:
        """The worker knows what became of its last push."""

    def ticket(self, rank: int, newest: Sequence[Tensor], version: int) -> list[Tensor]:
        """The newest values of a server's parts of the parameters, as they travel to a worker."""

    def take(self, tensors: Sequence[Tensor], parts: Sequence[Tensor], rank: int, version: int) -> None:
        """The inverse, on the worker, whose parts are changed in place."""

    def forget(self, rank: int | None = None) -> None:
        """A worker (None: all) has, or is given, the parameters in full."""


class Coded:
    """Tensors travel through a codec.

    Args:
        codec: the form; each tensor is one row.
        seed: of what coding draws.
        slots: of all gradients of the server's parts, for the state.
    Wire: c bytes for a tensor that the codec makes c bytes of; a worker's first parameters of a round in
        full.
    Source: Seide et al. 2014 (error feedback); Richtarik et al. 2021, EF21, arXiv:2106.05203 (coding
    differences).
    """

    lasts = False

    def __init__(self, codec: Codec, seed: int, slots: Mapping[Slot, Tensor]) -> None:
        self._codec, self._seed = codec, seed
        self._workspace, self._payloads = Workspace(), Workspace()
        self._kept = {slot: torch.zeros(slot.sizes) for slot in slots} if codec.loses else {}
        self._pending: dict[Slot, Tensor] = {}
        self._spare: dict[Slot, Tensor] = {}  # memory of the push before the last
        self._known: dict[int, list[Tensor]] = {}

    def push(self, grads: Mapping[Slot, Tensor], place: Place, weight: float = 1.0) -> list[Tensor]:
        """See `Traffic`; the bytes are good until the next push. What is kept is that of a full batch."""
        found = []
        for slot, grad in grads.items():
            keys = self._keys("push", *place, slot.name)
            values = self._workspace.copy("values", grad).view(1, -1)
            kept = self._kept.get(slot)
            if kept is not None:
                kept = self._workspace.copy("kept", kept.to(grad.device), grad.dtype).view(1, -1)
                values = torch.add(values, kept, alpha=weight, out=self._workspace.like("sum", values))
            payload = self._laid(f"push {slot.name}", values, keys)
            if kept is not None:
                lost = values.sub_(self._decoded(payload, values, keys)).nan_to_num_(0.0, 0.0, 0.0)
                lost = lost if weight == 1.0 else lost.div_(weight)
                self._pending[slot] = self._opened(slot).copy_(lost.view(slot.sizes))
            found.append(payload)
        return found

    def pushed(self, tensors: Sequence[Tensor], likes: Mapping[Slot, Tensor], place: Place) -> list[Tensor]:
        """See `Traffic`."""
        found = []
        for x, (slot, like) in zip(tensors, likes.items(), strict=True):
            # of its own, as several pushes are added up
            row = torch.empty(1, like.numel(), dtype=like.dtype, device=x.device)
            self._codec.decode(x, row, self._keys("push", *place, slot.name), self._workspace)
            found.append(row.view(like.shape))
        return found

    def settle(self, *, dropped: bool) -> None:
        """See `Traffic`."""
        if dropped:
            self._spare |= self._pending
        else:
            self._spare |= {slot: self._kept[slot] for slot in self._pending}
            self._kept |= self._pending
        self._pending = {}

    def ticket(self, rank: int, newest: Sequence[Tensor], version: int) -> list[Tensor]:
        """See `Traffic`; the bytes are good until the next ticket."""
        known = self._known.get(rank)
        if known is None:
            self._known[rank] = [p.contiguous().clone() for p in newest]
            return [*newest]
        coded = []
        for number, p in enumerate(known):
            keys = self._keys("ticket", rank, version, number)
            change = torch.sub(newest[number].detach(), p, out=self._workspace.like("change", p)).view(1, -1)
            payload = self._laid(f"ticket {number}", change, keys)
            p.add_(self._decoded(payload, change, keys).view(p.shape))
            coded.append(payload)
        return coded

    def take(self, tensors: Sequence[Tensor], parts: Sequence[Tensor], rank: int, version: int) -> None:
        """See `Traffic`."""
        if rank not in self._known:
            self._known[rank] = []
            for p, value in zip(parts, tensors, strict=True):
                p.copy_(value)
            return
        for number, (p, payload) in enumerate(zip(parts, tensors, strict=True)):
            change = self._workspace.take("change", (1, p.numel()), p.dtype, payload.device)
            keys = self._keys("ticket", rank, version, number)
            p.add_(self._decoded(payload, change, keys).view(p.shape).to(p.device))

    def forget(self, rank: int | None = None) -> None:
        """See `Traffic`."""
        if rank is None:
            self._known.clear()
        else:
            self._known.pop(rank, None)

    @property
    def in_common_bytes(self) -> int:
        """Of memory in which all tensors are coded, as much as the largest needs."""
        return self._workspace.num_bytes

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """See `Reduction`: what this rank's coding has lost, unscaled; zeros on the server."""
        return [("sent", slot, value) for slot, value in (self._kept | self._pending).items()]

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `Reduction`."""
        self._pending, sums = {}, all_lost(found)
        for slot in self._kept:
            value = sums.get(slot.name)
            self._kept[slot] = torch.zeros(slot.sizes) if value is None else value.clone().cpu()

    def _opened(self, slot: Slot) -> Tensor:
        """Memory for what the coding of a gradient loses, on the processor; not where that is kept now."""
        found = self._spare.pop(slot, None)
        return torch.empty(slot.sizes) if found is None else found

    def _laid(self, name: str, values: Tensor, keys: Keys) -> Tensor:
        """Values [1, n] coded, where no further coding writes; a ragged row has room for the longest."""
        payload = self._codec.encode(values, keys, self._workspace)
        room = self._codec.num_bytes(values.numel())
        place = self._payloads.take(name, payload.shape, payload.dtype, payload.device, room=room)
        return place.copy_(payload)

    def _decoded(self, payload: Tensor, like: Tensor, keys: Keys) -> Tensor:
        """The values of a payload, good until the next call."""
        out = self._workspace.like("decoded", like)
        self._codec.decode(payload, out, keys, self._workspace)
        return out

    def _keys(self, *parts: int | str) -> Keys:
        shared = key(self._seed, "traffic", *parts)
        return Keys(shared, shared)


def lost_bytes(codec: Codec, num_values: int) -> int:
    """Of what coding so many values of a gradient loses, once."""
    return torch.float32.itemsize * num_values if codec.loses else 0
