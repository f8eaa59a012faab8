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
    """Both ends use one of the same kind."""

    def push(self, grads: Mapping[Slot, Tensor], place: Place) -> list[Tensor]:
        """A worker's gradients, unscaled, as they travel."""

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

    def __init__(self, codec: Codec, seed: int, slots: Mapping[Slot, Tensor]) -> None:
        self._codec, self._seed = codec, seed
        self._kept = {slot: torch.zeros(slot.sizes) for slot in slots} if codec.loses else {}
        self._pending: dict[Slot, Tensor] = {}
        self._known: dict[int, list[Tensor]] = {}

    def push(self, grads: Mapping[Slot, Tensor], place: Place) -> list[Tensor]:
        """See `Traffic`."""
        found = []
        for slot, grad in grads.items():
            keys = self._keys("push", *place, slot.name)
            values = grad.contiguous().view(1, -1)
            if slot in self._kept:
                values = values + self._kept[slot].to(values).view(1, -1)
            payload = self._codec.encode(values, keys, Workspace())
            if slot in self._kept:
                lost = (values - self._decoded(payload, values, keys)).nan_to_num_(0.0, 0.0, 0.0)
                self._pending[slot] = lost.view(slot.sizes).cpu()
            found.append(payload)
        return found

    def pushed(self, tensors: Sequence[Tensor], likes: Mapping[Slot, Tensor], place: Place) -> list[Tensor]:
        """See `Traffic`."""
        found = []
        for x, (slot, like) in zip(tensors, likes.items(), strict=True):
            row = torch.empty(1, like.numel(), dtype=like.dtype, device=x.device)
            found.append(self._decoded(x, row, self._keys("push", *place, slot.name)).view(like.shape))
        return found

    def settle(self, *, dropped: bool) -> None:
        """See `Traffic`."""
        if not dropped:
            self._kept |= self._pending
        self._pending = {}

    def ticket(self, rank: int, newest: Sequence[Tensor], version: int) -> list[Tensor]:
        """See `Traffic`."""
        known = self._known.get(rank)
        if known is None:
            self._known[rank] = [p.contiguous().clone() for p in newest]
            return [*newest]
        coded = []
        for number, p in enumerate(known):
            keys = self._keys("ticket", rank, version, number)
            change = (newest[number] - p).contiguous().view(1, -1)
            payload = self._codec.encode(change, keys, Workspace())
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
            change = torch.empty(1, p.numel(), dtype=p.dtype, device=payload.device)
            keys = self._keys("ticket", rank, version, number)
            p.copy_(p + self._decoded(payload, change, keys).view(p.shape).to(p.device))

    def forget(self, rank: int | None = None) -> None:
        """See `Traffic`."""
        if rank is None:
            self._known.clear()
        else:
            self._known.pop(rank, None)

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """See `Reduction`: what this rank's coding has lost, unscaled; zeros on the server."""
        return [("sent", slot, value) for slot, value in (self._kept | self._pending).items()]

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `Reduction`."""
        self._pending, sums = {}, all_lost(found)
        for slot in self._kept:
            value = sums.get(slot.name)
            self._kept[slot] = torch.zeros(slot.sizes) if value is None else value.clone().cpu()

    def _decoded(self, payload: Tensor, like: Tensor, keys: Keys) -> Tensor:
        out = torch.empty_like(like)
        self._codec.decode(payload, out, keys, Workspace())
        return out

    def _keys(self, *parts: int | str) -> Keys:
        shared = key(self._seed, "traffic", *parts)
        return Keys(shared, shared)
