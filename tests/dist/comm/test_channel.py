"""Messages arrive whole and in order, from whoever is ready, and a peer that is gone has a name."""

import pytest
import torch

from paceline.comm.channel import Message, SocketChannel
from paceline.comm.hub import accept_all, connect, listen
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError, DeadlineError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def pair() -> tuple[SocketChannel, SocketChannel, ByteLedger]:
    ledger = ByteLedger()
    with listen("127.0.0.1") as listener:
        b = connect("127.0.0.1", listener.getsockname()[1], 1, "token", 5.0)
        a = SocketChannel(accept_all(listener, "token", [1], 5.0), ledger)
    return a, SocketChannel({0: b}, ByteLedger()), ledger


@pytest.mark.capability("B3")
def test_any_dtype_and_shape_arrives_as_it_was() -> None:
    a, b, ledger = pair()
    tensors = [torch.ones(shape).to(dtype) for dtype in DTYPES for shape in ((), (3,), (2, 0), (5, 7))]
    tensors.append(torch.arange(12.0).view(3, 4).T)  # not contiguous
    a.send(1, Message("all", {"x": [1, None, "é"]}, tensors), 5.0)
    found = b.receive(5.0)
    assert (found.kind, found.fields, found.sender) == ("all", {"x": [1, None, "é"]}, 0)
    for x, y in zip(tensors, found.tensors, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)
    payload = sum(x.numel() * x.element_size() for x in tensors)
    entry = ledger.rows["send", "channel"]
    assert entry.calls == 1 and 0 < entry.sent_bytes - payload < 1500
    a.close()
    b.close()


@pytest.mark.capability("B3")
def test_messages_of_one_sender_keep_their_order() -> None:
    a, b, _ = pair()
    for k in range(50):
        a.send(1, Message("n", {"k": k}, [torch.full((k,), k)]), 5.0)
    assert [b.receive(5.0).fields["k"] for _ in range(50)] == list(range(50))
    a.close()
    b.close()


@pytest.mark.capability("B3")
def test_nobody_speaks_and_somebody_leaves() -> None:
    a, b, _ = pair()
    with pytest.raises(DeadlineError, match=r"within 0\.05 s from ranks \[1\]"):
        a.receive(0.05)
    b.close()
    with pytest.raises(CommunicationError, match="rank 1 is gone"):
        a.receive(5.0)
    with pytest.raises(CommunicationError, match="rank 1 is gone"):
        for _ in range(100):
            a.send(1, Message("x", {}, [torch.zeros(100_000)]), 5.0)
    a.close()


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
