"""Stages of one host send each other tensors in memory: what a backend carries, a late and a lost stage."""

from __future__ import annotations

import gc
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.comm import Net
from paceline.comm.routes import HostMessenger, connect_single_host_group, host_messages
from paceline.comm.routes.host_messages import MessageBuffers
from paceline.errors import CommunicationError, DeadlineError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.parallel.pipeline import HostMemoryTransport, StageTransport
from paceline.parallel.pipeline.p2p_message import MessageHeader
from paceline.testing import RanksFailed, run_ranks
from tests.dist.test_p2p_backend import MESSAGES

SIZES = (100, 5000, 100_000, 3)  # values; the third needs larger buffers than all before it


def start(cluster: Cluster, net: Net) -> tuple[HostMemoryTransport, RankGroup]:
    group = Mesh.build(cluster, {"pipeline": cluster.world_size}).axes["pipeline"]
    links = connect_single_host_group(group, net)
    assert links is not None
    return HostMemoryTransport(HostMessenger(net, group, links)), group


def held() -> tuple[int, int]:
    """Bytes of messages that this process has mapped, by the kernel, and its open files."""
    gc.collect()
    maps = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if MAPS in line]
    ends = [[int(x, 16) for x in place.split("-")] for place in maps]
    return sum(end - start for start, end in ends), len(list(Path("/proc/self/fd").iterdir()))


MAPS = "paceline-messages"


def exchange(cluster: Cluster) -> dict[str, Any]:
    """All messages are sent before the first is asked for, three times, and answered in another order."""
    net = Net(60.0)
    first, group = start(cluster, net)
    first.close()
    del first
    before = held()
    wire, _ = start(cluster, net)
    other, found = 1 - group.rank, dict[str, Any](arrived=[], mapped=[])
    for times in range(3):
        for number, tensors in enumerate(MESSAGES):
            wire.send(other, tensors, times + 0.25, key=number)
        net.barrier(group)  # all are on the way
        for number in reversed(range(len(MESSAGES))):
            tensors, note = wire.receive(other, key=number)
            found["arrived"].append(note == times + 0.25 and [t.clone() for t in tensors])
            for t in tensors:  # as a module may: nothing else lies there
                assert t.storage_offset() == 0 and t.untyped_storage().nbytes() == t.nbytes
                t.zero_()
        wire.flush()
        found["mapped"].append(held()[0])
    row = net.ledger.rows["send", group.name]
    found["counts"] = row.calls, row.payload_bytes
    found["given up"] = give_up(wire, other, net, group)
    wire.close()
    del wire
    found["left"] = held() == before
    return found


def give_up(wire: StageTransport, other: int, net: Net, group: RankGroup) -> list[float]:
    """What arrives after an attempt that rank 1 gives up when rank 0 has begun its next."""
    wire.send(other, [torch.full((3,), -1.0)], key=3)
    wire.send(other, [torch.full((3,), -2.0)], key=4)
    if group.rank == 0:
        wire.abort()
        wire.send(other, [torch.full((3,), 5.0)], key=3)
        net.barrier(group)
    else:
        net.barrier(group)
        net.deadline_seconds = 0.5
        with pytest.raises(DeadlineError):
            wire.receive(other, key=8)
        net.deadline_seconds = 60.0
        wire.send(other, [torch.full((3,), -3.0)], key=3)
        wire.abort()
        wire.send(other, [torch.full((3,), 5.0)], key=3)
    found = [float(wire.receive(other, key=3)[0][0][0])]
    wire.flush()
    return found


