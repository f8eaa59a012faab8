"""A server whose workers stop reading, leave or hang: the others go on, and every sample is accounted for."""

import json
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.comm.channel import ChannelMessage, MessageChannel, channel_builders, socket_channel
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.observe import JsonLinesSink
from paceline.observe.metrics_schema import find_schema_errors
from paceline.recipe import Recipe, Strategy
from paceline.session import Session
from paceline.session.fit_loop import fit
from paceline.sync.server import server_builders
from paceline.sync.server.server_policies import AsynchronousUpdates
from paceline.testing import RanksFailed, run_ranks
from paceline.testing.parity import build_test_session, make_task
from tests.marks import soak_param
from tests.parity.training_runs import pause_seldom

STEPS = 20
BUFFER_BYTES = 1 << 16
DEADLINE = 4.0
ASYNC, BACKUP = "servers=1 sync=server-async", "servers=1 sync=backup:1"


def digits(strategy: str, hidden: tuple[int, ...] = (32,), **changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "task": "digits",
        "options": {"model": "mlp", "hidden": list(hidden)},
        "steps": STEPS,
        "batch": {"size": 48, "shards": 6},
        "optimizer": {"name": "sgd", "lr": 0.05},
        "strategy": Strategy.parse(strategy),
    }
    return Recipe(**(settings | changes))


class Wrapped:
    """A channel, of which a test changes something."""

    def __init__(self, inner: MessageChannel) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def told(cluster: Cluster, session: Session, losses: list[float]) -> dict[str, Any]:
    """What a rank knows at the end."""
    return {
        "losses": losses,
        "lost": [record for name, record in session.events.take() if name == "lost"],
        "parameters": [p.detach().clone() for p in session.runner.sharded_model.computes.values()],
        "step": session.state.step,
        **session.rule.ledger.record(),
    }


def assert_agree(ranks: list[dict[str, Any]]) -> None:
    first, *others = ranks
    for other in others:
        assert other["losses"] == first["losses"]
        assert [other[k] for k in ("step", "taken", "applied", "dropped")] == [
            first[k] for k in ("step", "taken", "applied", "dropped")
        ]
        assert all(map(torch.equal, other["parameters"], first["parameters"]))


def with_small_buffers() -> None:
    """Sockets of this rank's channel take little at once."""
    listen, connect = socket_channel.listen_on_free_port, socket_channel.connect_to_hub

    def listening(address: str) -> socket.socket:
        found = listen(address)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)  # those accepted inherit it
        return found

    def connecting(*args: Any, **options: Any) -> socket.socket:
        found = connect(*args, **options)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        return found

    channel_builders.listen_on_free_port, channel_builders.connect_to_hub = listening, connecting


class Deaf(Wrapped):
    """Does not read its third ticket until another worker has done ten since."""

    def __init__(self, inner: MessageChannel, folder: Path, seconds: float) -> None:
        super().__init__(inner)
        self.folder, self.seconds, self.reads = folder, seconds, 0

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        self.reads += 1
        if self.reads == 3:
            (self.folder / "deaf").touch()
            expires = time.monotonic() + self.seconds
            while not (self.folder / "enough").exists() and time.monotonic() < expires:
                time.sleep(0.01)
            if (self.folder / "enough").exists():
                (self.folder / "in-time").touch()
        return self.inner.receive(deadline_seconds)


class Busy(Wrapped):
    """Counts what it pushes while the other is deaf; leaves work for that, which may start late."""

    def __init__(self, inner: MessageChannel, folder: Path) -> None:
        super().__init__(inner)
        self.folder, self.pushes = folder, 0

    def send(self, to: int, message: ChannelMessage, deadline_seconds: float) -> None:
        self.inner.send(to, message, deadline_seconds)
        if message.kind == "push":
            expires = time.monotonic() + 5.0  # a server that waits for each reader waits for this one
            while not (self.folder / "deaf").exists() and time.monotonic() < expires:
                time.sleep(0.01)
            self.pushes += 1
            if self.pushes == 10:
                (self.folder / "enough").touch()


class Watched(Wrapped):
    """The server's: how much waited at most for one worker; `blocks` is the fault of a server that waits."""

    def __init__(self, inner: MessageChannel, *, blocks: bool) -> None:
        super().__init__(inner)
        self.blocks, self.most, self.largest = blocks, 0, 0

    def send(self, to: int, message: ChannelMessage, deadline_seconds: float) -> None:
        self.inner.send(to, message, deadline_seconds)
        self.largest = max(self.largest, sum(t.nbytes for t in message.tensors))
        self.most = max(self.most, self.inner._inner.num_unsent_bytes(to))
        if self.blocks:
            self.inner.flush()


