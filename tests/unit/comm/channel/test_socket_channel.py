"""What one peer does not take waits for it alone, as a copy, and is gone when it was taken."""

import socket
from collections.abc import Iterator
from math import inf

import pytest

from paceline.comm.channel.socket_channel import SocketSendBuffer

LARGE = bytes(range(256)) * 40_000  # 10 MB: no socket takes it at once


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.settimeout(5.0)
        yield here, there


def take(there: socket.socket, outbox: SocketSendBuffer, size: int) -> bytes:
    """Read so much, while the outbox is written."""
    found = bytearray()
    while len(found) < size:
        outbox.write()
        found += there.recv(1 << 20)
    return bytes(found)


@pytest.mark.capability("B3")
def test_small_parts_go_out_at_once_and_nothing_waits(ends: tuple[socket.socket, socket.socket]) -> None:
    outbox = SocketSendBuffer(ends[0])
    outbox.put([memoryview(b"head"), memoryview(b""), memoryview(b"body")], 1.0)
    assert outbox.num_bytes == 0 and outbox.expires_at == inf
    assert ends[1].recv(100) == b"headbody"


@pytest.mark.capability("B3")
def test_what_waits_is_a_copy_and_goes_out_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    outbox, owned = SocketSendBuffer(ends[0]), bytearray(LARGE)
    outbox.put([memoryview(owned)], 1.0)
    outbox.put([memoryview(b"next")], 1.0)
    assert 0 < outbox.num_bytes < len(LARGE) + 4  # the socket has taken some
    owned[:] = bytes(len(owned))
    assert take(ends[1], outbox, len(LARGE) + 4) == LARGE + b"next"
    assert outbox.num_bytes == 0


@pytest.mark.capability("B3")
def test_nothing_is_kept_of_what_was_taken(ends: tuple[socket.socket, socket.socket]) -> None:
    """One message after another: never more than one of them waits."""
    outbox = SocketSendBuffer(ends[0])
    for _ in range(3):
        outbox.put([memoryview(LARGE)], 1.0)
        assert 0 < outbox.num_bytes < len(LARGE)
        assert take(ends[1], outbox, len(LARGE)) == LARGE
        assert outbox.num_bytes == 0


@pytest.mark.capability("B3")
def test_one_outbox_does_not_wait_for_another(ends: tuple[socket.socket, socket.socket]) -> None:
    full = SocketSendBuffer(ends[0])
    full.put([memoryview(LARGE)], 1.0)
    waiting = full.num_bytes
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        outbox = SocketSendBuffer(here)
        for k in range(10):
            outbox.put([memoryview(bytes([k]))], 1.0)
            full.write()  # nobody reads: it takes nothing, and returns
        assert there.recv(100) == bytes(range(10))
    assert full.num_bytes == waiting


@pytest.mark.capability("B3")
def test_patience_counts_from_the_last_byte_that_was_taken(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("paceline.comm.channel.socket_channel.time.monotonic", lambda: now)
    outbox = SocketSendBuffer(ends[0])
    now = 10.0
    outbox.put([memoryview(LARGE)], 5.0)
    assert outbox.expires_at == 15.0
    now = 12.0
    outbox.write()  # it takes nothing
    assert outbox.expires_at == 15.0
    ends[1].recv(1 << 20)
    now = 14.0
    outbox.write()
    assert outbox.expires_at == 19.0


@pytest.mark.capability("B3")
def test_a_broken_connection_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].close()
    with pytest.raises(OSError, match="Broken pipe"):
        SocketSendBuffer(ends[0]).put([memoryview(b"x")], 1.0)
