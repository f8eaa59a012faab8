"""The store: its values, who waits for whom, who is gone, and who may come in."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from paceline.errors import CommunicationError
from paceline.job import store_client
from paceline.job.rendezvous import StoreAccess, open_store, read_store_value
from paceline.job.store_client import KeyTimeoutError, MemberLostError, StoreClient
from paceline.job.store_protocol import (
    ADD,
    APPEND,
    CHECK,
    COMPARE,
    COUNT,
    DELETE,
    SET,
    StoreMessage,
    encode_message,
    pop_message,
)
from paceline.job.store_server import KeyValueTable, StoreServer

LONG = 600.0  # no test may take that long: nobody waits for a deadline


@contextmanager
def members(*numbers: int) -> Iterator[tuple[StoreServer, list[StoreClient]]]:
    with StoreServer() as server:
        clients = [StoreClient(server.connection_for(number)) for number in numbers]
        yield server, clients
        for one in clients:
            one.close()


def test_values_are_set_counted_compared_and_dropped() -> None:
    values = KeyValueTable()
    assert values.answer(ADD, [b"n", b"2"]) == [b"2"] and values.answer(ADD, [b"n", b"-3"]) == [b"-1"]
    values.answer(SET, [b"k", b"a"])
    values.answer(APPEND, [b"k", b"b"])
    assert values.get([b"k", b"n"]) == [b"ab", b"-1"] and values.missing([b"k", b"x"]) == [b"x"]
    assert values.answer(CHECK, [b"k"]) == [b"1"] and values.answer(CHECK, [b"k", b"x"]) == [b"0"]
    assert values.answer(COMPARE, [b"c", b"", b"first"]) == [b"first"]
    assert values.answer(COMPARE, [b"c", b"", b"second"]) == [b"first"], "the first one decides"
    assert values.answer(COMPARE, [b"c", b"first", b"third"]) == [b"third"]
    assert values.answer(COUNT, []) == [b"3"]
    assert values.answer(DELETE, [b"c"]) == [b"1"] and values.answer(DELETE, [b"c"]) == [b"0"]


@pytest.mark.parametrize(
    ("word", "fields"), [(SET, [b"k"]), (ADD, [b"k", b"x"]), (b"?", []), (COUNT, [b"k"])]
)
def test_what_is_no_question_is_an_error(word: bytes, fields: list[bytes]) -> None:
    with pytest.raises(ValueError):
        KeyValueTable().answer(word, fields)


def test_a_store_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.job.store_server.MAX_STORE_BYTES", 100)
    values = KeyValueTable()
    values.answer(SET, [b"k", bytes(60)])
    with pytest.raises(ValueError, match="at most 100 bytes"):
        values.answer(SET, [b"l", bytes(60)])
    values.answer(SET, [b"k", bytes(99)])
    values.answer(DELETE, [b"k"])
    values.answer(SET, [b"l", bytes(99)])


@pytest.mark.parametrize("cut", [1, 8, 9, 12, 20])
def test_half_a_message_is_none_yet(cut: int) -> None:
    whole = encode_message(StoreMessage(7, b"S", (b"key", b"value")))
    buffer = bytearray(whole[:cut])
    assert pop_message(buffer) is None
    buffer += whole[cut:] + b"x"
    assert pop_message(buffer) == StoreMessage(7, b"S", (b"key", b"value")) and buffer == b"x"


def test_who_waits_is_answered_when_the_last_key_is_there() -> None:
    with members(0, 1) as (_, (first, second)), ThreadPoolExecutor(1) as other:
        waiting = other.submit(first.wait, ["a", "b"], LONG)
        second.request(SET, b"a", b"1")
        second.request(SET, b"b", b"2")
        assert waiting.result() == [b"1", b"2"]


def test_at_the_deadline_the_missing_keys_are_named() -> None:
    with members(0) as (_, (one,)):
        one.request(SET, b"a", b"1")
        with pytest.raises(KeyTimeoutError, match="b, c did not appear in") as caught:
            one.wait(["a", "b", "c"], 0.05)
        assert caught.value.keys == ("b", "c")


@pytest.mark.capability("O1")
@pytest.mark.parametrize("how", ["closes", "is reported by the launcher", "says nonsense"])
def test_nobody_waits_for_a_member_that_is_gone(how: str) -> None:
    with StoreServer() as server, ThreadPoolExecutor(1) as other:
        one, line = StoreClient(server.connection_for(0)), server.connection_for(3)
        waiting = other.submit(one.wait, ["never"], LONG, (0, 3))
        while not server._waiting:
            time.sleep(0.001)
        if how == "closes":
            line.close()
        elif how == "says nonsense":
            line.sendall(bytes(64))
        else:
            server.mark_lost(3)
        with pytest.raises(MemberLostError, match="rank 3 is gone") as caught:
            waiting.result()
        assert caught.value.members == (3,) and one.lost() == {3}
        with pytest.raises(KeyTimeoutError):
            one.wait(["never"], 0.01, (0,))
        line.close()
        one.close()


@pytest.mark.parametrize(
    "message",
    [
        StoreMessage(1, b"T"),
        StoreMessage(1, b"W", (b"inf", b"", b"never")),
        StoreMessage(1, b"W", (b"nan", b"", b"never")),
        StoreMessage(1, b"W", (b"9", b"", b"large", b"large")),
    ],
)
def test_no_message_of_a_member_ends_the_store(message: StoreMessage) -> None:
    """A log without a text, waits without an end, and values that do not fit into one message."""
    with members(0, 1) as (server, (one, _)), server.connection_for(2) as odd:
        one.request(SET, b"large", bytes(9 << 20))
        odd.sendall(encode_message(message))
        assert one.request(ADD, b"n", b"1") == (b"1",)
        time.sleep(0.05)  # until it waits for the other member
        assert one.request(ADD, b"n", b"1") == (b"2",)


def test_a_store_that_is_gone_or_silent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()
    monkeypatch.setattr(store_client, "_ANSWER_SECONDS", 0.05)
    with near:
        one = StoreClient(far)
        with pytest.raises(CommunicationError, match="job is gone: the server does not respond"):
            one.request(COUNT)
    with pytest.raises(CommunicationError, match="the store of the job is gone"):
        one.request(COUNT)
    one.close()


def test_an_interrupted_question_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler raises while the answer is under way: the next question gets its own answer."""
    with members(0) as (_, (one,)):
        heard = StoreClient._next

        def interrupted(self: StoreClient, expires: float) -> StoreMessage:
            monkeypatch.setattr(StoreClient, "_next", heard)
            raise KeyboardInterrupt

        monkeypatch.setattr(StoreClient, "_next", interrupted)
        with suppress(KeyboardInterrupt):
            one.request(SET, b"k", b"v")
        assert one.request(COUNT) == (b"1",)


