"""A channel that receives messages in a recorded order, whatever the order in which they arrive.

What a server computes depends on the order in which it receives messages of workers: tickets, parameters and
sums follow from it. A run with the order of an earlier one therefore computes the same bits, however fast
each worker is now, as long as no worker is lost.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable

from paceline.comm.channel.message_channel import ChannelMessage, MessageChannel
from paceline.errors import CommunicationError


class ReplayChannel:
    """A channel that takes only the order of messages from a recording, and all else from another channel.

    Args:
        order: for each message, the rank that sent it.
    """

    def __init__(self, inner: MessageChannel, order: Iterable[int]) -> None:
        self._inner = inner
        self._order = deque(order)
        self._early: defaultdict[int, deque[ChannelMessage]] = defaultdict(deque)
        self.send, self.flush, self.last_activity = inner.send, inner.flush, inner.last_activity
        self.drop, self.close = inner.drop, inner.close

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        """Wait for the sender whose turn it is, and return its next message.

        Raises:
            CommunicationError: the order has ended.
        """
        if not self._order:
            raise CommunicationError(
                "the recorded order of arrival has ended, but the run waits for more messages of workers",
                next_step="replay with the recipe and the number of processes that recorded it",
            )
        sender, expires = self._order[0], time.monotonic() + deadline_seconds
        while not self._early[sender]:
            message = self._inner.receive(max(0.0, expires - time.monotonic()))
            # Not this sender's turn: keep its message until it is.
            self._early[message.sender].append(message)
        self._order.popleft()
        return self._early[sender].popleft()
