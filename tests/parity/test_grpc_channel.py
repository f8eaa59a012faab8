"""Rules of messages over gRPC: the bits of plain sockets, also where connections break all the time."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from paceline.comm.channel import grpc_connect
from paceline.job.cluster import Cluster
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, trajectory_of
from tests.bad_line import BadLine
from tests.recipes import recipe_of

pytestmark = pytest.mark.capability("G12", "B4")
STEPS = 6


digits = partial(
    recipe_of,
    task="digits",
    options={"model": "mlp", "hidden": [32]},
    steps=STEPS,
    batch={"size": 46, "shards": 6},
    optimizer={"name": "adamw", "lr": 5e-3},
)


def trained(cluster: Cluster, strategy: str) -> tuple[Trajectory, dict[str, Any]]:
    session = build_test_session(cluster, digits(strategy))
    losses = [stats.loss for stats in session.rounds()]
    found = trajectory_of(losses, session), getattr(session.rule, "ledger", None)
    session.close()
    return found[0], found[1].record() if found[1] else {}


def over_bad_lines(cluster: Cluster, strategy: str) -> tuple[Trajectory, dict[str, Any], int]:
    """Every rank calls the others over lines that break; how many did."""
    with ExitStack() as lines:
        made: list[BadLine] = []
        plain = grpc_connect.share_addresses

        def places(*arguments: Any) -> list[str]:
            found = []
            for place in plain(*arguments)[: cluster.global_rank]:
                port, rest = place.split(" ", 1)
                seed = 10 * cluster.global_rank + len(found)
                made.append(lines.enter_context(BadLine(int(port), breaks=2, seed=seed, most=20_000)))
                found.append(f"{made[-1].port} {rest}")
            return found

        grpc_connect.share_addresses = places
        found, ledger = trained(cluster, strategy)
        grpc_connect.share_addresses = plain
        return found, ledger, sum(line.num_broken for line in made)


def both(cluster: Cluster) -> dict[str, Any]:
    rule = "servers=2 sync=server"
    plain, calls = trained(cluster, rule), trained(cluster, f"{rule} channel=grpc")
    return {"plain": plain, "calls": calls, "bad": over_bad_lines(cluster, f"{rule} channel=grpc")}


@pytest.mark.timeout(300)
def test_two_servers_have_the_same_bits_over_grpc_and_over_connections_that_break() -> None:
    ranks = run_ranks(both, 4)
    for rank in ranks:
        right, done = rank["plain"]
        for found, ledger, *_ in (rank["calls"], rank["bad"]):
            assert found.distance(right) == 0.0 and found.losses == right.losses
            assert ledger == done and (ledger["applied"], ledger["dropped"]) == (2 * STEPS, 0)
    assert sum(rank["bad"][2] for rank in ranks) >= 3


def gossips(cluster: Cluster) -> list[Trajectory]:
    return [trained(cluster, f"sync=gossip:0 channel={word}")[0] for word in ("socket", "grpc")]


@pytest.mark.capability("I2")
def test_gossip_of_two_has_the_same_bits_over_grpc() -> None:
    for plain, calls in run_ranks(gossips, 2):
        assert plain.losses == calls.losses and plain.distance(calls) == 0.0
