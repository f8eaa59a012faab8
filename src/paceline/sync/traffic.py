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
from paceline.keys import key
from paceline.layout import Placed
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

    def ticket(self, rank: int, placed: Placed, version: int) -> list[Tensor]:
        """The server's newest parameters and buffers, as they travel to a worker."""

    def take(self, tensors: Sequence[Tensor], placed: Placed, rank: int, version: int) -> None:
        """The inverse, on the worker."""

    def forget(self, rank: int | None = None) -> None:
        """A worker (None: all) has, or is given, the parameters in full."""


class Coded:
    """Tensors travel through a codec.

    Args:
        codec: the form; each tensor is one row.
        seed: of what coding draws.
        slots: of all gradients, for the state.
    Wire: c bytes for a tensor that the codec makes c bytes of; a worker's first parameters of a round in
        full.
    Source: Seide et al. 2014 (error feedback); Richtarik et al. 2021, EF21, arXiv:2106.05203 (coding
    differences).
    """

    def __init__(self, codec: Codec, seed: int, slots: Mapping[Slot, Tensor]) -> None:
        self._codec, self._seed = codec, seed
        self._kept = {slot: torch.zeros(slot.shape) for slot in slots} if codec.loses else {}
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
            payload = self._codec.encode(values, keys)
            if slot in self._kept:
                lost = (values - self._decoded(payload, values, keys)).nan_to_num_(0.0, 0.0, 0.0)
                self._pending[slot] = lost.view(slot.shape).cpu()
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

    def ticket(self, rank: int, placed: Placed, version: int) -> list[Tensor]:
        """See `Traffic`."""
        now = newest(placed)
        known = self._known.get(rank)
        if known is None:
            self._known[rank] = [p.contiguous().clone() for p in now[: len(placed.holding.computes)]]
            return now
        coded = []
        for number, p in enumerate(known):
            keys = self._keys("ticket", rank, version, number)
            change = (now[number] - p).contiguous().view(1, -1)
            payload = self._codec.encode(change, keys)
            p.add_(self._decoded(payload, change, keys).view(p.shape))
            coded.append(payload)
        return [*coded, *now[len(known) :]]

    def take(self, tensors: Sequence[Tensor], placed: Placed, rank: int, version: int) -> None:
        """See `Traffic`."""
        if rank not in self._known:
            self._known[rank] = []
            load_newest(tensors, placed)
            return
        parameters, whole = placed.holding.computes.values(), []
        for number, (p, payload) in enumerate(zip(parameters, tensors, strict=False)):
            change = torch.empty(1, p.numel(), dtype=p.dtype, device=payload.device)
            keys = self._keys("ticket", rank, version, number)
            whole.append(p.detach() + self._decoded(payload, change, keys).view(p.shape).to(p.device))
        load_newest([*whole, *tensors[len(whole) :]], placed)

    def forget(self, rank: int | None = None) -> None:
        """See `Traffic`."""
        if rank is None:
            self._known.clear()
        else:
            self._known.pop(rank, None)

    def lost(self) -> Sequence[tuple[str, Slot, Tensor]]:
        """See `Reduction`: what this rank's coding has lost; zeros on the server."""
        return [("sent", slot, value) for slot, value in (self._kept | self._pending).items()]

    def set_lost(self, found: Mapping[tuple[str, str], Tensor]) -> None:
        """See `Reduction`."""
        self._pending = {}
        for slot in self._kept:
            value = found.get(("sent", slot.name))
            self._kept[slot] = torch.zeros(slot.shape) if value is None else value.clone().cpu()

    def _decoded(self, payload: Tensor, like: Tensor, keys: Keys) -> Tensor:
        out = torch.empty_like(like)
        self._codec.decode(payload, out, keys)
        return out

    def _keys(self, *parts: int | str) -> Keys:
        shared = key(self._seed, "traffic", *parts)
        return Keys(shared, shared)


def newest(placed: Placed) -> list[Tensor]:
    """Parameters and persistent buffers, as a message carries them."""
    return [*(p.detach() for p in placed.holding.computes.values()), *placed.buffers.values()]


def load_newest(tensors: Sequence[Tensor], placed: Placed) -> None:
    """The inverse of `newest`, in place."""
    parameters = placed.holding.computes.values()
    with torch.no_grad():
        for p, value in zip(parameters, tensors[: len(parameters)], strict=True):
            p.copy_(value)
    device = placed.holding.device
    placed.buffers.reset([value.to(device) for value in tensors[len(parameters) :]])
