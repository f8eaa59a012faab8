"""Messages arrive whole and in order, from whoever is ready, and a peer that is gone has a name."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from paceline.comm.channel import ChannelMessage, SocketChannel
from paceline.comm.channel.socket_channel import accept_ranks, connect_to_hub, listen_on_free_port
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError, DeadlineError
from paceline.testing.contracts import ChannelContract


def star(num_peers: int, ledger: ByteLedger) -> tuple[SocketChannel, list[SocketChannel]]:
    ranks = range(1, num_peers + 1)
    with listen_on_free_port("127.0.0.1") as listener, ThreadPoolExecutor(num_peers) as others:
        port = listener.getsockname()[1]
        coming = [others.submit(connect_to_hub, "127.0.0.1", port, rank, "token", 30.0) for rank in ranks]
        hub = SocketChannel(accept_ranks(listener, "token", ranks, 30.0), ledger)
    return hub, [SocketChannel({0: end.result()}, ByteLedger()) for end in coming]


def pair() -> tuple[SocketChannel, SocketChannel, ByteLedger]:
    ledger = ByteLedger()
    a, (b,) = star(1, ledger)
    return a, b, ledger


@pytest.mark.capability("B3")
class TestSocketChannel(ChannelContract):
    def star(self, num_peers: int) -> tuple[SocketChannel, list[SocketChannel]]:
        return star(num_peers, ByteLedger())


@pytest.mark.capability("B3")
def test_the_ledger_has_the_bytes_of_the_frame() -> None:
    a, b, ledger = pair()
    a.send(1, ChannelMessage("x", {}, [torch.zeros(1000), torch.zeros(3, dtype=torch.uint8)]), 5.0)
    header = len('["x", {}, [["float32", [1000]], ["uint8", [3]]]]')
    assert ledger.rows["send", "channel"].sent_bytes == 16 + header + 4000 + 3
    a.close()
    b.close()


@pytest.mark.capability("B3")
def test_a_peer_that_does_not_read_is_an_error_in_time() -> None:
    a, b, _ = pair()
    a.send(1, ChannelMessage("big", {}, [torch.zeros(10_000_000)]), 0.1)
    with pytest.raises(DeadlineError, match="rank 1 does not read"):
        a.flush()
    a.close()
    b.close()


@pytest.mark.capability("B3")
def test_a_stranger_is_turned_away_and_a_missing_rank_is_named() -> None:
    said: list[str] = []
    with listen_on_free_port("127.0.0.1") as listener, ThreadPoolExecutor(2) as others:
        port = listener.getsockname()[1]
        stranger = others.submit(connect_to_hub, "127.0.0.1", port, 1, "wrong", 30.0)
        friend = others.submit(connect_to_hub, "127.0.0.1", port, 1, "right", 30.0)
        with pytest.raises(DeadlineError, match=r"ranks \[2\] did not connect"):
            accept_ranks(listener, "right", [1, 2], 2.0, said.append)
        with pytest.raises(CommunicationError, match="rank 1 has a different token than the server"):
            stranger.result()
        friend.result().close()
    assert said == ["the server rejected 1 caller from outside this job"]
