"""Messages arrive whole and in order, from whoever is ready, and a peer that is gone has a name."""

import pytest
import torch

from paceline.comm.channel import Message, SocketChannel
from paceline.comm.channel.hub import accept_all, connect, listen
from paceline.comm.ledger import ByteLedger
from paceline.errors import DeadlineError
from paceline.testing.contracts import ChannelContract


def pair() -> tuple[SocketChannel, SocketChannel, ByteLedger]:
    ledger = ByteLedger()
    with listen("127.0.0.1") as listener:
        b = connect("127.0.0.1", listener.getsockname()[1], 1, "token", 5.0)
        a = SocketChannel(accept_all(listener, "token", [1], 5.0), ledger)
    return a, SocketChannel({0: b}, ByteLedger()), ledger


@pytest.mark.capability("B3")
class TestSocketChannel(ChannelContract):
    def pair(self) -> tuple[SocketChannel, SocketChannel]:
        return pair()[:2]


@pytest.mark.capability("B3")
def test_the_ledger_has_the_bytes_of_the_frame() -> None:
    a, b, ledger = pair()
    a.send(1, Message("x", {}, [torch.zeros(1000), torch.zeros(3, dtype=torch.uint8)]), 5.0)
    header = len('["x", {}, [["float32", [1000]], ["uint8", [3]]]]')
    assert ledger.rows["send", "channel"].sent_bytes == 16 + header + 4000 + 3
    a.close()
    b.close()


@pytest.mark.capability("B3")
def test_a_peer_that_does_not_read_is_an_error_in_time() -> None:
    a, b, _ = pair()
    with pytest.raises(DeadlineError, match="rank 1 does not read"):
        a.send(1, Message("big", {}, [torch.zeros(10_000_000)]), 0.1)
    a.close()
    b.close()


@pytest.mark.capability("B3")
def test_a_stranger_is_turned_away_and_a_missing_rank_is_named() -> None:
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        stranger = connect("127.0.0.1", port, 1, "wrong", 5.0)
        friend = connect("127.0.0.1", port, 1, "right", 5.0)
        with pytest.raises(DeadlineError, match=r"ranks \[2\] did not connect"):
            accept_all(listener, "right", [1, 2], 0.3)
        assert stranger.recv(1) == b""
        stranger.close()
        friend.close()
