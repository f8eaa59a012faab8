"""A channel over gRPC: letters that survive a connection that breaks, or a link that is gone for a while.

Invariant: a message that was handed over arrives once, or its receiver is lost and named. A peer that ends
without a word is lost when it was out of reach for the grace, and not at once as on a plain socket: a
connection that breaks says nothing about its other end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from paceline.comm.channel.message_channel import ChannelMessage
from paceline.comm.channel.reliable_queue import ReliableQueues, encode_message_chunks
from paceline.comm.ledger import ByteLedger
from paceline.errors import DeadlineError

_LAST_WORD_SECONDS = 1.0


class ChannelEnd(Protocol):
    """What carries letters: a hub, or a caller."""

    def close(self) -> None:
        """Say that this rank leaves."""


class GrpcChannel:
    """One end of each of its lines; see `MessageChannel`.

    Args:
        room: where letters lie.
        ends: what carries them.
        ledger: counts what is sent, once.
    """

    def __init__(self, room: ReliableQueues, ends: Sequence[ChannelEnd], ledger: ByteLedger) -> None:
        self._room, self._ends, self._ledger = room, tuple(ends), ledger
        self.last_activity, self.drop, self.num_unsent_bytes = (
            room.last_activity,
            room.forget,
            room.num_unsent_bytes,
        )

    def send(self, to: int, message: ChannelMessage, deadline_seconds: float) -> None:
        chunks = encode_message_chunks(message)
        self._room.put(to, chunks, deadline_seconds)
        self._ledger.count_call("send", "channel", sum(len(chunk) for chunk in chunks), 2)

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        """See `MessageChannel`.

        Raises:
            CommunicationError: a peer is lost.
            DeadlineError: nobody said anything in time.
        """
        message = self._room.hear(deadline_seconds)
        if message is None:
            raise DeadlineError(
                f"no message arrived within {deadline_seconds:g} s from ranks {self._room.ranks}",
                next_step="look for the rank that is stuck, or raise runtime.deadline_seconds",
            )
        return message

    def flush(self, seconds: float = math.inf) -> bool:
        """See `MessageChannel`: until every peer has said that it has its letters.

        Raises:
            CommunicationError: a peer is lost; the others have had their time.
        """
        return self._room.settle(seconds)

    def close(self) -> None:
        """See `MessageChannel`; what little is on its way has a moment to arrive, as in the buffers of a socket."""
        self._room.wait_for_delivery(_LAST_WORD_SECONDS)
        for end in self._ends:
            end.close()
