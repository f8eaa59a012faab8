"""The number of ranks changes between steps, and the run ends where it would have ended."""

import socket
from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.contracts.layout import whole
from paceline.testing.parity import Trajectory, run_oracle, session_of

PHASES = ((2, 3), (3, 6), (1, 9))  # number of ranks, and the step at which that ends
STEPS = PHASES[-1][1]
STRATEGIES = {  # and ranks for each
    "replicas={n}": 1,
    "replicas=1 shard={n} zero=1": 1,
    "replicas={n} pipeline=2": 2,
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def digits(strategy: str) -> Recipe:
    return Recipe(
        task="digits",
        options={"model": "convnet", "dropout": 0.1},
        steps=STEPS,
        batch={"size": 46, "shards": 6},
        optimizer={"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
        strategy=Strategy.parse(strategy),
    )


def strategy_of(text: str, n: int) -> str:
    return "replicas=1" if n == 1 and "shard" in text else text.format(n=n)


def connect(cluster: Cluster, port: int, num_ranks: int) -> Cluster:
    """The first ranks of the world as a job of their own."""
    alone = replace(
        cluster,
        world_size=num_ranks,
        local_world_size=num_ranks,
        port=port,
        listen_fd=None,
        token=f"of {num_ranks}",
    )
    if num_ranks == 1:
        return Cluster.single()
    alone.connect("cpu", 30.0)
    return alone


def resized(cluster: Cluster, text: str, ports: list[int], forgets: str = "") -> Trajectory | None:
    """Run the phases one after another; the state moves from one job to the next in memory."""
    cluster.disconnect()
    snapshot, losses, end = None, [], None
    for (n, last), port in zip(PHASES, ports, strict=True):
        num_ranks = n * STRATEGIES[text]
        if cluster.global_rank >= num_ranks:
            continue
        job = connect(cluster, port, num_ranks)
        session = session_of(job, digits(strategy_of(text, n)))
        if losses or n != PHASES[0][0]:
            session.take_over(snapshot)
            _forget(session, forgets)
        for stats in session.rounds():
            losses.append(stats.loss)
            if session.state.step == last:
                break
        found = session.snapshot()
        snapshot = replace(found, whole={n: t.detach().clone() for n, t in found.tensors().items()})
        end = whole(losses, session)
        job.disconnect()
    return end


def _forget(session: Any, what: str) -> None:
    if what == "moments":
        session.state.optimizer.state.clear()


@pytest.mark.capability("Z1", "A11")
@pytest.mark.parametrize("text", STRATEGIES)
def test_from_two_ranks_to_three_to_one(text: str) -> None:
    ports = [free_port() for _ in PHASES]
    ends = run_ranks(resized, 3 * STRATEGIES[text], text, ports)
    recipe = digits("replicas=1")
    right = run_oracle(recipe, STEPS)
    assert len(ends[0].losses) == STEPS
    assert ends[0].distance(right) <= 1e-5
    assert max(abs(a - b) for a, b in zip(ends[0].losses, right.losses, strict=True)) <= 1e-5


@pytest.mark.capability("Z1")
def test_a_resize_that_forgets_the_moments_is_seen() -> None:
    """The mutation twin."""
    ends = run_ranks(resized, 3, "replicas={n}", [free_port() for _ in PHASES], "moments")
    assert ends[0].distance(run_oracle(digits("replicas=1"), STEPS)) > 1e-4
