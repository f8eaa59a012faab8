"""Who is asked when a connection is lost, and what the report says."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.job.launcher_reports import (
    LauncherAddress,
    decode_node_rank,
    encode_launcher_address,
    read_node_list,
    write_node_list,
)
from paceline.launch import node_liveness as module
from paceline.launch.node_liveness import NodeLivenessProbe, probe_node
from paceline.launch.outcome import WorkerFailure, summarize_failures
from tests.ports import free_port


def test_a_launcher_that_lives_answers_and_one_that_is_gone_is_named(tmp_path) -> None:
    with NodeLivenessProbe(2, 1, tmp_path, ("127.0.0.1", 9)) as peers:
        assert probe_node(LauncherAddress(1, "b", "127.0.0.1", peers.port)) == ""
    gone = probe_node(LauncherAddress(0, "a", "127.0.0.1", free_port()))
    assert gone == "node 0 (a, 127.0.0.1) is gone: its launcher no longer runs"


def test_all_others_are_asked_once_and_only_when_there_are_several_nodes(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 7.0, sleep=waits.append))
    said = [
        encode_launcher_address(0, free_port(), "127.0.0.1", 1),
        encode_launcher_address(1, 5, "127.0.0.1", 1),
    ]
    write_node_list(tmp_path, [*said, said[0]])
    assert [node.rank for node in read_node_list(tmp_path)] == [0, 1]
    with NodeLivenessProbe(2, 1, tmp_path, ("127.0.0.1", 9)) as peers:
        assert peers.lost() == ()
        peers.start_query()
        peers.start_query()
        assert [line.partition(" (")[0] for line in peers.lost()] == ["node 0"]
    assert waits == [module._LINGER_SECONDS], "who has seen a failure stays, so that others may ask"
    with NodeLivenessProbe(1, 0, tmp_path, ("", 0)) as alone:
        alone.start_query()
        assert alone.port == 0 and alone.lost() == ()


def test_a_worker_without_a_launcher_announces_its_node_only(tmp_path: Path) -> None:
    said = encode_launcher_address(3, 0, "127.0.0.1", 1)
    assert decode_node_rank(said) == 3
    write_node_list(tmp_path, [said])
    assert read_node_list(tmp_path) == []


def test_the_report_of_a_lost_connection_names_the_node_and_others_do_not() -> None:
    lost = ["node 2 (h2, 10.0.0.3) is gone"]
    connection = WorkerFailure(0, "connection", 1.0, "raised CommunicationError", 4)
    error = WorkerFailure(0, "error", 1.0, "raised X", 1)
    said = [summarize_failures([failure], nodes=4, lost=lost).report for failure in (connection, error)]
    assert "  cause: node 2 (h2, 10.0.0.3) is gone" in said[0] and "node 2" not in said[1]
    assert "look at the other nodes" in summarize_failures([connection], nodes=4).report
