"""gRPC by the certificate of a job: the same contract, nothing in the clear, and nobody without it."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import torch

from paceline.comm.channel import ChannelMessage, MessageChannel
from paceline.comm.channel.grpc_channel import GrpcChannel
from paceline.comm.channel.grpc_client import GrpcClient
from paceline.comm.channel.grpc_credentials import (
    UNENCRYPTED,
    client_credentials,
    server_credentials,
    sign_authority,
    verify_authority,
)
from paceline.comm.channel.grpc_server import GrpcServer
from paceline.comm.channel.reliable_queue import ReliableQueues
from paceline.comm.ledger import ByteLedger
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.tls import JobCertificate
from paceline.recipe import Recipe, Strategy
from paceline.testing import RanksFailed, run_ranks
from paceline.testing.contracts import ChannelContract
from paceline.testing.parity import build_test_session

pytestmark = [pytest.mark.capability("O2", "G12"), pytest.mark.timeout(240)]
KEY, GRACE, SECONDS = "the key of the job", 60.0, 60.0
OURS, THEIRS = JobCertificate.make(), JobCertificate.make()


def hub_of(ranks: range, *, tls: bool = True) -> tuple[GrpcServer, ReliableQueues]:
    room = ReliableQueues(GRACE)
    return GrpcServer(
        room,
        "127.0.0.1",
        ranks,
        KEY,
        server_credentials(OURS, [OURS.authority]) if tls else None,
    ), room


def calls(port: int, rank: int, credentials: grpc.ChannelCredentials | None) -> MessageChannel:
    room = ReliableQueues(GRACE)
    caller = GrpcClient(room, "127.0.0.1", port, rank, KEY, credentials=credentials)
    caller.connect(SECONDS)
    return GrpcChannel(room, [caller], ByteLedger())


class TestEncryptedGrpcChannel(ChannelContract):
    def star(self, num_peers: int) -> tuple[MessageChannel, list[MessageChannel]]:
        ranks = range(1, num_peers + 1)
        hub, room = hub_of(ranks)
        peers = [calls(hub.port, rank, client_credentials(OURS, OURS.authority)) for rank in ranks]
        hub.wait_for_all(SECONDS)
        return GrpcChannel(room, [hub], ByteLedger()), peers


class Tap:
    """Somebody in between, who hands on what both sides say, and remembers it."""

    def __init__(self, to: int) -> None:
        self.heard = bytearray()
        self._to, self._ends = to, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._hand_on, args=(source, sink), daemon=True).start()

    def _hand_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                sink.sendall(data)


@pytest.mark.parametrize("tls", [True, False])
def test_who_listens_hears_no_tensor_and_no_word(tls: bool) -> None:
    hub, room = hub_of(range(1, 2), tls=tls)
    tap = Tap(hub.port)
    theirs = calls(tap.port, 1, client_credentials(OURS, OURS.authority) if tls else None)
    ours, values = GrpcChannel(room, [hub], ByteLedger()), torch.arange(1000.0)
    ours.send(1, ChannelMessage("a kind of its own", {}, [values]), SECONDS)
    assert torch.equal(theirs.receive(SECONDS).tensors[0], values)
    in_clear = b"a kind of its own" in tap.heard or values[500:600].numpy().tobytes() in tap.heard
    assert in_clear is not tls and KEY.encode() not in tap.heard
    theirs.close()
    ours.close()
    tap.close()


CREDENTIALS = {
    "shows none": grpc.ssl_channel_credentials(OURS.authority),
    "shows another": client_credentials(THEIRS, OURS.authority),
    "believes another": client_credentials(OURS, THEIRS.authority),
    "does not encrypt": None,
}


@pytest.mark.parametrize("name", CREDENTIALS)
def test_who_has_not_the_certificate_is_turned_away_and_told(name: str) -> None:
    hub, _ = hub_of(range(1, 2))
    with pytest.raises(CommunicationError, match="do not have the same certificate"):
        calls(hub.port, 1, CREDENTIALS[name])
    calls(hub.port, 1, client_credentials(OURS, OURS.authority)).close()  # who has it comes in
    hub.close()


def test_the_key_of_the_job_vouches_for_an_authority() -> None:
    said = sign_authority(OURS.authority, 0, KEY)
    assert verify_authority(said, 0, 1, KEY, OURS) == OURS.authority
    for wrong, own, what in (
        (sign_authority(THEIRS.authority, 0, "another"), None, "the connection is intercepted"),
        (sign_authority(OURS.authority, 1, KEY), None, "the connection is intercepted"),
        (said, THEIRS, "Rank 1 has another certificate than rank 0"),
        (UNENCRYPTED, None, "one of them encrypts, the other does not"),
    ):
        with pytest.raises(CommunicationError, match=what):
            verify_authority(wrong, 0, 1, KEY, own)


def serve(cluster: Cluster, *securities: dict[str, str]) -> list[list[float]]:
    """The losses under each; what is said of `certificate` may be a word for each rank."""
    found = []
    for security in securities:
        named = {
            key: value.split()[-1 - cluster.global_rank] for key, value in security.items() if " " in value
        }
        recipe = Recipe(
            task="sum",
            steps=4,
            batch={"size": 8, "shards": 2},
            strategy=Strategy.parse("servers=1 sync=server-async channel=grpc"),
            security=security | named,
        )
        session = build_test_session(cluster, recipe)
        found.append([stats.loss for stats in session.rounds()])
        session.close()
    return found


def test_a_server_and_its_worker_encrypt_by_a_certificate_of_theirs_or_by_one_that_is_made(
    tmp_path: Path,
) -> None:
    """One worker, so that losses are the same."""
    OURS.save(tmp_path / "ours")
    server, worker = run_ranks(serve, 2, {"certificate": str(tmp_path / "ours")}, {"tls": "on"}, {})
    shown, made, plain = server
    assert len(shown) and shown == made == plain and server == worker


def test_a_worker_with_another_certificate_is_named(tmp_path: Path) -> None:
    for name, one in (("ours", OURS), ("theirs", THEIRS)):
        one.save(tmp_path / name)
    with pytest.raises(RanksFailed, match=r"Rank 1 has another certificate than rank 0\."):
        run_ranks(serve, 2, {"certificate": f"{tmp_path}/theirs {tmp_path}/ours"})
