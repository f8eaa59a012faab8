"""Clients of federated rounds over a network: the bits of simulated clients, and what a late one changes."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.comm.channel.message_channel import ChannelMessage
from paceline.errors import DeadlineError, RecipeError
from paceline.federated.cohort_table import CohortReplay
from paceline.observe.metrics_schema import find_schema_errors
from paceline.session import federated_client
from paceline.session.federated_client import ClientTraining
from paceline.session.session import Session
from tests.bad_line import BadLine
from tests.parity.network_clients import (
    KEY,
    SIZES,
    ClientThread,
    clients,
    events_of,
    make_task,
    network_recipe,
    new_port,
    same_bits,
    simulated_recipe,
    trained,
    wait_for_server,
)

pytestmark = [pytest.mark.capability("Q9"), pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def key_of_the_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The server of a test reads the key as a process does that no launcher has started."""
    monkeypatch.setenv("PACELINE_TOKEN", KEY)
    torch.set_num_threads(1)
    yield


# -- equal bits


def test_network_clients_have_the_bits_of_simulated_ones_over_a_line_that_breaks(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": {"name": "adamw", "lr": 0.01, "clip_norm": 0.5}}
    settings["outer"] = {"name": "adam"}
    alone, _ = trained(simulated_recipe(tmp_path / "simulated", **settings))
    port = new_port()
    with BadLine(port, breaks=3, seed=1, most=8_000) as line:
        others = [ClientThread(port, name) for name in [*SIZES][:3]]
        last: list[ClientThread] = []

        def come_over_the_line() -> None:
            wait_for_server(port)
            last.append(ClientThread(line.port, "site-3"))

        later = threading.Thread(target=come_over_the_line)
        later.start()
        weights, events = trained(network_recipe(tmp_path / "network", port, log={"wire": True}, **settings))
        later.join()
        for client in (*others, *last):
            client.wait()
            assert client.error is None and client.num_works >= 4
        assert line.num_broken
    assert same_bits(weights, alone)
    assert all(
        not record["left_out"] and record["bytes"].keys() == SIZES.keys() for record in events["cohort"]
    )
    wire = events_of(tmp_path / "network", "wire.jsonl")["wire"]
    assert {record["kind"] for record in wire} == {"hello", "recipe", "join", "work", "update"}
    assert not [error for record in wire for error in find_schema_errors(record)]
    for name in SIZES:
        sums = [sum(r["bytes"] for r in wire if r["client"] == name and r["direction"] == d) for d in WAYS]
        assert sums == [sum(r["bytes"][name][k] for r in events["cohort"]) for k in (0, 1)]


WAYS = ("sent", "received")


# -- who is refused


def test_names_keys_and_models_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(federated_client, "_NAME_SECONDS", 1.0)
    port = new_port()
    wide = ClientThread(port, "site-3", partial(make_task, "site-3", width=7))
    stranger = ClientThread(port, "stranger", token="another key")
    first = [ClientThread(port, name, partial(make_task, name, rest_seconds=0.1)) for name in [*SIZES][:3]]
    refused: list[ClientThread] = []

    def come_late() -> None:
        wide.wait()
        refused.append(ClientThread(port, "site-0"))
        refused[0].wait()
        first.append(ClientThread(port, "site-3"))

    later = threading.Thread(target=come_late)
    later.start()
    _, events = trained(network_recipe(tmp_path, port, steps=2))
    later.join()
    for client in first:
        client.wait()
        assert client.error is None
    stranger.wait()
    assert "0.weight has shape [7, 4], and on the server [6, 4]" in str(wide.error)
    assert "another client with the name site-0 is connected" in str(refused[0].error)
    assert "client stranger has a different token" in str(stranger.error)
    assert all(record["clients"] == [*SIZES] for record in events["cohort"])


def test_a_server_without_a_key_or_with_too_few_clients_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = {"threads": 1, "setup_deadline_seconds": 0.5}
    with pytest.raises(DeadlineError, match="4 clients should be connected, and after 0"):
        trained(network_recipe(tmp_path / "a", new_port(), runtime=runtime))
    monkeypatch.delenv("PACELINE_TOKEN")
    with pytest.raises(RecipeError, match="clients of a network need a key"):
        trained(network_recipe(tmp_path / "b", new_port()))
    monkeypatch.setenv("PACELINE_TOKEN", KEY)
    open_to_all = {"listen": "0.0.0.0:0"}
    with pytest.raises(RecipeError, match="without encryption"):
        trained(network_recipe(tmp_path / "c", new_port(), federated=open_to_all))


# -- clients that are left out


@pytest.mark.capability("Q6")
def test_a_late_client_is_left_out_named_and_replayed_and_counting_it_is_another_result(
    tmp_path: Path,
) -> None:
    port, late = new_port(), {"deadline_seconds": 0.6}
    tasks = {"site-2": partial(make_task, "site-2", rest_seconds=0.7)}
    with clients(port, tasks):
        weights, events = trained(network_recipe(tmp_path / "network", port, federated=late))
    left_out = [record["left_out"] for record in events["cohort"]]
    assert {"site-2": "it was late"} in left_out and all(out.keys() <= {"site-2"} for out in left_out)
    again = simulated_recipe(tmp_path / "again", debug={"replay_arrivals": str(tmp_path / "network")})
    assert same_bits(trained(again)[0], weights)
    with patch.object(CohortReplay, "left_out", lambda self, step: {}):
        counted = trained(again.replace(run_dir=str(tmp_path / "twin")))[0]
    assert not same_bits(counted, weights)


@pytest.mark.capability("Q6")
def test_a_client_whose_update_is_not_finite_is_left_out_and_named(tmp_path: Path) -> None:
    port = new_port()
    with clients(port, {"site-1": partial(make_task, "site-1", bad=True)}):
        weights, events = trained(network_recipe(tmp_path, port))
    reason = {"site-1": "its loss or update is not finite"}
    assert [record["left_out"] for record in events["cohort"]] == [reason] * 4
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


# -- the buffer


@pytest.mark.capability("Q5", "Z15")
def test_a_buffer_applies_updates_up_to_an_age_and_is_replayed_whoever_is_slow(tmp_path: Path) -> None:
    buffered = {"buffer": 3, "age": 1}

    def run(folder: str, slow: str, **settings: Any) -> tuple[Any, Any]:
        port = new_port()
        with clients(port, {slow: partial(make_task, slow, rest_seconds=0.25)}):
            recipe = network_recipe(tmp_path / folder, port, steps=8, federated=buffered, **settings)
            return trained(recipe)

    weights, events = run("first", "site-2")
    ages = [age for record in events["buffer"] for age in record["ages"]]
    dropped = [row for record in events["buffer"] for row in record["dropped"]]
    assert all(len(record["clients"]) == 3 for record in events["buffer"])
    assert set(ages) <= {0, 1} and all(age > 1 for _, _, age in dropped)
    ledger = events["work"][-1]
    assert ledger["applied"] == len(ages) == 24 and ledger["dropped"] == len(dropped)
    assert ledger["staleness"] == {str(age): ages.count(age) for age in sorted({*ages})}
    again, replayed = run("again", "site-0", debug={"replay_arrivals": str(tmp_path / "first")})
    assert same_bits(weights, again)
    for one, other in zip(events["buffer"], replayed["buffer"], strict=True):
        assert (one["clients"], one["works"], one["ages"]) == (
            other["clients"],
            other["works"],
            other["ages"],
        )


# -- what leaves a client

CANARY = 0x4A3B2C1D  # 3066631.2..., a bit pattern that no weight has


class Recorder:
    """A relay that keeps every byte that passes, in both directions."""

    def __init__(self, to: int) -> None:
        self.bytes, self._to = bytearray(), to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    near.close()  # the server does not listen yet
                    continue
                self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._copy, args=(source, sink), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.bytes += data
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections."""
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(10.0)


def with_canary(name: str) -> Any:
    task = make_task(name)
    value = struct.unpack("<f", struct.pack("<I", CANARY))[0]
    task.clients[name].tensors[0][:, 0] = value
    return task


def seen_on_the_wire(folder: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """Everything that a client with canary records says, and the lines of `wire.jsonl` about it."""
    port = new_port()
    relay = Recorder(port)
    try:
        spy = ClientThread(relay.port, "site-2", partial(with_canary, "site-2"))
        others = [ClientThread(port, name) for name in SIZES if name != "site-2"]
        slow = {"optimizer": {"name": "sgd", "lr": 1e-9}}  # features are large
        trained(network_recipe(folder, port, steps=2, log={"wire": True}, **slow))
        for client in (spy, *others):
            client.wait()
    finally:
        relay.close()
    wire = events_of(folder, "wire.jsonl")["wire"]
    return bytes(relay.bytes), [record for record in wire if record["client"] == "site-2"]


@pytest.mark.capability("Q8", "Z14")
def test_no_sample_leaves_a_client_and_one_that_does_is_found(tmp_path: Path) -> None:
    value = struct.unpack("<f", struct.pack("<I", CANARY))[0]
    canaries = [struct.pack("<f", value), struct.pack("<d", value), str(value).encode()]
    wire, listed = seen_on_the_wire(tmp_path / "right")
    shapes = {tuple(value.shape) for value in make_task().model.state_dict().values()}
    assert b'"samples": 20' in wire  # the relay sees plain bytes
    assert not [canary for canary in canaries if canary in wire]
    batches = {10, 20}
    for record in listed:
        assert all(tuple(shape) in shapes or len(shape) == 1 for _, shape in record["tensors"])
        assert not [shape for _, shape in record["tensors"] if len(shape) > 1 and shape[0] in batches]

    plain = ClientTraining.train

    def talkative(
        self: ClientTraining, session: Session, name: str, message: ChannelMessage
    ) -> ChannelMessage:
        update = plain(self, session, name, message)
        x = session.task.data.tensors[0]
        return ChannelMessage(update.kind, update.fields, [*update.tensors, x])

    with patch.object(ClientTraining, "train", talkative):
        wire, listed = seen_on_the_wire(tmp_path / "twin")
    assert canaries[0] in wire
    assert [shape for record in listed for _, shape in record["tensors"] if shape == [20, 4]]
