"""Frames of a channel that lie about their sizes or hold something else: an error with the rank."""

from __future__ import annotations

import json
import socket

import pytest
import torch

from paceline.comm.channel import FRAME_LENGTHS, ChannelMessage, SocketChannel
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError

pytestmark = [pytest.mark.capability("B3"), pytest.mark.timeout(240)]


def exchange(frame: bytes) -> object:
    """What a channel makes of the bytes of a peer that then hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    channel = SocketChannel({1: ours}, ByteLedger())
    try:
        theirs.sendall(frame)
        theirs.close()
        return channel.receive(60.0)
    finally:
        channel.close()


def framed(header: object, body: bytes = b"", *, head: int = -1, all_bodies: int = -1) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    first = len(text) if head < 0 else head
    return FRAME_LENGTHS.pack(first, len(body) if all_bodies < 0 else all_bodies) + text + body


LIES = {
    "a huge header": framed(b"", head=2**62),
    "a huge body": framed(["x", {}, []], all_bodies=2**62),
    "a huge tensor": framed(["x", {}, [["float32", [2**60]]]], b"1234"),
    "no type": framed(["x", {}, [["nn", [1]]]], b"1234"),
    "below zero": framed(["x", {}, [["float32", [-1, -1]]]], b"1234"),
    "more than there is": framed(["x", {}, [["float32", [2]]]], b"1234"),
    "less than there is": framed(["x", {}, []], b"1234"),
    "a number": framed(3),
    "nested": framed(b"[" * 50_000),
    "no text": framed(b"\xff\xfe"),
    "a list of fields": framed(["x", [], []]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_frame_that_lies_is_an_error_with_the_rank_and_takes_no_memory(lie: str) -> None:
    with pytest.raises(CommunicationError, match=r"rank 1 (sent an invalid message|is gone)"):
        exchange(LIES[lie])


def test_a_frame_that_does_not_lie_arrives() -> None:
    head, bodies = ChannelMessage("x", {"a": 1}, [torch.arange(5)]).encode()
    message = exchange(head + b"".join(bodies))
    assert isinstance(message, ChannelMessage) and message.tensors[0].tolist() == [0, 1, 2, 3, 4]
