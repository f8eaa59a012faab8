"""The channel over gRPC: messages survive a connection that breaks, or a link that is gone for a while.

Invariant: a message that was sent arrives once, or its receiver is lost and named. A peer whose process ends
is lost only when it was unreachable for the grace period, and not at once as on a plain socket: a broken
connection says nothing about the other end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from paceline.comm.channel.message_channel import ChannelMessage
from paceline.comm.channel.reliable_queue import ReliableQueues, encode_message_chunks
from paceline.comm.ledger import ByteLedger
from paceline.errors import DeadlineError

_CLOSE_SECONDS = 1.0


class ChannelEnd(Protocol):
    """A server or client that carries messages."""

    def close(self) -> None:
        """Tell the peers that this rank leaves, and end."""


class GrpcChannel:
    """A message channel over gRPC servers and clients.

    Args:
        queues: the queues of messages.
        ends: servers and clients that carry them.
        ledger: counts what is sent, once.
    """

    def __init__(self, queues: ReliableQueues, ends: Sequence[ChannelEnd], ledger: ByteLedger) -> None:
        self._queues, self._ends, self._ledger = queues, tuple(ends), ledger
        self.last_activity, self.drop, self.num_unsent_bytes = (
            queues.last_activity,
            queues.drop,
            queues.num_unsent_bytes,
        )

    def send(self, to: int, message: ChannelMessage, deadline_seconds: float) -> None:
        # A copy: the caller may change its tensors as soon as this returns.
        chunks = encode_message_chunks(message)
        self._queues.put(to, chunks, deadline_seconds)
        # Counted once, however often chunks are sent again.
        self._ledger.count_call("send", "channel", sum(len(chunk) for chunk in chunks), 2)

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        """Return the next message of any sender.

        Raises:
            CommunicationError: a peer is lost.
            DeadlineError: no message arrived in time.
        """
        message = self._queues.receive(deadline_seconds)
        if message is None:
            raise DeadlineError(
                f"no message arrived within {deadline_seconds:g} s from ranks {self._queues.ranks}",
                next_step="look for the rank that is stuck, or raise runtime.deadline_seconds",
            )
        return message

    def flush(self, seconds: float = math.inf) -> bool:
        """Wait until every peer has acknowledged its messages.

        Raises:
            CommunicationError: a peer is lost; raised after the other peers have acknowledged or timed out.
        """
        return self._queues.flush(seconds)

    def close(self) -> None:
        """Close the ends; messages in flight have a moment to arrive, as in the buffers of a socket."""
        self._queues.wait_for_delivery(_CLOSE_SECONDS)
        for end in self._ends:
            end.close()
