"""The contract of channels over gRPC: the same as over plain sockets."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from paceline.comm.channel import ChannelMessage, MessageChannel
from paceline.comm.channel.grpc_channel import GrpcChannel
from paceline.comm.channel.grpc_client import GrpcClient
from paceline.comm.channel.grpc_protocol import SEND_METHOD, CallClaim, method_path, require_grpc
from paceline.comm.channel.grpc_server import GrpcServer
from paceline.comm.channel.reliable_queue import ReliableQueues, StreamPosition, encode_message_chunks
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError, DeadlineError, MissingExtraError
from paceline.testing.contracts import ChannelContract

pytestmark = [pytest.mark.capability("G12"), pytest.mark.timeout(240)]
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
    assert said == ["the server rejected 1 calls that do not belong to this job"]
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
        again(body, timeout=SECONDS, metadata=caller._claim_metadata(SEND_METHOD, StreamPosition(1, 0)))
        assert room.position(1) == StreamPosition(1, 0)
        claim = CallClaim.read(caller._claim_metadata(SEND_METHOD, StreamPosition(1, 0)))._replace(
            position=StreamPosition(2, 0)
        )
        with pytest.raises(grpc.RpcError, match="a different token"):
            again(body, timeout=SECONDS, metadata=claim.metadata())
        with pytest.raises(grpc.RpcError, match="no call of a job"):
            again(body, timeout=SECONDS)
    assert room.position(1) == StreamPosition(1, 0)
    close([theirs, ours])


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