def test_threads_share_a_client() -> None:
    with members(0, 1) as (_, (one, other)), ThreadPoolExecutor(5) as pool:
        waiting = pool.submit(one.wait, ["go"], LONG)
        counted = [pool.submit(lambda: [one.request(ADD, b"n", b"1") for _ in range(50)]) for _ in range(4)]
        for each in counted:
            each.result()
        other.request(SET, b"go", b"")
        assert waiting.result() == [b""] and one.request(ADD, b"n", b"0") == (b"200",)


# The door


@contextmanager
def door(said: list[str], tls: bool = False) -> Iterator[tuple[StoreServer, int]]:
    with StoreServer(said.append) as server:
        listener = socket.create_server(("127.0.0.1", 0))
        server.admit(listener, "the key", tls=tls)
        yield server, listener.getsockname()[1]


@pytest.mark.capability("O2")
@pytest.mark.parametrize("tls", [False, True])
def test_who_knows_the_key_comes_in_once_and_others_are_rejected(tls: bool) -> None:
    said: list[str] = []
    with door(said, tls) as (server, port):
        way = StoreAccess(1, "127.0.0.1", port, "the key", tls=tls)
        local = StoreClient(server.connection_for(0))
        remote = open_store(way, LONG)
        remote.set("k", "v")
        assert local.wait(["k"], LONG) == [b"v"]
        with pytest.raises(CommunicationError, match="rank 2 has a different token than the job at"):
            open_store(replace(way, number=2, token="another"), LONG)
        with pytest.raises(CommunicationError, match="rank 1 has already joined the job at"):
            open_store(way, LONG)
        while not said:
            time.sleep(0.001)
        assert said == ["rejected: rank 2 has a different token than this job\n"]
        assert read_store_value(way, "k", LONG) == "v"
        assert 1 not in local.lost(), "who asks as a visitor is not the member"
        remote.close()
        local.close()


@pytest.mark.parametrize("tls", [False, True])
def test_one_side_that_encrypts_and_one_that_does_not_are_named_on_both(tls: bool) -> None:
    said: list[str] = []
    with door(said, tls) as (_, port):
        with pytest.raises(CommunicationError, match=r"rank 1 has a different security\.tls than the job at"):
            open_store(StoreAccess(1, "127.0.0.1", port, "the key", tls=not tls), LONG)
        while not said:
            time.sleep(0.001)
    assert said == ["rejected: rank 1 has a different security.tls than this job\n"]


@pytest.mark.capability("O2")
def test_a_stranger_reads_and_writes_nothing() -> None:
    """The mutation twin is the member before it: the same words from who has the key are obeyed."""
    with door([]) as (server, port):
        local = StoreClient(server.connection_for(0))
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(encode_message(StoreMessage(1, SET, (b"k", b"v"))) + bytes(200))
            with suppress(ConnectionError):
                while stranger.recv(100):
                    pass
        assert local.request(CHECK, b"k") == (b"0",)
        local.close()
