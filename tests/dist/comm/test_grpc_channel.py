"""Channels over gRPC: the contract of plain sockets; over a line that breaks every message arrives once."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import grpc
import pytest
import torch

from paceline.comm.channel import ChannelMessage, MessageChannel, grpc_protocol, reliable_queue
from paceline.comm.channel.grpc_channel import GrpcChannel
from paceline.comm.channel.grpc_client import GrpcClient
from paceline.comm.channel.grpc_protocol import (
    JOIN_METHOD,
    LEAVE_METHOD,
    MAX_CALL_SECONDS,
    MEET_METHOD,
    POSITION_METHOD,
    RECEIVE_METHOD,
    SEND_METHOD,
    CallClaim,
    method_path,
    require_grpc,
)
from paceline.comm.channel.grpc_server import GrpcServer
from paceline.comm.channel.reliable_queue import ReliableQueues, StreamPosition, encode_message_chunks
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError, DeadlineError, MissingExtraError
from paceline.testing.contracts import ChannelContract
from tests.bad_line import BadLine

pytestmark = pytest.mark.capability("G12")
GRACE, SECONDS = 60.0, 60.0


def star(num_peers: int, ledger: ByteLedger) -> tuple[MessageChannel, list[MessageChannel]]:
    room, ranks = ReliableQueues(GRACE), range(1, num_peers + 1)
    hub = GrpcServer(room, "127.0.0.1", ranks, "token")
    peers = [calling(hub.port, rank) for rank in ranks]
    hub.wait_for_all(SECONDS)
    return GrpcChannel(room, [hub], ledger), peers


def calling(port: int, rank: int, token: str = "token") -> MessageChannel:
    room = ReliableQueues(GRACE)
    caller = GrpcClient(room, "127.0.0.1", port, rank, token)
    caller.connect(SECONDS)
    return GrpcChannel(room, [caller], ByteLedger())


def close(channels: Sequence[MessageChannel]) -> None:
    for channel in channels:
        channel.close()


class TestGrpcChannel(ChannelContract):
    def star(self, num_peers: int) -> tuple[MessageChannel, list[MessageChannel]]:
        return star(num_peers, ByteLedger())


def test_the_ledger_has_the_bytes_of_the_frame() -> None:
    ledger = ByteLedger()
    a, (b,) = star(1, ledger)
    a.send(1, ChannelMessage("x", {}, [torch.zeros(1000), torch.zeros(3, dtype=torch.uint8)]), SECONDS)
    header = len('["x", {}, [["float32", [1000]], ["uint8", [3]]]]')
    assert ledger.rows["send", "channel"].sent_bytes == 16 + header + 4000 + 3
    close([a, b])


def test_a_stranger_is_turned_away_and_a_missing_rank_is_named() -> None:
    said: list[str] = []
    hub = GrpcServer(ReliableQueues(GRACE), "127.0.0.1", [1, 2, 3], "right", log=said.append)
    with ThreadPoolExecutor(2) as others:
        friend = others.submit(calling, hub.port, 1, "right")
        with pytest.raises(CommunicationError, match="rank 2 has a different token than the server"):
            others.submit(calling, hub.port, 2, "wrong").result()
        with pytest.raises(CommunicationError, match="rank 1 has already joined"):
            friend.result() and calling(hub.port, 1, "right")
        with pytest.raises(
            DeadlineError, match=r"ranks \[2, 3\] did not connect.*rank 2 has a different token"
        ):
            hub.wait_for_all(0.1)
    assert said == ["the server rejected 1 call from outside this job"]
    close([hub, friend.result()])


def test_a_call_that_was_heard_brings_nothing_again() -> None:
    """Somebody says once more, word for word, what a rank has said; and what it said for another place."""
    room = ReliableQueues(GRACE)
    hub = GrpcServer(room, "127.0.0.1", [1], "token")
    caller = GrpcClient(there := ReliableQueues(GRACE), "127.0.0.1", hub.port, 1, "token")
    caller.connect(SECONDS)
    ours, theirs = GrpcChannel(room, [hub], ByteLedger()), GrpcChannel(there, [caller], ByteLedger())
    theirs.send(0, ChannelMessage("once"), SECONDS)
    assert ours.receive(SECONDS).kind == "once"
    theirs.flush(SECONDS)
    body = b"".join(encode_message_chunks(ChannelMessage("twice")))
    with grpc.insecure_channel(f"127.0.0.1:{hub.port}") as line:
        again = line.unary_unary(method_path(SEND_METHOD))
        said = caller._claim_metadata(SEND_METHOD, StreamPosition(1, 0))
        again(body, timeout=MAX_CALL_SECONDS, metadata=said)
        assert room.position(1) == StreamPosition(1, 0)
        claim = CallClaim.read(said)._replace(position=StreamPosition(2, 0))
        with pytest.raises(grpc.RpcError, match="a different token"):
            again(body, timeout=MAX_CALL_SECONDS, metadata=claim.metadata())
        with pytest.raises(grpc.RpcError, match="no call of a job"):
            again(body, timeout=MAX_CALL_SECONDS)
    assert room.position(1) == StreamPosition(1, 0)
    close([theirs, ours])


class HalfOpenCalls:
    """Calls on one connection that send metadata, and then neither a message nor an end."""

    def __init__(self, port: int) -> None:
        self._line, self._over = grpc.insecure_channel(f"127.0.0.1:{port}"), threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._line.close()

    def open(self, method: str, metadata: Sequence[tuple[str, bytes]], count: int) -> list[grpc.Future]:
        """Open so many of them, without a deadline."""
        call = self._line.stream_unary(method_path(method))
        return [call.future(self._silence(), metadata=metadata) for _ in range(count)]

    def _silence(self) -> Iterator[bytes]:
        self._over.wait()
        yield from ()


# The second one is the answer to more calls at once than a connection may have.
REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
METHODS = (MEET_METHOD, JOIN_METHOD, POSITION_METHOD, SEND_METHOD, RECEIVE_METHOD, LEAVE_METHOD)


@pytest.mark.capability("O2")
@pytest.mark.parametrize("method", METHODS)
def test_calls_that_send_half_of_a_request_hold_no_thread(method: str) -> None:
    """They are more than there are threads, and each one is answered although it has sent no message."""
    said: list[str] = []
    hub = GrpcServer(room := ReliableQueues(GRACE), "127.0.0.1", [1], "token", log=said.append)
    with HalfOpenCalls(hub.port) as strangers:
        codes = {one.code() for one in strangers.open(method, (), 60)}
        assert grpc.StatusCode.UNAUTHENTICATED in codes and codes <= REFUSED
        ours, theirs = GrpcChannel(room, [hub], ByteLedger()), calling(hub.port, 1)
        hub.wait_for_all(SECONDS)
        theirs.send(0, ChannelMessage("first"), SECONDS)
        assert ours.receive(SECONDS).kind == "first"
    assert len(said) == 1 and said[0].endswith(" calls from outside this job")
    close([theirs, ours])


@pytest.mark.capability("O2")
def test_copies_of_a_call_that_send_half_of_it_hold_no_thread() -> None:
    """Somebody has heard the call of a rank, and makes it again before the rank goes on."""
    room = ReliableQueues(GRACE)
    hub = GrpcServer(room, "127.0.0.1", [1], "token")
    caller = GrpcClient(there := ReliableQueues(GRACE), "127.0.0.1", hub.port, 1, "token")
    caller.connect(SECONDS)
    ours, theirs = GrpcChannel(room, [hub], ByteLedger()), GrpcChannel(there, [caller], ByteLedger())
    heard = caller._claim_metadata(SEND_METHOD, StreamPosition(1, 0))
    with HalfOpenCalls(hub.port) as strangers:
        assert {one.code() for one in strangers.open(SEND_METHOD, heard, 40)} <= REFUSED
        with_deadline = strangers._line.stream_unary(method_path(SEND_METHOD))
        for _ in range(40):
            with_deadline.future(strangers._silence(), metadata=heard, timeout=MAX_CALL_SECONDS)
        theirs.send(0, ChannelMessage("first"), SECONDS)
        theirs.send(0, ChannelMessage("second"), SECONDS)
        assert [ours.receive(SECONDS).kind for _ in range(2)] == ["first", "second"]
        # each copy ends the one before it, and the rank's own call the last
        assert len(hub._running) <= len(METHODS)
    close([theirs, ours])


@pytest.mark.capability("O2")
def test_a_connection_that_stays_silent_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_protocol, "_HANDSHAKE_MS", 200)
    hub = GrpcServer(ReliableQueues(GRACE), "127.0.0.1", [1], "token")
    with socket.create_connection(("127.0.0.1", hub.port), timeout=SECONDS) as silent:
        while silent.recv(1000):  # the server begins with its settings
            pass
    hub.close()


def test_without_grpcio_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(MissingExtraError, match="channel=grpc needs grpcio") as caught:
        require_grpc()
    assert caught.value.next_step == "pip install 'paceline[grpc]'"


def test_a_peer_that_has_all_may_leave_while_it_is_waited_for() -> None:
    """That it has left is for `receive` to say; one that leaves without what it was sent, for `flush`."""
    a, (b, c) = star(2, ByteLedger())
    a.send(1, ChannelMessage("last"), SECONDS)
    b.receive(SECONDS)
    b.close()
    assert a.flush(SECONDS)
    with pytest.raises(CommunicationError, match="rank 1 is gone"):
        a.receive(SECONDS)
    a.send(2, ChannelMessage("large", {}, [torch.zeros(10_000_000)]), SECONDS)
    c.close()
    with pytest.raises(CommunicationError, match="rank 2 is gone"):
        a.flush(SECONDS)
    a.close()


class Impostor(GrpcServer):
    """Does not know the key, and believes everybody."""

    def _claim(self, method: str, context: grpc.ServicerContext) -> CallClaim:
        return CallClaim.read(context.invocation_metadata())


def test_a_hub_that_does_not_know_the_key_is_found_by_who_calls_it() -> None:
    hub = Impostor(ReliableQueues(GRACE), "127.0.0.1", [1], "guessed")
    with pytest.raises(CommunicationError, match="rank 1 has a different token than the server"):
        calling(hub.port, 1, "right")
    hub.close()


GRACE_OVER_BAD_LINE, SECONDS_OVER_BAD_LINE = 100.0, 200.0
SIZES = (0, 10, 5_000, 200_000, 3)  # the fourth is longer than a connection


def over(
    line_breaks: int, seed: int, grace: float = GRACE_OVER_BAD_LINE
) -> tuple[MessageChannel, MessageChannel, BadLine]:
    """The hub's end, and that of rank 1, with a bad line between them."""
    here, there = ReliableQueues(grace), ReliableQueues(grace)
    hub = GrpcServer(here, "127.0.0.1", [1], "token")
    line = BadLine(hub.port, breaks=line_breaks, seed=seed)
    caller = GrpcClient(there, "127.0.0.1", line.port, 1, "token")
    caller.connect(SECONDS_OVER_BAD_LINE)
    return GrpcChannel(here, [hub], ByteLedger()), GrpcChannel(there, [caller], ByteLedger()), line


def say(channel: MessageChannel, to: int, count: int) -> None:
    for k in range(count):
        channel.send(
            to, ChannelMessage("n", {"k": k}, [torch.full((SIZES[k % 5],), float(k))]), SECONDS_OVER_BAD_LINE
        )


def heard(channel: MessageChannel, count: int) -> list[int]:
    found = [channel.receive(SECONDS_OVER_BAD_LINE) for _ in range(count)]
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
        peer.flush(SECONDS_OVER_BAD_LINE)
        hub.flush(SECONDS_OVER_BAD_LINE)
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
            hub.receive(SECONDS_OVER_BAD_LINE)
        assert caught.value.peer == 1
        with pytest.raises(CommunicationError, match="rank 0 is gone: it has been unreachable for"):
            peer.receive(SECONDS_OVER_BAD_LINE)
        with pytest.raises(CommunicationError, match="rank 1 is gone"):
            hub.send(1, ChannelMessage("late"), SECONDS_OVER_BAD_LINE)
        line.let_through()
        peer.close()
        hub.close()
