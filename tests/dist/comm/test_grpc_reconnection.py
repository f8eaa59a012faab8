"""Over a line that breaks, loses answers or is gone for a while, gRPC delivers every message once."""

from __future__ import annotations

import threading

import pytest
import torch

from paceline.comm.channel import ChannelMessage, MessageChannel, reliable_queue
from paceline.comm.channel.grpc_channel import GrpcChannel
from paceline.comm.channel.grpc_client import GrpcClient
from paceline.comm.channel.grpc_server import GrpcServer
from paceline.comm.channel.reliable_queue import ReliableQueues
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError
from tests.bad_line import BadLine

pytestmark = [pytest.mark.capability("G12"), pytest.mark.timeout(240)]
GRACE, SECONDS = 100.0, 200.0
SIZES = (0, 10, 5_000, 200_000, 3)  # the fourth is longer than a connection


def over(line_breaks: int, seed: int, grace: float = GRACE) -> tuple[MessageChannel, MessageChannel, BadLine]:
    """The hub's end, and that of rank 1, with a bad line between them."""
    here, there = ReliableQueues(grace), ReliableQueues(grace)
    hub = GrpcServer(here, "127.0.0.1", [1], "token")
    line = BadLine(hub.port, breaks=line_breaks, seed=seed)
    caller = GrpcClient(there, "127.0.0.1", line.port, 1, "token")
    caller.connect(SECONDS)
    return GrpcChannel(here, [hub], ByteLedger()), GrpcChannel(there, [caller], ByteLedger()), line


def say(channel: MessageChannel, to: int, count: int) -> None:
    for k in range(count):
        channel.send(to, ChannelMessage("n", {"k": k}, [torch.full((SIZES[k % 5],), float(k))]), SECONDS)


def heard(channel: MessageChannel, count: int) -> list[int]:
    found = [channel.receive(SECONDS) for _ in range(count)]
    assert all(bool((m.tensors[0] == m.fields["k"]).all()) for m in found)
    return [message.fields["k"] for message in found]


def talk(seed: int, count: int = 15) -> tuple[list[int], list[int], int]:
    """What both have heard while both spoke, and how many connections broke."""
    hub, peer, line = over(6, seed)
    with line:
        hearing: list[int] = []
        other = threading.Thread(target=lambda: hearing.extend(heard(peer, count)))
        other.start()
        say(hub, 1, count)
        say(peer, 0, count)
        found = heard(hub, count)
        other.join()
        peer.flush(SECONDS)
        hub.flush(SECONDS)
        broken = line.num_broken
        peer.close()
        hub.close()
    return found, hearing, broken


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))])
def test_every_message_arrives_once_and_in_order_over_connections_that_break(seed: int) -> None:
    found, hearing, broken = talk(seed)
    assert found == hearing == [*range(15)]
    assert broken >= 3


def test_without_numbers_some_arrive_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: whatever comes is taken, as if nobody counted."""
    begin = reliable_queue.MessageAssembler.begin_call

    def takes_all(self: reliable_queue.MessageAssembler, number: int, num_bytes: int) -> int:
        if number - 1 != self._number:
            self._number = number - 1
            self._clear()
        return begin(self, number, num_bytes)

    monkeypatch.setattr(reliable_queue.MessageAssembler, "begin_call", takes_all)
    hub, peer, line = over(0, 0)
    with line:
        say(peer, 0, 3)
        assert heard(hub, 3) == [0, 1, 2]
        hub._queues.begin_call(1, 2, 0)  # as a call does whose answer was lost
        assert hub._queues.position(1).number == 1, "a letter that was taken would be taken again"
        peer.close()
        hub.close()


def test_a_link_that_is_gone_for_a_while_loses_nothing() -> None:
    hub, peer, line = over(0, 0)
    with line:
        line.block()
        say(hub, 1, 10)
        say(peer, 0, 10)
        assert hub.flush(0.5) is False
        line.let_through()
        assert heard(hub, 10) == heard(peer, 10) == [*range(10)]
        peer.close()
        hub.close()


def test_a_link_that_stays_away_is_a_rank_that_is_lost_by_name_on_both_sides() -> None:
    hub, peer, line = over(0, 0, grace=1.0)
    with line:
        line.block()
        with pytest.raises(CommunicationError, match="rank 1 is gone: it has been unreachable for") as caught:
            hub.receive(SECONDS)
        assert caught.value.peer == 1
        with pytest.raises(CommunicationError, match="rank 0 is gone: it has been unreachable for"):
            peer.receive(SECONDS)
        with pytest.raises(CommunicationError, match="rank 1 is gone"):
            hub.send(1, ChannelMessage("late"), SECONDS)
        line.let_through()
        peer.close()
        hub.close()
