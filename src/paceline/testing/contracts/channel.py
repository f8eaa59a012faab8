"""What every channel keeps."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor

from paceline.comm.channel import Channel, Message
from paceline.errors import CommunicationError, DeadlineError

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
_SECONDS = 5.0


class ChannelContract(ABC):
    """Messages between a hub, rank 0, and one peer, rank 1."""

    @abstractmethod
    def pair(self) -> tuple[Channel, Channel]:
        """The hub's end and the peer's end, connected."""

    def test_any_dtype_and_shape_arrives_as_it_was(self) -> None:
        hub, peer = self.pair()
        tensors = [torch.ones(s).to(dtype) for dtype in _DTYPES for s in ((), (3,), (2, 0), (5, 7))]
        tensors.append(torch.arange(12.0).view(3, 4).T)  # not contiguous
        hub.send(1, Message("all", {"x": [1, None, "é"]}, tensors), _SECONDS)
        found = peer.receive(_SECONDS)
        assert (found.kind, found.fields, found.sender) == ("all", {"x": [1, None, "é"]}, 0)
        assert all(_equal(x, y) for x, y in zip(tensors, found.tensors, strict=True))
        hub.close()
        peer.close()

    def test_messages_of_one_sender_keep_their_order(self) -> None:
        hub, peer = self.pair()
        for k in range(50):
            hub.send(1, Message("n", {"k": k}, [torch.full((k,), k)]), _SECONDS)
        assert [peer.receive(_SECONDS).fields["k"] for _ in range(50)] == list(range(50))
        hub.close()
        peer.close()

    def test_large_messages_cross_each_other(self) -> None:
        hub, peer = self.pair()
        large = torch.arange(3_000_000.0)
        sending = threading.Thread(target=lambda: hub.send(1, Message("down", {}, [large]), _SECONDS))
        sending.start()
        found = peer.receive(_SECONDS)
        sending.join(_SECONDS)
        answer = threading.Thread(target=lambda: peer.send(0, Message("up", {}, found.tensors), _SECONDS))
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
                hub.send(1, Message("x", {}, [torch.zeros(100_000)]), _SECONDS)
        hub.close()


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)
