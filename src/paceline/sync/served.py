"""What a server and its workers share: the channel, the ledger, and the parameters as a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.comm import Net
from paceline.comm.channel import Channel, Message
from paceline.observe import Phases
from paceline.slot import Keeper, Piece, Slot
from paceline.sync.policy import WorkLedger
from paceline.sync.traffic import Traffic

SERVER = 0


class Served(Keeper):
    """What server and worker share: the channel, and parameters and sums as messages.

    Attributes:
        left: the ranks that were not lost, as of the last pause; empty before it.
    """

    def __init__(
        self,
        channel: Channel,
        net: Net,
        phases: Phases,
        stop_requested: Callable[[], bool],
        traffic: Traffic,
    ) -> None:
        self.channel, self.net, self.phases, self.traffic = channel, net, phases, traffic
        self.stop_requested = stop_requested
        self.left: tuple[int, ...] = ()
        self.ledger = WorkLedger()

    def send(self, to: int, kind: str, fields: Mapping[str, Any], tensors: list[Tensor]) -> None:
        """One message; it goes out while this rank receives."""
        self.channel.send(to, Message(kind, fields, tensors), self.net.deadline_seconds)

    def receive(self, seconds: float | None = None) -> Message:
        """One message, within so many seconds; None: within the deadline."""
        with self.phases.during("communication"):
            return self.channel.receive(self.net.deadline_seconds if seconds is None else seconds)

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
