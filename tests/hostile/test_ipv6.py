"""Hosts that have IPv6 alone: meeting, launchers, channels and routes work as they do elsewhere."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.storage import StorageFolder
from paceline.comm.channel.socket_channel import listen_on_free_port
from paceline.job.addresses import (
    address_towards,
    format_address,
    interface_towards,
    listen_at,
    loopback_address,
)
from paceline.job.launcher_reports import LauncherAddress
from paceline.launch.node_liveness import NodeLivenessProbe, probe_node
from tests.dist.launch.actors import as_users_have_it
from tests.hostile.jobs import prepare
from tests.marks import soak_param

pytestmark = [pytest.mark.capability("O2"), pytest.mark.timeout(240)]
ONLY_IPV6 = (
    *("unshare", "-Urn", "sh", "-c"),
    "ip link set lo up && ip address del 127.0.0.1/8 dev lo && ip link add left type veth peer name right"
    " && ip link set left up && ip link set right up && ip address add fd00::1/64 dev left nodad"
    ' && exec "$@"',
    "sh",
)
"""Words before a command: a network of its own in which nothing has an address of IPv4."""

NO_IPV4 = "import socket; socket.create_server(('127.0.0.1', 0))"
TWO_NODES = '"$@" --node-rank 1 & other=$!; "$@" --node-rank 0; code=$?; wait $other && exit $code'


def may_be_alone() -> bool:
    """Whether such a network can be made; there, nobody can listen at an address of IPv4."""
    words = [*ONLY_IPV6, sys.executable, "-c", NO_IPV4]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return "Cannot assign requested address" in done.stderr


def train(folder: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    prepare(folder)
    job = (sys.executable, "-m", "paceline", "train", "recipe.toml", *words)
    return subprocess.run(
        [*ONLY_IPV6, *before, *job],
        cwd=folder,
        env={**as_users_have_it(), "PACELINE_TOKEN": "the key", "TMPDIR": str(folder / "tmp")},
        capture_output=True,
        text=True,
        check=False,
    )


needs_network = pytest.mark.skipif(not may_be_alone(), reason="needs namespaces")
MEET = ("--nodes", "2", "--rendezvous", "[fd00::1]:29500", "-n", "1")


@pytest.mark.soak
@needs_network
@pytest.mark.parametrize(
    "strategy",
    [
        "servers=1 sync=server-async",  # its channel is encrypted, as is the store
        pytest.param("replicas=2", marks=pytest.mark.soak),
        pytest.param("replicas=2 route=native codec=int8", marks=pytest.mark.soak),
        pytest.param("shard=2 zero=3", marks=pytest.mark.soak),
        pytest.param("pipeline=2", marks=pytest.mark.soak),
    ],
)
def test_two_nodes_meet_and_train(strategy: str, tmp_path: Path) -> None:
    done = train(tmp_path, *MEET, "--strategy", strategy, before=("sh", "-c", TWO_NODES, "sh"))
    assert done.returncode == 0, done.stderr
    assert CheckpointCatalog.read(StorageFolder(str(tmp_path / "run" / "checkpoints"))).whole[-1].step == 6


@needs_network
@pytest.mark.parametrize(
    "strategy",
    [soak_param("replicas=2 route=native"), soak_param("servers=1 sync=server-async")],
)
def test_one_node_trains_where_not_even_the_loopback_has_ipv4(strategy: str, tmp_path: Path) -> None:
    done = train(tmp_path, "-n", "2", "--strategy", strategy)
    assert done.returncode == 0, done.stderr


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_listeners_and_launchers_are_reached_by_ipv6(tmp_path: Path) -> None:
    for listener in (listen_at("::1", 0, 5), listen_on_free_port("::1")):
        with listener:
            socket.create_connection(("::1", listener.getsockname()[1]), timeout=20).close()
    with NodeLivenessProbe(2, 0, tmp_path, ("::1", 29500)) as peers:
        assert probe_node(LauncherAddress(0, "here", "::1", peers.port)) == ""
    assert (address_towards("::1", 1), interface_towards("::1", 1)) == ("::1", "lo")
    assert loopback_address() == "127.0.0.1"
    assert (format_address("::1", 5), format_address("10.0.0.1", 5)) == ("[::1]:5", "10.0.0.1:5")
