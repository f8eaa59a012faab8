"""Who is asked when a connection is lost, and what the report says."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.launch import peers as module
from paceline.launch.outcome import Failure, conclude
from paceline.launch.peers import Peers, ask
from paceline.roster import Node, announce, node_of, read_roster, write_roster
from tests.ports import free_port


def test_a_launcher_that_lives_answers_and_one_that_is_gone_is_named(tmp_path) -> None:
    with Peers(2, 1, tmp_path, ("127.0.0.1", 9)) as peers:
        assert ask(Node(1, "b", "127.0.0.1", peers.port)) == ""
    gone = ask(Node(0, "a", "127.0.0.1", free_port()))
    assert gone == "node 0 (a, 127.0.0.1) is gone: its launcher no longer runs"


def test_all_others_are_asked_once_and_only_when_there_are_several_nodes(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 7.0, sleep=waits.append))
    said = [announce(0, free_port(), "127.0.0.1", 1), announce(1, 5, "127.0.0.1", 1)]
    write_roster(tmp_path, [*said, said[0]])
    assert [node.rank for node in read_roster(tmp_path)] == [0, 1]
    with Peers(2, 1, tmp_path, ("127.0.0.1", 9)) as peers:
        assert peers.lost() == ()
        peers.ask()
        peers.ask()
        assert [line.partition(" (")[0] for line in peers.lost()] == ["node 0"]
    assert waits == [module._LINGER_SECONDS], "who has seen a failure stays, so that others may ask"
    with Peers(1, 0, tmp_path, ("", 0)) as alone:
        alone.ask()
        assert alone.port == 0 and alone.lost() == ()


def test_a_worker_without_a_launcher_announces_its_node_only(tmp_path: Path) -> None:
    said = announce(3, 0, "127.0.0.1", 1)
    assert node_of(said) == 3
    write_roster(tmp_path, [said])
    assert read_roster(tmp_path) == []


def test_the_report_of_a_lost_connection_names_the_node_and_others_do_not() -> None:
    lost = ["node 2 (h2, 10.0.0.3) is gone"]
    connection = Failure(0, "connection", 1.0, "raised CommunicationError", 4)
    assert "  cause: node 2 (h2, 10.0.0.3) is gone" in conclude([connection], nodes=4, lost=lost).report
    assert "node 2" not in conclude([Failure(0, "error", 1.0, "raised X", 1)], nodes=4, lost=lost).report
    assert "look at the other nodes" in conclude([connection], nodes=4).report
