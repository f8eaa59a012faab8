"""The contract of message channels: order, deadlines, lost peers, and ownership of what is sent."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor

from paceline.comm.channel.message_channel import ChannelMessage, MessageChannel
from paceline.errors import CommunicationError, DeadlineError

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
_SECONDS = 100.0  # a limit that no test reaches, even on a slow and busy machine


class ChannelContract(ABC):
    """Tests of a channel between a hub, rank 0, and its peers."""

    @abstractmethod
    def star(self, num_peers: int) -> tuple[MessageChannel, list[MessageChannel]]:
        """Return the connected ends of the hub and of ranks 1 to `num_peers`."""

    def pair(self) -> tuple[MessageChannel, MessageChannel]:
        """Return the connected ends of the hub and of rank 1."""
        hub, (peer,) = self.star(1)
        return hub, peer

    def test_any_dtype_and_shape_arrives_as_it_was(self) -> None:
        hub, peer = self.pair()
        tensors = [torch.ones(s).to(dtype) for dtype in _DTYPES for s in ((), (3,), (2, 0), (5, 7))]
        tensors.append(torch.arange(12.0).view(3, 4).T)  # not contiguous
        hub.send(1, ChannelMessage("all", {"x": [1, None, "é"]}, tensors), _SECONDS)
        received = peer.receive(_SECONDS)
        assert (received.kind, received.fields, received.sender) == ("all", {"x": [1, None, "é"]}, 0)
        assert all(_same_tensor(x, y) for x, y in zip(tensors, received.tensors, strict=True))
        hub.close()
        peer.close()

    def test_messages_of_one_sender_keep_their_order(self) -> None:
        hub, peer = self.pair()
        for k in range(50):
            hub.send(1, ChannelMessage("n", {"k": k}, [torch.full((k,), k)]), _SECONDS)
        assert [peer.receive(_SECONDS).fields["k"] for _ in range(50)] == list(range(50))
        hub.close()
        peer.close()

    def test_large_messages_cross_each_other(self) -> None:
        hub, peer = self.pair()
        large = torch.arange(3_000_000.0)
        sending = threading.Thread(
            target=lambda: _send_and_flush(hub, 1, ChannelMessage("down", {}, [large]))
        )
        sending.start()
        received = peer.receive(_SECONDS)
        sending.join(_SECONDS)
        answer = threading.Thread(
            target=lambda: _send_and_flush(peer, 0, ChannelMessage("up", {}, received.tensors))
        )
        answer.start()
        assert torch.equal(hub.receive(_SECONDS).tensors[0], large)
        answer.join(_SECONDS)
        hub.close()
        peer.close()

    def test_silence_is_an_error_in_time(self) -> None:
        hub, peer = self.pair()
        with pytest.raises(DeadlineError):
            hub.receive(0.05)
        hub.close()
        peer.close()

    def test_a_peer_that_is_gone_is_named(self) -> None:
        hub, peer = self.pair()
        peer.close()
        with pytest.raises(CommunicationError, match="rank 1 is gone"):
            hub.receive(_SECONDS)
        with pytest.raises(CommunicationError, match="rank 1 is gone"):
            for _ in range(100):
                hub.send(1, ChannelMessage("x", {}, [torch.zeros(100_000)]), _SECONDS)
        hub.close()

    def test_a_peer_that_does_not_read_does_not_hold_up_the_others(self) -> None:
        """Rank 1 reads only after rank 2 has received ten answers."""
        hub, (silent, other) = self.star(2)
        answering = threading.Thread(target=_reply_times, args=(other, 10))
        answering.start()
        hub.send(1, ChannelMessage("large", {}, [_large_tensor()]), _SECONDS)
        for k in range(10):
            hub.send(2, ChannelMessage("question", {"k": k}), _SECONDS)
            received = hub.receive(_SECONDS)
            assert (received.sender, received.fields["k"]) == (2, k)
        answering.join(_SECONDS)
        flushing = threading.Thread(target=hub.flush)
        flushing.start()
        assert torch.equal(silent.receive(_SECONDS).tensors[0], _large_tensor())
        flushing.join(_SECONDS)
        for channel in (hub, silent, other):
            channel.close()

    def test_a_peer_that_never_reads_is_lost_by_name_and_the_others_stay(self) -> None:
        hub, (silent, other) = self.star(2)
        hub.send(1, ChannelMessage("large", {}, [_large_tensor()]), 0.1)
        with pytest.raises(DeadlineError, match="rank 1 does not read") as caught:
            hub.flush()
        assert caught.value.peer == 1
        hub.send(2, ChannelMessage("small"), _SECONDS)
        hub.flush()  # the error was raised once
        assert other.receive(_SECONDS).kind == "small"
        with pytest.raises(CommunicationError, match="rank 1 is gone"):
            hub.send(1, ChannelMessage("small"), _SECONDS)
        for channel in (hub, silent, other):
            channel.close()

    def test_what_was_sent_is_what_it_was_at_that_time(self) -> None:
        """A parameter can change before the peer has received it."""
        hub, peer = self.pair()
        x = _large_tensor()
        hub.send(1, ChannelMessage("x", {}, [x]), _SECONDS)
        x.zero_()
        flushing = threading.Thread(target=hub.flush)
        flushing.start()
        assert torch.equal(peer.receive(_SECONDS).tensors[0], _large_tensor())
        flushing.join(_SECONDS)
        hub.close()
        peer.close()

    def test_what_a_peer_said_before_it_was_lost_arrives(self) -> None:
        hub, (leaving, other) = self.star(2)
        leaving.send(0, ChannelMessage("last"), _SECONDS)
        leaving.flush()
        leaving.close()
        assert hub.receive(_SECONDS).kind == "last"
        with pytest.raises(CommunicationError, match="rank 1 is gone") as caught:
            hub.receive(_SECONDS)
        assert caught.value.peer == 1
        other.send(0, ChannelMessage("still here"), _SECONDS)
        assert hub.receive(_SECONDS).sender == 2
        hub.close()
        other.close()

    def test_a_peer_that_is_dropped_sees_that_the_hub_is_gone(self) -> None:
        hub, (dropped, other) = self.star(2)
        dropped.send(0, ChannelMessage("too late"), _SECONDS)
        other.send(0, ChannelMessage("in time"), _SECONDS)
        hub.drop(1)
        assert hub.receive(_SECONDS).sender == 2
        with pytest.raises(CommunicationError, match="rank 0 is gone"):
            dropped.receive(_SECONDS)
        for channel in (hub, dropped, other):
            channel.close()


def _large_tensor() -> Tensor:
    """Return a tensor that is larger than the buffer of any socket."""
    return torch.arange(10_000_000.0)


def _send_and_flush(channel: MessageChannel, to: int, message: ChannelMessage) -> None:
    channel.send(to, message, _SECONDS)
    channel.flush()


def _reply_times(channel: MessageChannel, times: int) -> None:
    for _ in range(times):
        channel.send(0, ChannelMessage("answer", channel.receive(_SECONDS).fields), _SECONDS)
        channel.flush()


def _same_tensor(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)
