"""What a server and its workers share: the channel, the ledger, and the parameters as a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Net
from paceline.comm.channel import Channel, Message
from paceline.layout import Placed
from paceline.observe import Phases
from paceline.slot import Piece, Slot
from paceline.sync.policy import WorkLedger

SERVER = 0


class Served:
    """What server and worker share: the channel, and parameters and sums as messages."""

    def __init__(
        self, channel: Channel, net: Net, phases: Phases, stop_requested: Callable[[], bool]
    ) -> None:
        self.channel, self.net, self.phases = channel, net, phases
        self.stop_requested = stop_requested
        self.ledger = WorkLedger()

    def send(self, to: int, kind: str, fields: Mapping[str, Any], tensors: list[Tensor]) -> None:
        """One message, within the deadline."""
        self.channel.send(to, Message(kind, fields, tensors), self.net.deadline_seconds)

    def receive(self) -> Message:
        """One message, within the deadline."""
        with self.phases.during("communication"):
            return self.channel.receive(self.net.deadline_seconds)

    def pieces(self) -> list[Piece]:
        """The ledger, as numbers: taken, applied, dropped, then pairs of age and count."""
        ages = [n for pair in sorted(self.ledger.staleness.items()) for n in pair]
        values = torch.tensor([self.ledger.taken, self.ledger.applied, self.ledger.dropped, *ages])
        return [Piece(Slot.whole("work", values), values)]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `pieces`."""
        if "work" in tensors:
            taken, applied, dropped, *ages = (int(n) for n in tensors["work"])
            histogram = dict(zip(ages[::2], ages[1::2], strict=True))
            self.ledger = WorkLedger(taken, applied, dropped)
            self.ledger.staleness.update(histogram)


def newest(placed: Placed) -> list[Tensor]:
    """Parameters and persistent buffers, as a message carries them."""
    return [*(p.detach() for p in placed.holding.computes.values()), *placed.buffers.values()]


def load_newest(tensors: Any, placed: Placed) -> None:
    """The inverse of `newest`, in place."""
    parameters = placed.holding.computes.values()
    with torch.no_grad():
        for p, value in zip(parameters, tensors[: len(parameters)], strict=True):
            p.copy_(value)
    device = placed.holding.device
    placed.buffers.reset([value.to(device) for value in tensors[len(parameters) :]])