@pytest.mark.capability("D1", "G14")
def test_messages_in_memory_are_those_that_were_sent(talks: list[dict[str, Any]]) -> None:
    heads = [max(512, -(-8 * (5 + sum(2 + t.dim() for t in tensors)) // 64) * 64) for tensors in MESSAGES]
    sizes = [
        head + sum(-(-t.nbytes // 64) * 64 for t in tensors)
        for head, tensors in zip(heads, MESSAGES, strict=True)
    ]
    assert any(head > 512 for head in heads)
    for found in talks:
        for tensors, sent in zip(found["arrived"], [*reversed(MESSAGES)] * 3, strict=True):
            assert [(t.dtype, t.shape) for t in tensors] == [(t.dtype, t.shape) for t in sent]
            assert all(torch.equal(a, b) for a, b in zip(tensors, sent, strict=True))
        assert found["counts"] == (3 * len(MESSAGES), 3 * sum(sizes))
        pages = [-(-size // 4096) * 4096 for size in sizes]
        assert found["mapped"] == [2 * sum(pages)] * 3  # what it writes and reads; then they are used again
        assert found["given up"] == [5.0]
        assert found["left"]


class Careless(MessageBuffers):
    """Takes every buffer for free: the mutation."""

    def _choose(self, num_bytes: int) -> int:
        self._in_flight_buffers.clear()
        return super()._choose(num_bytes)

    def free_oldest(self) -> None:
        """Nothing is kept."""


def grow(cluster: Cluster, buffers: type[MessageBuffers]) -> list[bool]:
    """Whether messages that grow and shrink arrive as they were, if four are on the way at a time."""
    net, found = Net(60.0), list[bool]()
    with patch.object(host_messages, "MessageBuffers", buffers):
        wire, group = start(cluster, net)
    for times in range(3):
        sent = [torch.full((size,), float(10 * times + k)) for k, size in enumerate(SIZES)]
        for x in sent:
            wire.send(1 - group.rank, [x])
        net.barrier(group)  # all are there before the first is read
        found += [torch.equal(wire.receive(1 - group.rank)[0][0], x) for x in sent]
        net.barrier(group)
    wire.close()
    return found


def keeps(cluster: Cluster) -> bool:
    """Whether what was received stays as it was when the next message is there."""
    net = Net(60.0)
    wire, group = start(cluster, net)
    wire.send(1 - group.rank, [torch.ones(50)])
    first = wire.receive(1 - group.rank)[0][0]
    wire.flush()  # its sender hears that it was taken
    net.barrier(group)
    wire.send(1 - group.rank, [torch.zeros(50)])
    wire.receive(1 - group.rank)
    wire.flush()
    wire.close()
    return torch.equal(first, torch.ones(50))


def mutations(cluster: Cluster) -> dict[str, Any]:
    found = {"right": grow(cluster, MessageBuffers), "careless": grow(cluster, Careless)}
    views = patch.object(MessageHeader, "copy_tensors_from", lambda letter, part: [*letter.tensors_in(part)])
    with views:
        found["views"] = keeps(cluster)
    return found | {"keeps": keeps(cluster)}


@pytest.mark.capability("D1")
def test_a_message_that_grows_arrives_and_a_buffer_that_is_written_too_early_is_found(
    talks: list[dict[str, Any]],
) -> None:
    """Its own, and one where tensors stay that were received: the mutation twins."""
    for found in talks:
        assert all(found["right"]) and not all(found["careless"])
        assert found["keeps"] and not found["views"]


def elsewhere(cluster: Cluster) -> list[float]:
    """Rank 1 sends more than a socket holds, and waits in a collective meanwhile; rank 0 takes all of it."""
    net = Net(60.0)
    wire, group = start(cluster, net)
    found = list[float]()
    if group.rank == 1:
        for number in range(100):
            wire.send(0, [torch.full((3,), float(number))])
        net.barrier(group)
        for number in range(100, 1000):
            wire.send(0, [torch.full((3,), float(number))])
    else:
        found = [float(wire.receive(1)[0][0][0]) for _ in range(100)]
        net.barrier(group)
        found += [float(wire.receive(1)[0][0][0]) for _ in range(900)]
    wire.flush()
    wire.close()
    return found


def talk(cluster: Cluster) -> dict[str, Any]:
    return exchange(cluster) | mutations(cluster) | {"elsewhere": elsewhere(cluster)}


@pytest.fixture(scope="module")
def talks() -> list[dict[str, Any]]:
    """What two ranks found, in one job."""
    return run_ranks(talk, 2)


@pytest.mark.capability("D1", "D6")
def test_a_sender_that_waits_elsewhere_keeps_nobody_waiting(talks: list[dict[str, Any]]) -> None:
    assert talks[0]["elsewhere"] == [float(number) for number in range(1000)]


def waiting(cluster: Cluster) -> None:
    """Rank 0 waits in every way for one that is late, and then for one that is killed."""
    net, said = Net(60.0), list[str]()
    wire, group = start(cluster, net)
    plain = Net(60.0)
    if group.rank == 1:
        plain.barrier(group)
        os.kill(os.getpid(), signal.SIGKILL)
    net.step = 7
    wire.send(1, [torch.ones(3)])
    net.deadline_seconds = 0.5
    for call in (partial(wire.receive, 1), wire.flush):
        with pytest.raises(DeadlineError) as late:
            call()
        said.append(str(late.value))
    net.deadline_seconds = 60.0
    plain.barrier(group)
    for call in (partial(wire.receive, 1), wire.flush):
        with pytest.raises(CommunicationError) as lost:
            call()
        said.append(str(lost.value))
    wire.close()
    del wire, call, late, lost  # an error keeps the frames that it came through
    assert held()[0] == 0
    raise CommunicationError("\n".join(said))


@pytest.mark.capability("D1")
def test_a_late_and_a_lost_stage_are_named_and_leave_nothing() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(waiting, 2)
    assert caught.value.of(1).headline.startswith("was killed by SIGKILL")
    text = caught.value.of(0).details
    assert "ranks [1] sent no message within 0.5 s" in text
    assert "ranks [1] read no message within 0.5 s" in text
    assert text.count("rank 1 is gone") >= 2
    assert "rank 0, shared memory of group 'pipeline' (0, 1), step 7" in text


def one_by_one(cluster: Cluster, deadline_seconds: float) -> list[float]:
    """Rank 0 sends each message when the one before was taken; rank 1 waits for the next, and sends nothing.

    What is said late is said before a wait, so both go on.
    """
    net = Net(60.0)
    wire, group = start(cluster, net)
    found = list[float]()
    try:
        for number in range(5):
            if group.rank == 0:
                wire.send(1, [torch.full((3,), float(number))])
                net.deadline_seconds = deadline_seconds
                wire.flush()
            else:
                found.append(float(wire.receive(0)[0][0][0]))
                net.deadline_seconds = deadline_seconds
        wire.flush()
    except DeadlineError:
        found.append(-1.0)
    net.deadline_seconds = 60.0
    net.barrier(group)
    wire.close()
    return found


def silent(cluster: Cluster) -> list[float]:
    """The mutation twin: nobody says before a wait what was taken."""
    with patch.object(HostMessenger, "acknowledge_read", lambda mail: None):
        return one_by_one(cluster, 0.5)


@pytest.mark.capability("D1")
def test_what_was_taken_is_said_before_a_wait() -> None:
    assert run_ranks(one_by_one, 2, 60.0) == [[], [0.0, 1.0, 2.0, 3.0, 4.0]]
    assert run_ranks(silent, 2) == [[-1.0], [0.0, -1.0]]


def answers(cluster: Cluster) -> int:
    """How many words rank 1 sends beside its answers, while rank 0 asks and waits for each."""
    net, words = Net(60.0), list[int]()
    wire, group = start(cluster, net)
    signals_of = type(wire._messenger._links)
    signal_rank = signals_of.signal_rank

    def counted(links: object, rank: int, signals: list[object], file: int | None = None) -> None:
        words.append(len(signals))
        signal_rank(links, rank, signals, file)

    with patch.object(signals_of, "signal_rank", counted):
        for number in range(5):
            if group.rank == 0:
                wire.send(1, [torch.full((3,), float(number))])
            assert float(wire.receive(1 - group.rank)[0][0][0]) == number
            if group.rank == 1:
                wire.send(0, [torch.full((3,), float(number))])
        wire.flush()
    net.barrier(group)
    wire.close()
    return len(words)


@pytest.mark.capability("D1")
def test_an_answer_says_what_was_taken_without_a_word_of_its_own() -> None:
    """Each rank sends five messages; rank 0 has one word more, of the last answer."""
    asks, answered = run_ranks(answers, 2)
    assert (asks, answered) == (6, 5)
