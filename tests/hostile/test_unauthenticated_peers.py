"""Strangers at every door of a job: they cost it nothing, learn nothing, and are counted."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.comm.channel.socket_channel import accept_ranks, connect_to_hub, listen_on_free_port
from paceline.comm.routes.host_links import _connect_all, _open_listener
from paceline.errors import CommunicationError
from paceline.job import handshake
from paceline.job.handshake import CHALLENGE_BYTES, compute_proof, encode_hello, make_nonce, verify_proof
from paceline.job.mesh import RankGroup
from paceline.job.rendezvous import StoreAccess, open_store
from paceline.job.store_server import StoreServer
from tests.commands import run
from tests.dist.launch.actors import until
from tests.ports import free_port

pytestmark = [pytest.mark.capability("O2"), pytest.mark.timeout(240)]
KEY = "the key of the job"

GREETINGS = {
    "nothing": b"",
    "a bit": b"PC",
    "an older hello": struct.pack("!QQ", 12, 0) + json.dumps([1, KEY]).encode(),
    "a huge length": struct.pack("!QQ", 2**63, 2**63),
    "nested JSON": struct.pack("!QQ", 4096, 0) + b"[" * 4096,
    "not a text": bytes(range(256)),
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "a hello, and no proof": encode_hello(1, make_nonce()),
    "a hello of no rank": encode_hello(77, make_nonce()),
    "a hello and a wrong proof": encode_hello(1, make_nonce()) + bytes(32),
}


@contextmanager
def crowd(port: int, count: int, greeting: bytes) -> Iterator[list[socket.socket]]:
    """Strangers that say something and then keep the line."""
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    try:
        for one in strangers:
            one.sendall(greeting)
        yield strangers
    finally:
        for one in strangers:
            one.close()


@pytest.mark.parametrize("greeting", GREETINGS)
def test_a_stranger_does_not_keep_the_ranks_from_meeting(greeting: str) -> None:
    """The deadline is longer than the test may take: nobody waits for a stranger."""
    said: list[str] = []
    with listen_on_free_port("127.0.0.1") as listener, ThreadPoolExecutor(2) as ranks:
        port = listener.getsockname()[1]
        with crowd(port, 20, GREETINGS[greeting]):
            coming = [ranks.submit(connect_to_hub, "127.0.0.1", port, rank, KEY, 600.0) for rank in (1, 2)]
            found = accept_ranks(listener, KEY, [1, 2], 600.0, said.append)
            assert sorted(found) == [1, 2]
            for one in (*found.values(), *(future.result() for future in coming)):
                one.close()
    assert said == ["the server rejected 20 callers from outside this job"]


def test_more_strangers_than_there_is_room_for_do_not_either() -> None:
    with listen_on_free_port("127.0.0.1") as listener, ThreadPoolExecutor(1) as ranks:
        port = listener.getsockname()[1]
        with crowd(port, 3 * handshake._MAX_SILENT, b""):
            coming = ranks.submit(connect_to_hub, "127.0.0.1", port, 1, KEY, 600.0)
            found = accept_ranks(listener, KEY, [1], 600.0, lambda text: None)
            found[1].close()
            coming.result().close()


def hang_up(port: int, greeting: bytes) -> None:
    """Connect, 800 times in all, and hang up many at once."""
    for _ in range(4):
        with crowd(port, 200, greeting) as strangers:
            for one in strangers:  # a reset, and not an orderly end
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("greeting", ["nothing", "a hello, and no proof"])
@pytest.mark.parametrize("door", ["store", "hub"])
def test_a_flood_of_callers_that_hang_up_closes_no_door(door: str, greeting: str) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(2) as others, listen_on_free_port("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        if door == "hub":
            found = others.submit(accept_ranks, listener, KEY, [1], 600.0, said.append)
            hang_up(port, GREETINGS[greeting])
            connect_to_hub("127.0.0.1", port, 1, KEY, 600.0).close()
            found.result()[1].close()
        else:
            with StoreServer(said.append) as server:
                server.admit(listener, KEY)
                hang_up(port, GREETINGS[greeting])
                open_store(StoreAccess(1, "127.0.0.1", port, KEY), 600.0).set("k", "v")
    assert not any("Error" in line for line in said)


def test_a_caller_that_is_evicted_by_one_event_is_skipped_when_its_own_comes() -> None:
    """In one batch, the oldest caller makes room for another, and has hung up itself."""
    with listen_on_free_port("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        callers = handshake.AuthenticatingListener(listener, KEY, [1], log=pytest.fail)
        with crowd(port, handshake._MAX_SILENT, b"") as strangers:
            while len(callers._pending) < handshake._MAX_SILENT:
                callers.receive(1.0)
            with crowd(port, 1, b""):  # the listener is ready before all of them
                for one in strangers:
                    one.close()
                callers.receive(1.0)
                assert len(callers._pending) == 1 and callers.num_rejected == handshake._MAX_SILENT
        callers.close()


def test_a_caller_with_a_challenge_makes_no_room_for_silent_ones() -> None:
    with listen_on_free_port("127.0.0.1") as listener:
        port, ours = listener.getsockname()[1], make_nonce()
        callers = handshake.AuthenticatingListener(listener, KEY, [1], log=pytest.fail)
        with crowd(port, 1, encode_hello(1, ours)) as (friend,):
            while not any(caller.server_nonce for caller in callers._pending.values()):
                callers.receive(1.0)
            with crowd(port, 3 * handshake._MAX_SILENT, b"P"):
                while callers.num_rejected < 2 * handshake._MAX_SILENT:
                    callers.receive(1.0)
                theirs = friend.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)[:32]
                friend.sendall(compute_proof(KEY, handshake.CALLER_ROLE, 1, ours, theirs))
                while 1 not in callers.accepted:
                    callers.receive(1.0)
                callers.close_accepted()
        callers.close()


def test_no_error_that_a_caller_causes_ends_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    right = handshake.decode_hello

    def fragile(message: bytes) -> tuple[int, bytes]:
        if right(message)[0] == 77:
            raise KeyError("an error\x1b[2J of a kind that nobody expected")
        return right(message)

    monkeypatch.setattr(handshake, "decode_hello", fragile)
    with StoreServer(said.append) as server, listen_on_free_port("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        server.admit(listener, KEY)
        with crowd(port, 1, GREETINGS["a hello of no rank"]) as (stranger,):
            assert stranger.recv(1) == b""
            open_store(StoreAccess(1, "127.0.0.1", port, KEY), 600.0).set("k", "v")
    assert len(said) == 1 and "KeyError" in said[0] and "\x1b" not in said[0]


def test_nothing_that_is_said_is_the_key_or_can_be_said_again() -> None:
    """Who has heard a whole meeting cannot take part in the next one."""
    heard: list[bytes] = []
    with listen_on_free_port("127.0.0.1") as listener, ThreadPoolExecutor(1) as ranks:
        port = listener.getsockname()[1]

        def replayed() -> bytes:
            ours = make_nonce()
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(encode_hello(1, ours))
                challenge = line.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
                heard.append(challenge)
                line.sendall(challenge[32:])  # the server's own proof, said back to it
                answer = line.recv(1)
            assert answer != handshake.WELCOME
            return challenge

        replay = ranks.submit(replayed)
        friend = threading.Thread(
            target=lambda: (replay.result(), connect_to_hub("127.0.0.1", port, 1, KEY, 600.0))
        )
        friend.start()
        found = accept_ranks(listener, KEY, [1], 600.0, lambda text: None)
        friend.join()
        found[1].close()
    assert KEY.encode() not in heard[0]
    ours, theirs = make_nonce(), make_nonce()
    proof = compute_proof(KEY, b"caller", 1, ours, theirs)
    assert verify_proof(proof, KEY, b"caller", 1, ours, theirs)
    for other in (
        (KEY, b"called", 1, ours, theirs),
        (KEY, b"caller", 2, ours, theirs),
        (KEY, b"caller", 1, theirs, ours),
        (KEY + "x", b"caller", 1, ours, theirs),
        (KEY, b"caller", 1, make_nonce(), theirs),
    ):
        assert not verify_proof(proof, *other)


def test_a_server_with_another_key_is_left_at_once() -> None:
    with listen_on_free_port("127.0.0.1") as listener, ThreadPoolExecutor(1) as ranks:
        coming = ranks.submit(connect_to_hub, "127.0.0.1", listener.getsockname()[1], 1, "other", 600.0)
        seen = handshake.AuthenticatingListener(listener, KEY, [1], log=print)
        while not coming.done():
            seen.receive(0.1)
        seen.close()
        with pytest.raises(CommunicationError, match="rank 1 has a different token"):
            coming.result()
        assert not seen.accepted and seen.num_rejected == 1


# The meeting on one host

FLOOD = """
import os, socket, sys
os.setuid(65534)
address, count = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
lines = []
for _ in range(count):
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setblocking(False)
    try:
        line.connect(address)
        lines.append(line)
    except BlockingIOError:
        break
