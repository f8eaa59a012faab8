"""From the word of a route to a wire, the path of uncoded sums: one table of collective constructors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from paceline.comm import Net, PlainWire, SharedMemoryWire, Wire, meet_on_host
from paceline.errors import StrategyError
from paceline.mesh import Group

Closers = list[Callable[[], None]]
"""What a session calls when it is closed."""


def _native(group: Group, net: Net, device: torch.device, closers: Closers) -> Wire:
    return PlainWire(net, group)


def _shared_memory(group: Group, net: Net, device: torch.device, closers: Closers) -> Wire:
    wire = _shared_or_native(group, net, device, closers)
    if isinstance(wire, PlainWire):
        why = "this job computes on GPUs" if device.type != "cpu" else "its ranks run on several hosts"
        raise StrategyError(
            f"route=shared-memory cannot sum over group '{group.name}' {group.ranks}: {why}",
            next_step="choose route=auto, which takes memory where it can, or route=native",
        )
    return wire


def _shared_or_native(group: Group, net: Net, device: torch.device, closers: Closers) -> Wire:
    links = meet_on_host(group, net) if device.type == "cpu" else None
    if links is None:
        return PlainWire(net, group)
    wire = SharedMemoryWire(net, group, links)
    closers.append(wire.close)
    return wire


ROUTES: Mapping[str, Callable[[Group, Net, torch.device, Closers], Wire]] = {
    "auto": _shared_or_native,
    "native": _native,
    "shared-memory": _shared_memory,
}