def with_deaf_worker(cluster: Cluster, folder: Path, seconds: float, blocks: bool) -> dict[str, Any]:
    with_small_buffers()
    session = pause_seldom(build_test_session(cluster, digits(ASYNC, hidden=(1024, 256))), 10)
    kind: Any = (Watched, Busy, Deaf)[cluster.global_rank]
    given = ({"blocks": blocks}, {"folder": folder}, {"folder": folder, "seconds": seconds})
    session.rule.channel = wrapped = kind(session.rule.channel, **given[cluster.global_rank])
    found = told(cluster, session, [stats.loss for stats in session.rounds()])
    if cluster.global_rank == 0:
        found |= {"most": wrapped.most, "largest": wrapped.largest}
    return found


@pytest.mark.capability("B3")
def test_a_worker_that_does_not_read_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """Its parameters are many times what its socket takes. It reads again, and nothing was lost."""
    found = run_ranks(with_deaf_worker, 3, tmp_path, 45.0, False)
    assert (tmp_path / "in-time").exists()
    server = found[0]
    assert server["taken"] == server["applied"] == 2 * STEPS and server["lost"] == []
    assert BUFFER_BYTES < server["most"] <= server["largest"] + 1000  # of one message, and its header
    assert_agree(found)


@pytest.mark.capability("B3")
def test_a_server_that_waits_for_each_reader_would_be_noticed(tmp_path: Path) -> None:
    run_ranks(with_deaf_worker, 3, tmp_path, 3.0, True)
    assert (tmp_path / "deaf").exists() and not (tmp_path / "in-time").exists()


class Left(Exception):
    """A worker has closed its channel."""


class Leaving(Wrapped):
    """Closes its end with its fourth ticket in hand, or as soon as it has pushed what it did for that."""

    def __init__(self, inner: MessageChannel, moment: str) -> None:
        super().__init__(inner)
        self.moment, self.tickets = moment, 0

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        message = self.inner.receive(deadline_seconds)
        self.tickets += message.kind == "ticket"
        if self.tickets == 4 and self.moment == "ticket":
            self._leave()
        return message

    def send(self, to: int, message: ChannelMessage, deadline_seconds: float) -> None:
        self.inner.send(to, message, deadline_seconds)
        if self.tickets == 4:
            self.inner.flush()
            self._leave()

    def _leave(self) -> None:
        self.inner.close()
        raise Left


class Forgetful(AsynchronousUpdates):
    """The fault: what a lost worker worked on is not handed out again."""

    def drop_worker(self, worker: int, ticket: Any) -> None:
        return


def with_leavers(
    cluster: Cluster,
    recipe: Recipe,
    exit_callbacks: tuple[int, ...],
    moment: str,
    policy: Any = AsynchronousUpdates,
) -> dict[str, Any] | str:
    with patch.object(server_builders, "AsynchronousUpdates", policy):
        session = pause_seldom(build_test_session(cluster, recipe), 10)
    if cluster.global_rank in exit_callbacks:
        session.rule.channel = Leaving(session.rule.channel, moment)
    losses = []
    try:
        losses += [stats.loss for stats in session.rounds()]
    except Left:
        return "left"
    except CommunicationError as error:
        return str(error)
    return told(cluster, session, losses)


def ending(cluster: Cluster, *args: Any) -> Any:
    """The same; the server raises what has ended it."""
    found = with_leavers(cluster, *args)
    if cluster.global_rank == 0:
        raise CommunicationError(str(found))
    return found


@pytest.mark.capability("B3", "I3")
@pytest.mark.parametrize("moment", ["ticket", "push"])
def test_under_an_asynchronous_server_others_do_the_work_of_one_that_left(moment: str) -> None:
    server, first, left, third = run_ranks(with_leavers, 4, digits(ASYNC, steps=40), (2,), moment)
    assert left == "left"
    assert_agree([server, first, third])
    assert server["step"] == 40
    assert server["taken"] == server["applied"] == 3 * 40  # every part once
    assert server["dropped"] == 0
    assert sum(server["staleness"].values()) == server["applied"]
    (event,) = server["lost"]
    assert (event["rank"], event["workers_left"]) == (2, 2) and "rank 2 is gone" in event["reason"]
    assert server["losses"][-1] < 0.8 * server["losses"][0]


@pytest.mark.capability("B3")
def test_work_that_is_not_given_back_would_be_noticed() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(ending, 4, digits(ASYNC, steps=40), (2,), "ticket", Forgetful)
    assert "all workers are idle, but step" in str(caught.value)


@pytest.mark.capability("I7")
def test_under_backup_workers_a_step_goes_on_without_one_that_left() -> None:
    recipe = digits(BACKUP, steps=100, optimizer={"name": "sgd", "lr": 0.1})
    found = run_ranks(with_leavers, 4, recipe, (2,), "ticket")
    server, first, left, third = found
    assert left == "left"
    assert_agree([server, first, third])
    assert server["step"] == 100 and server["applied"] == 2 * 100
    assert server["taken"] == server["applied"] + server["dropped"]
    assert set(server["staleness"]) == {"0"}
    assert [event["rank"] for event in server["lost"]] == [2]
    assert server["losses"][-1] < 0.8 * server["losses"][0]


