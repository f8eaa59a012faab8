"""A channel that hears its peers in an order that was recorded, whatever the order in which they speak.

What a server computes is a function of the order in which it hears its workers: tickets, parameters and sums
follow from it. So a run that hears them in the order of an earlier one computes the same bits, however fast
each worker is now. It holds for runs in which no worker was lost.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable

from paceline.comm.channel.message_channel import ChannelMessage, MessageChannel
from paceline.errors import CommunicationError


class ReplayChannel:
    """Everything but the order is the inner channel's.

    Args:
        order: of every message, the rank that sent it.
    """

    def __init__(self, inner: MessageChannel, order: Iterable[int]) -> None:
        self._inner = inner
        self._order = deque(order)
        self._early: defaultdict[int, deque[ChannelMessage]] = defaultdict(deque)
        self.send, self.flush, self.last_activity = inner.send, inner.flush, inner.last_activity
        self.drop, self.close = inner.drop, inner.close

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        """See `MessageChannel`; waits for the sender whose turn it is.

        Raises:
            CommunicationError: the order has ended.
        """
        if not self._order:
            raise CommunicationError(
                "the recorded order of arrival has ended, and a worker is still to be heard",
                next_step="replay with the recipe and the number of processes that recorded it",
            )
        sender, expires = self._order[0], time.monotonic() + deadline_seconds
        while not self._early[sender]:
            message = self._inner.receive(max(0.0, expires - time.monotonic()))
            self._early[message.sender].append(message)
        self._order.popleft()
        return self._early[sender].popleft()
