"""Messages are heard in a recorded order, whatever the order in which they come."""

from collections import deque
from typing import Any

import pytest

from paceline.comm.channel import ChannelMessage, ReplayChannel
from paceline.errors import CommunicationError, DeadlineError


class Scripted:
    """A channel on which messages come in a given order; then nothing does."""

    def __init__(self, senders: list[int]) -> None:
        self._left = deque(ChannelMessage("n", {"k": k}, sender=sender) for k, sender in enumerate(senders))
        self.send = self.flush = self.last_activity = self.drop = self.close = lambda *args: None

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        if not self._left:
            raise DeadlineError("nothing came")
        return self._left.popleft()


def heard(channel: Any, number: int) -> list[tuple[int, int]]:
    return [(m.sender, m.fields["k"]) for m in (channel.receive(1.0) for _ in range(number))]


@pytest.mark.capability("I4")
def test_those_who_come_early_wait_for_their_turn_in_the_order_of_their_sender() -> None:
    channel = ReplayChannel(Scripted([2, 2, 1, 3, 1]), [1, 2, 3, 2, 1])
    assert heard(channel, 5) == [(1, 2), (2, 0), (3, 3), (2, 1), (1, 4)]


def test_what_does_not_come_is_late_and_what_was_not_recorded_is_an_error() -> None:
    channel = ReplayChannel(Scripted([2]), [1])
    with pytest.raises(DeadlineError):
        channel.receive(1.0)
    channel = ReplayChannel(Scripted([1, 1]), [1])
    channel.receive(1.0)
    with pytest.raises(CommunicationError, match="the recorded order of arrival has ended"):
        channel.receive(1.0)