@pytest.mark.capability("B3")
def test_fit_tells_its_sinks_and_trains_to_the_end_where_no_collective_needs_the_one_that_left(
    tmp_path: Path,
) -> None:
    """Without a run folder and held-out samples nothing between two rounds is collective over all ranks."""

    def run(cluster: Cluster) -> int | str:
        session = without_held_out(cluster)
        if cluster.global_rank == 2:
            session.rule.channel = Leaving(session.rule.channel, "ticket")
        sinks = [JsonLinesSink(tmp_path / "metrics.jsonl")] if session.is_first else []
        try:
            return fit(session, None, sinks).steps
        except Left:
            return "left"

    assert run_ranks(run, 4) == [STEPS, STEPS, "left", STEPS]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line["event"] == "lost"]
    assert (event["rank"], event["level"], find_schema_errors(event)) == (2, "warning", [])


def without_held_out(cluster: Cluster) -> Session:
    recipe = digits(ASYNC)
    return build_test_session(cluster, recipe, lambda: replace(make_task(recipe), held_out=None))


@pytest.mark.capability("B3", "I7")
@pytest.mark.parametrize(
    ("strategy", "exit_callbacks", "message"),
    [
        (BACKUP, (1, 2), "a step needs 2, 1 are left and 2 are lost"),
        (ASYNC, (1, 2, 3), "a step needs 1, 0 are left and 3 are lost"),
    ],
)
def test_too_few_that_are_left_are_an_error_that_names_the_others(
    strategy: str, exit_callbacks: tuple[int, ...], message: str
) -> None:
    """The server ends with it, and then the worker that is left loses the server."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(ending, 4, digits(strategy, steps=40), exit_callbacks, "ticket")
    text = str(caught.value)
    assert message in text
    assert all(f"rank {rank} is gone" in text for rank in exit_callbacks)


class Stuck(Wrapped):
    """Lives and reads, but says nothing for its fourth ticket."""

    def __init__(self, inner: MessageChannel, folder: Path) -> None:
        super().__init__(inner)
        self.folder, self.tickets = folder, 0

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        message = self.inner.receive(deadline_seconds)
        self.tickets += message.kind == "ticket"
        if self.tickets == 4:
            (self.folder / "hung").touch()
            all(iter(lambda: self.inner.receive(60.0), None))  # until the server hangs up
        return message


class StuckWithWorkOf(Wrapped):
    """Hangs as soon as it is given what the one that hung before it had worked on."""

    def __init__(self, inner: MessageChannel, folder: Path) -> None:
        super().__init__(inner)
        self.hung = folder / "hung"

    def receive(self, deadline_seconds: float) -> ChannelMessage:
        message = self.inner.receive(deadline_seconds)
        late = self.hung.exists() and time.time() - self.hung.stat().st_mtime > 0.75 * DEADLINE
        if late and message.kind == "ticket":
            self.inner.receive(60.0)
        return message


def with_stuck_worker(
    cluster: Cluster, recipe: Recipe, folder: Path, second: int = -1
) -> dict[str, Any] | str:
    session = pause_seldom(build_test_session(cluster, recipe), 10)
    session.net.deadline_seconds = DEADLINE
    if cluster.global_rank == 2:
        session.rule.channel = Stuck(session.rule.channel, folder)
    if cluster.global_rank == second:
        session.rule.channel = StuckWithWorkOf(session.rule.channel, folder)
    try:
        losses = [stats.loss for stats in session.rounds()]
    except CommunicationError as error:
        return str(error)
    return told(cluster, session, losses)


@pytest.mark.capability("B3", "I7")
@pytest.mark.parametrize("strategy", [ASYNC, soak_param(BACKUP)])
def test_a_worker_that_gives_no_sign_for_the_deadline_is_lost_and_the_others_wait_for_it(
    strategy: str, tmp_path: Path
) -> None:
    server, first, stuck, third = run_ranks(with_stuck_worker, 4, digits(strategy), tmp_path)
    assert "rank 0 is gone" in stuck
    assert_agree([server, first, third])
    assert server["step"] == STEPS
    assert server["taken"] == server["applied"] + server["dropped"]
    assert server["applied"] == STEPS * (3 if strategy == ASYNC else 2)
    (event,) = server["lost"]
    assert event["rank"] == 2 and "rank 2 has sent nothing for 4 s" in event["reason"]


@pytest.mark.soak
@pytest.mark.capability("B3")
def test_an_idle_worker_waits_for_as_many_as_hang_one_after_another(tmp_path: Path) -> None:
    """Rank 3 has nothing to do for almost two deadlines: the server tells it that it lives."""
    server, first, second, third = run_ranks(with_stuck_worker, 4, digits(ASYNC), tmp_path, 1)
    assert "rank 0 is gone" in first and "rank 0 is gone" in second
    assert_agree([server, third])
    assert [event["rank"] for event in server["lost"]] == [2, 1]
    assert server["taken"] == server["applied"] == 3 * STEPS
