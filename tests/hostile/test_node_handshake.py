"""Between the nodes of a job: nobody hears what is said in its store, and strangers cost nothing."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from paceline.comm.channel.socket_channel import listen_on_free_port
from paceline.errors import CommunicationError
from paceline.job import handshake
from paceline.job.handshake import CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES, encode_hello, make_nonce
from paceline.job.rendezvous import StoreAccess, open_store
from paceline.job.store_client import StoreClient
from paceline.job.store_server import StoreServer
from paceline.job.tls import EphemeralCertificate

pytestmark = [pytest.mark.capability("O2"), pytest.mark.timeout(240)]
KEY = "the key of the job"
SECONDS = 60.0


@contextmanager
def served(said: list[str], tls: bool = True) -> Iterator[tuple[StoreServer, int]]:
    with StoreServer(said.append) as server:
        listener = socket.create_server(("127.0.0.1", 0))
        server.admit(listener, KEY, tls=tls)
        yield server, listener.getsockname()[1]


@contextmanager
def in_between(port: int, hand_on: Callable[[socket.socket, socket.socket], None]) -> Iterator[int]:
    """Whoever calls here is connected with the store by somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as enemy:

        def serve() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection(("127.0.0.1", port)) as far:
                hand_on(near, far)

        serving = enemy.submit(serve)
        yield listener.getsockname()[1]
        serving.result()


@pytest.mark.parametrize("tls", [True, False])
def test_who_listens_between_two_nodes_hears_nothing_of_the_store(tls: bool) -> None:
    """Values of many records in both directions, more than the sockets take at once."""
    heard, long = bytearray(), "a value that nobody else reads " * 300_000

    def listen(near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        while True:
            for one in select.select([near, far], [], [])[0]:
                data = one.recv(1 << 16)
                if not data:
                    return
                heard.extend(data)
                other[one].sendall(data)

    with served([], tls) as (server, port), in_between(port, listen) as called:
        local = StoreClient(server.connection_for(0))
        remote = open_store(StoreAccess(1, "127.0.0.1", called, KEY, tls=tls), SECONDS)
        remote.set("a name", long)
        assert remote.get("a name") == long.encode() and local.wait(["a name"], SECONDS) == [long.encode()]
        remote.close()
        local.close()
    assert len(heard) > 2 * len(long)
    assert (b"a name" in heard, b"nobody else" in heard) == (not tls, not tls)


def test_who_puts_his_certificate_between_two_nodes_is_rejected() -> None:
    """He hands on the greeting, which he cannot make, and then speaks TLS with each of both."""
    said: list[str] = []
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE

    def enemy(near: socket.socket, far: socket.socket) -> None:
        for giver, taker, size in (
            (near, far, HELLO_BYTES),
            (far, near, CHALLENGE_BYTES),
            (near, far, PROOF_BYTES),
            (far, near, 1),
        ):
            taker.sendall(giver.recv(size, socket.MSG_WAITALL))
        theirs = EphemeralCertificate.make().context.wrap_socket(near, server_side=True)
        ours = plain.wrap_socket(far)
        ours.sendall(theirs.recv(64))
        with pytest.raises(OSError, match=r"hung up|reset|EOF"):
            theirs.sendall(ours.recv(32) or fail("hung up"))
        theirs.close()

    def fail(why: str) -> bytes:
        raise ConnectionResetError(why)

    with served(said) as (server, port), in_between(port, enemy) as called:
        local = StoreClient(server.connection_for(0))
        with pytest.raises(CommunicationError, match="cannot reach the store"):
            open_store(StoreAccess(1, "127.0.0.1", called, KEY, tls=True), 2.0)
        local.close()
    assert len(said) == 1 and said[0].startswith("rejected: rank 1 has a different certificate")


def test_strangers_that_claim_ever_other_ranks_are_not_all_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "_MAX_REJECTED_RANKS", 3)
    with listen_on_free_port("127.0.0.1") as listener:
        seen = handshake.AuthenticatingListener(listener, KEY, range(100), log=pytest.fail)
        for rank in range(9):
            with socket.create_connection(listener.getsockname()) as stranger:
                stranger.sendall(encode_hello(rank, make_nonce()))
                while not seen._pending or not next(iter(seen._pending.values())).server_nonce:
                    seen.receive(0.1)
                stranger.sendall(bytes(32))
                while seen.num_rejected <= rank:
                    seen.receive(0.1)
        seen.close()
    assert len(seen.rejected_ranks) == 3 and set(seen.rejected_ranks.values()) == {"a different token"}
