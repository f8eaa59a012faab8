"""What a worker pushes, as it makes it and as its server reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm import LocalReducer, Reduction, Tally
from paceline.comm.channel import Message
from paceline.layout import Placed, Sums
from paceline.slot import Slot
from paceline.sync.alone import add_tallies
from paceline.sync.shares import SERVER, cut, shares_of
from paceline.sync.traffic import Traffic


@dataclass(frozen=True)
class Given:
    """A part that a worker was given.

    Args:
        shards: those of its micro-batches, in their order.
        weight: what an update divides its sum by, beside that of a full batch; 1 where it does not divide.
    """

    step: int
    part: int
    shards: Sequence[int]
    weight: float = 1.0


@dataclass(frozen=True)
class Added:
    """The sums over some pushes.

    Args:
        scale: what the gradients were multiplied with before backward.
    """

    tally: Tally
    grads: Mapping[Slot, Tensor | None]
    scale: float = 1.0


Pushed = tuple[dict[str, Any], list[Tensor]]
"""Fields and tensors of a message."""


class Pushes(Protocol):
    """Both ends use one of the same kind."""

    @property
    def lasts(self) -> bool:
        """What is made is not changed afterwards; see `Message`."""

    def sink(self, placed: Placed, part: int) -> Reduction:
        """What takes the gradients of a part."""

    def made(self, sink: Reduction, sums: Sums, placed: Placed, scale: float, given: Given) -> list[Pushed]:
        """What a worker sends of a part that it has run, by server."""

    def add(self, messages: Sequence[Message], placed: Placed) -> Added:
        """The inverse, on the server, and the sum over some parts, in the order in which they are given."""


class AnyOrder:
    """A part is one sum, through a codec or as it is.

    Args:
        traffics: of a worker, by server; a server has its own alone.
    """

    def __init__(self, traffics: Sequence[Traffic]) -> None:
        self._traffics = traffics
        self.lasts = all(traffic.lasts for traffic in traffics)

    def sink(self, placed: Placed, part: int) -> Reduction:
        """See `Pushes`."""
        return LocalReducer(placed.holding.computes)

    def made(self, sink: Reduction, sums: Sums, placed: Placed, scale: float, given: Given) -> list[Pushed]:
        """See `Pushes`: all servers hear all sums; rank 0 has the buffers."""
        total, count, metrics = sums.read()
        grads, place = sink.finish().tensors, (given.step, given.part)
        fields = {
            "micro_batches": sums.micro_batches,
            "total": total,
            "count": count,
            "metrics": dict(metrics),
        }
        moved = placed.buffers.added(placed.buffers.changes_of(given.shards))
        found: list[Pushed] = []
        for server, traffic in enumerate(self._traffics):
            pairs = [(part, slot, grads[slot]) for slot, part in shares_of(placed.holding, server)]
            there = {part: cut(g, slot, part) / scale for part, slot, g in pairs if g is not None}
            change = moved if server == SERVER else moved.new_empty(0)
            used = [g is not None for _, _, g in pairs]
            found.append(({**fields, "used": used}, [change, *traffic.push(there, place, given.weight)]))
        return found

    def add(self, messages: Sequence[Message], placed: Placed) -> Added:
        """See `Pushes`."""
        found = [self._read(message, placed) for message in messages]
        tally = add_tallies([tally for tally, _ in found])
        tally = replace(tally, buffers=torch.stack([t.buffers for t, _ in found]).sum(0))
        return Added(tally, {slot: _sum([g[slot] for _, g in found]) for slot in placed.holding.updates})

    def _read(self, message: Message, placed: Placed) -> tuple[Tally, dict[Slot, Tensor | None]]:
        """Sums and unscaled gradients of one push."""
        fields = message.fields
        change, *given = (t.to(placed.holding.device) for t in message.tensors)
        used = [*zip(placed.holding.updates.items(), fields["used"], strict=True)]
        step, part = fields["place"]
        likes = {slot: p for (slot, p), there in used if there}
        (traffic,) = self._traffics
        rest = iter(traffic.pushed(given, likes, (step, part)))
        grads = {s: lying_as(p, next(rest)) if there else None for (s, p), there in used}
        tally = Tally(
            micro_batches=fields["micro_batches"],
            total=fields["total"],
            count=fields["count"],
            metrics=fields["metrics"],
            stops=float(fields["stops"]),
            used=[float(used) for used in fields["used"]],
            buffers=change,
        )
        return tally, grads


def _sum(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    if len(there) < 2:
        return there[0] if there else None
    total = there[0] + there[1]
    for part in there[2:]:
        total += part
    return total


def lying_as(p: Tensor, values: Tensor) -> Tensor:
    """In memory in the order of the parameter, as kernels expect it."""
    return values if values.stride() == p.stride() else torch.empty_like(p).copy_(values).detach()
