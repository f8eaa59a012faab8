"""What a process reads from its environment, and what it refuses to believe."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import CommunicationError
from paceline.job import rendezvous
from paceline.job.addresses import interface_towards
from paceline.job.cluster import Cluster, process_environment
from paceline.job.rendezvous import StoreAccess, open_store
from tests.ports import free_port

TORCHRUN = {  # recorded from torchrun --nnodes 2 --nproc-per-node 2, node 1, second process
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


def test_without_variables_it_is_a_single_process() -> None:
    assert Cluster.from_env({}) == Cluster.single()
    assert Cluster.single().world_size == 1


def test_torchrun_variables() -> None:
    assert Cluster.from_env(TORCHRUN) == Cluster(
        global_rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        address="10.0.0.1",
        port=29500,
        listen_fd=None,
        token="",
        error_dir=None,
        agent_store=True,
        attempt=1,
        launched=True,
    )


def test_launcher_variables() -> None:
    own = {"PACELINE_LISTEN_FD": "7", "PACELINE_TOKEN": "t", "PACELINE_ERROR_DIR": "/errors"}
    own |= {"PACELINE_STORE_FD": "8", "PACELINE_STORE_PORT": "29501"}
    cluster = Cluster.from_env({**TORCHRUN, **own})
    assert (cluster.listen_fd, cluster.token, cluster.error_dir) == (7, "t", Path("/errors"))
    assert (cluster.store_fd, cluster.port, cluster.agent_store) == (8, 29501, False)


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "4"},
        {"RANK": "-1"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_WORLD_SIZE": "8"},
        {"GROUP_RANK": "2"},
        {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"},
    ],
)
def test_contradictions_are_errors(change: dict[str, str]) -> None:
    with pytest.raises(CommunicationError, match="the variables of torchrun contradict each other"):
        Cluster.from_env({**TORCHRUN, **change})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"])
def test_a_missing_variable_is_named(name: str) -> None:
    rest = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(CommunicationError, match=f"{name} is not set"):
        Cluster.from_env(rest)


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(CommunicationError, match="MASTER_PORT='http' is not a number"):
        Cluster.from_env({**TORCHRUN, "MASTER_PORT": "http"})


def test_a_world_of_one_needs_only_rank_and_size() -> None:
    assert Cluster.from_env({"RANK": "0", "WORLD_SIZE": "1"}) == replace(Cluster.single(), launched=True)


def test_the_environment_that_is_read_is_a_copy() -> None:
    copy = process_environment()
    copy["PACELINE_TEST_COPY"] = "1"
    assert "PACELINE_TEST_COPY" not in process_environment()


def test_the_loopback_leads_to_itself() -> None:
    assert interface_towards("127.0.0.1", 1) in ("lo", "lo0")
    assert interface_towards("no.such.host.invalid", 1) == ""


def test_a_port_where_nobody_listens_ends_at_the_deadline() -> None:
    with pytest.raises(CommunicationError, match="cannot reach the store of the job at"):
        open_store(StoreAccess(1, "127.0.0.1", free_port(), "token"), 0.3)


def test_a_store_whose_port_is_taken_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        way = StoreAccess(0, "127.0.0.1", taken.getsockname()[1], "token", serves=True)
        with pytest.raises(CommunicationError, match=r"cannot serve the store.*in use"):
            open_store(way, 5.0)
