"""Channels that are encrypted: the same contract, nothing in the clear, and nobody in between."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from paceline.comm.channel import ChannelMessage, MessageChannel, SocketChannel
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.handshake import needs_encryption
from paceline.job.tls import EncryptedSocket, EphemeralCertificate, encrypt_client_side, encrypt_server_side
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.contracts import ChannelContract
from paceline.testing.parity import build_test_session
from tests.parity.training_runs import each_case

pytestmark = [pytest.mark.capability("O2", "B3"), pytest.mark.timeout(240)]
KEY = "the key of the job"
SECONDS = 60.0


def both(
    called: Callable[[], EncryptedSocket], caller: Callable[[], EncryptedSocket]
) -> tuple[EncryptedSocket, EncryptedSocket]:
    with ThreadPoolExecutor(2) as sides:
        found = [sides.submit(called), sides.submit(caller)]
        return found[0].result(), found[1].result()


def secured(near: socket.socket, far: socket.socket, rank: int) -> tuple[EncryptedSocket, EncryptedSocket]:
    certificate = EphemeralCertificate.make()
    return both(
        lambda: encrypt_server_side(near, certificate, KEY, rank, SECONDS),
        lambda: encrypt_client_side(far, KEY, rank, SECONDS),
    )


class TestEncryptedChannel(ChannelContract):
    def star(self, num_peers: int) -> tuple[MessageChannel, list[MessageChannel]]:
        ends: dict[int, socket.socket] = {}
        peers: list[MessageChannel] = []
        for rank in range(1, num_peers + 1):
            near, far = secured(*connected(), rank)
            ends[rank] = near
            peers.append(SocketChannel({0: far}, ByteLedger()))
        return SocketChannel(ends, ByteLedger()), peers


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    return near, far


class Tap:
    """Somebody in between, who hands on what both sides say, and remembers it."""

    def __init__(self) -> None:
        self.heard = bytearray()
        self.near, inner = connected()
        outer, self.far = connected()
        for source, sink in ((inner, outer), (outer, inner)):
            threading.Thread(target=self._hand_on, args=(source, sink), daemon=True).start()

    def _hand_on(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            self.heard += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("encrypts", [True, False])
def test_who_listens_hears_no_tensor_and_no_word(encrypts: bool) -> None:
    tap = Tap()
    near, far = secured(tap.near, tap.far, 1) if encrypts else (tap.near, tap.far)
    ours, theirs = SocketChannel({1: near}, ByteLedger()), SocketChannel({0: far}, ByteLedger())
    values = torch.arange(1000.0)
    ours.send(1, ChannelMessage("a kind of its own", {}, [values]), SECONDS)
    assert torch.equal(theirs.receive(SECONDS).tensors[0], values)
    in_clear = b"a kind of its own" in tap.heard or values[500:600].numpy().tobytes() in tap.heard
    assert in_clear is not encrypts
    ours.close()
    theirs.close()


def beside(enemy: Callable[[], bytes], honest: Callable[[], object]) -> bytes:
    """What the enemy has heard while the honest side found him."""
    with ThreadPoolExecutor(2) as sides:
        attack, defence = sides.submit(enemy), sides.submit(honest)
        with pytest.raises(CommunicationError, match="the connection is intercepted"):
            defence.result()
        return attack.result()


def test_a_caller_finds_out_that_the_certificate_is_another() -> None:
    near, far = connected()

    def enemy() -> bytes:
        line = EphemeralCertificate.make().context.wrap_socket(near, server_side=True)
        said = line.recv(64)
        line.sendall(said[32:])  # the caller's own proof
        return said

    assert KEY.encode() not in beside(enemy, lambda: encrypt_client_side(far, KEY, 1, SECONDS))


def test_a_server_finds_out_that_its_caller_has_seen_another_certificate() -> None:
    """The enemy is called by one who knows the key, and says to the server what he hears."""
    near, far = connected()
    theirs, friends = connected()
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE

    def enemy() -> bytes:
        with ThreadPoolExecutor(1) as friend:
            coming = friend.submit(encrypt_client_side, friends, KEY, 1, SECONDS)
            line = EphemeralCertificate.make().context.wrap_socket(theirs, server_side=True)
            said = line.recv(64)
            plain.wrap_socket(far).sendall(said)
            line.close()
            with pytest.raises(ConnectionError):
                coming.result()
        return said

    certificate = EphemeralCertificate.make()
    assert KEY.encode() not in beside(enemy, lambda: encrypt_server_side(near, certificate, KEY, 1, SECONDS))


def test_another_key_is_an_error_on_both_sides() -> None:
    near, far = connected()
    certificate = EphemeralCertificate.make()
    with ThreadPoolExecutor(2) as sides:
        called = sides.submit(encrypt_server_side, near, certificate, KEY, 1, SECONDS)
        caller = sides.submit(encrypt_client_side, far, "another", 1, SECONDS)
        with pytest.raises(CommunicationError, match="rank 1"):
            called.result()
        with pytest.raises((CommunicationError, OSError)):
            caller.result()


def serve(cluster: Cluster, tls: str) -> dict[str, Any]:
    recipe = Recipe(
        task="sum",
        steps=4,
        batch={"size": 8, "shards": 2},
        strategy=Strategy.parse("servers=1 sync=server-async"),
        security={"tls": tls},
    )
    session = build_test_session(cluster, recipe)
    losses = [stats.loss for stats in session.rounds()]
    channel = session.rule.channel if cluster.global_rank else session.rule.channel._inner
    encrypts = all(isinstance(peer.socket, EncryptedSocket) for peer in channel._peers.values())
    session.close()
    return {"losses": losses, "encrypts": encrypts}


def test_a_server_and_its_worker_encrypt_where_the_recipe_says_so() -> None:
    """One worker: its losses are the same in the clear, which is what one node has by default."""
    server, worker = run_ranks(each_case, 2, serve, [("on",), ("auto",)])
    for rank in (server, worker):
        assert [one["encrypts"] for one in rank] == [True, False]
        assert len(rank[0]["losses"]) and rank[0]["losses"] == rank[1]["losses"] == server[0]["losses"]


def test_several_nodes_encrypt_by_default() -> None:
    assert [needs_encryption(tls, 1) for tls in ("auto", "on", "off")] == [False, True, False]
    assert [needs_encryption(tls, 2) for tls in ("auto", "on", "off")] == [True, True, False]
