"""What a rank has taken is said with its next message, and before it waits."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from paceline.comm import Net
from paceline.comm.routes import HostMessenger
from paceline.errors import DeadlineError
from paceline.job.cluster import Cluster
from paceline.testing import run_ranks
from tests.dist.test_p2p_shared_memory import start


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
    signal_rank = type(wire._messenger._links).signal_rank

    def counted(links: object, rank: int, signals: list[object], file: int | None = None) -> None:
        words.append(len(signals))
        signal_rank(links, rank, signals, file)

    with patch.object(type(wire._messenger._links), "signal_rank", counted):
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