print(len(lines), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_the_backlog_that_another_user_fills_does_not_keep_ranks_from_meeting() -> None:
    listeners = [_open_listener(), _open_listener()]
    addresses = {place: one.getsockname().hex() for place, one in enumerate(listeners)}
    words = [sys.executable, "-c", FLOOD, addresses[0], "2000"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
        assert flood.stdout is not None
        assert int(flood.stdout.readline()) > 1000, "the backlog is not full"
        with ThreadPoolExecutor(2) as ranks:
            expires = float("inf")
            groups = [RankGroup("world", (0, 1), rank, None) for rank in (0, 1)]
            met = [ranks.submit(_connect_all, listeners[r], addresses, groups[r], expires) for r in (1, 0)]
            found = [one.result() for one in met]
        assert [sorted(one) for one in found] == [[0], [1]]
        flood.communicate("")
    for one in (*listeners, *found[0].values(), *found[1].values()):
        one.close()


@pytest.mark.parametrize("said", [b"", b"x", bytes(8), struct.pack("<Q", 2**63), bytes(4000)])
def test_a_caller_of_the_same_user_that_says_something_else_is_hung_up(said: bytes) -> None:
    listeners = [_open_listener(), _open_listener()]
    addresses = {place: one.getsockname().hex() for place, one in enumerate(listeners)}
    odd = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    odd.connect(bytes.fromhex(addresses[0]))
    if said:
        odd.send(said)
    with ThreadPoolExecutor(2) as ranks:
        groups = [RankGroup("world", (0, 1), rank, None) for rank in (0, 1)]
        met = [ranks.submit(_connect_all, listeners[r], addresses, groups[r], float("inf")) for r in (0, 1)]
        found = [one.result() for one in met]
    assert [sorted(one) for one in found] == [[1], [0]]
    for one in (odd, *listeners, *found[0].values(), *found[1].values()):
        one.close()


# The key of a job of several nodes


NODES = ("run", "--nodes", "2", "--rendezvous", "192.0.2.77:29500")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "a job on 2 nodes needs a key"),
        (("--token-file", "missing"), "cannot read the key of the job: the file does not exist"),
        (("--token-file", "/dev/zero"), "cannot read the key of the job: the file does not exist"),
        (("--token-file", "-"), "cannot read the key of the job: it is empty"),
    ],
)
def test_several_nodes_without_a_key_are_refused(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    done = run(tmp_path, *NODES, *words, "x.py")
    assert done.returncode == 2 and text in done.stderr and "next:" in done.stderr


def test_a_key_comes_by_file_or_standard_input_or_environment(tmp_path: Path) -> None:
    """With one, the job gets as far as binding an address that is not this machine's."""
    (tmp_path / "key").write_text("secret\n")
    command = [sys.executable, "-m", "paceline", *NODES, "--token-file", "-", "x.py"]
    for done in (
        subprocess.run(command, input="secret\n", capture_output=True, text=True, check=False),
        run(tmp_path, *NODES, "--token-file", tmp_path / "key", "x.py"),
        run(tmp_path, *NODES, "x.py", PACELINE_TOKEN="secret"),
        run(tmp_path, *NODES, "--insecure", "x.py"),
    ):
        assert done.returncode == 4 and "cannot listen on 192.0.2.77" in done.stderr, done.stderr


def test_no_command_takes_a_key_as_an_argument(tmp_path: Path) -> None:
    done = run(tmp_path, *NODES, "--token", "secret", "x.py")
    assert done.returncode == 2


def test_a_node_with_another_key_is_named_on_both_sides(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "x.py").write_text(
        "import torch.distributed as dist\nfrom paceline import Cluster\n"
        "Cluster.from_env().connect('cpu', 60.0)\ndist.barrier()\n"
    )
    meet = ("run", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--node-rank")
    command = [sys.executable, "-m", "paceline", *meet, "0", str(tmp_path / "x.py")]
    with (tmp_path / "said").open("w") as said:
        first = subprocess.Popen(command, env={**os.environ, "PACELINE_TOKEN": "a"}, stderr=said)
    wrong = run(tmp_path, *meet, "1", "x.py", PACELINE_TOKEN="b")
    assert wrong.returncode == 4 and "rank 1 has a different token than the job" in wrong.stderr
    until(lambda: "rejected: " in (tmp_path / "said").read_text())
    assert "rank 1 has a different token" in (tmp_path / "said").read_text()
    right = run(tmp_path, *meet, "1", "x.py", PACELINE_TOKEN="a")
    assert (right.returncode, first.wait()) == (0, 0), right.stderr
