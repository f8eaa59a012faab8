"""What a worker pushes, as its server reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.comm import Tally
from paceline.comm.channel import Message
from paceline.layout import Placed
from paceline.slot import Slot
from paceline.sync.local import add_tallies
from paceline.sync.traffic import Traffic


def add_pushes(
    messages: Sequence[Message], placed: Placed, traffic: Traffic
) -> tuple[Tally, dict[Slot, Tensor | None]]:
    """The sums over some pushes, added in the order in which they are given."""
    found = [read_push(message, placed, traffic) for message in messages]
    tally = add_tallies([tally for tally, _ in found])
    tally = replace(tally, buffers=torch.stack([t.buffers for t, _ in found]).sum(0))
    return tally, {slot: _sum([grads[slot] for _, grads in found]) for slot in placed.holding.updates}


def _sum(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return sum(there[1:], start=there[0]) if there else None


def read_push(message: Message, placed: Placed, traffic: Traffic) -> tuple[Tally, dict[Slot, Tensor | None]]:
    """Sums and unscaled gradients of one push."""
    fields = message.fields
    change, *given = (t.to(placed.holding.device) for t in message.tensors)
    used = [*zip(placed.holding.updates.items(), fields["used"], strict=True)]
    step, part = fields["place"]
    rest = iter(traffic.pushed(given, {s: p for (s, p), there in used if there}, (step, part)))
    grads = {s: _lying_as(p, next(rest)) if there else None for (s, p), there in used}
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


def _lying_as(p: Tensor, values: Tensor) -> Tensor:
    """In memory in the order of the parameter, as kernels expect it."""
    return values if values.stride() == p.stride() else torch.empty_like(p).copy_(values).detach()
