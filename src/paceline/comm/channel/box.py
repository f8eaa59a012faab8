"""What there is between this rank and one peer: letters that wait, letters that come, when it last moved."""

from __future__ import annotations

import math
import time

from paceline.comm.channel.letters import Place, Sent, Taken


class Box:
    """Of one peer; whoever uses it holds the lock of its room.

    Attributes:
        patience: seconds for which the peer may take nothing while something waits.
        moved_at, spoke_at, met_at: when it last took a part of a letter, sent one, or showed that it is
            there.
        num_unread_bytes: of its letters that nobody has heard.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.sent, self.taken = rank, Sent(), Taken(rank)
        self.patience = math.inf
        self.moved_at = self.spoke_at = self.met_at = time.monotonic()
        self.num_unread_bytes = 0
        self._furthest = Place(0, 0)

    def put(self, chunks: tuple[bytes, ...], patience_seconds: float) -> None:
        """One more letter."""
        if self.sent.next is None:
            self.moved_at = time.monotonic()
        self.patience = patience_seconds
        self.sent.put(chunks)

    def moved(self, place: Place) -> None:
        """It has taken so much, or has begun to; what is sent again is no movement."""
        if place > self._furthest:
            self._furthest, self.moved_at = place, time.monotonic()

    @property
    def expires_at(self) -> float:
        """When it has taken nothing for too long; infinity: nothing waits."""
        return self.moved_at + self.patience if self.sent.next else math.inf
