"""The number of ranks changes between steps, and the run ends where it would have ended."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.job.cluster import Cluster
from paceline.optim import build_schedule
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import Trajectory, build_test_session, run_oracle, whole_trajectory
from tests.ports import free_port

ENDS = (3, 6, 9)  # the step at which each phase ends
STEPS = ENDS[-1]
ALONE, ZERO_3 = "replicas=1", "replicas=1 shard=3 zero=1"
PHASES = [  # one strategy for each
    ("replicas=2", "replicas=3", ALONE),
    ("replicas=1 shard=2 zero=1", ZERO_3, ALONE),
    ("replicas=2 pipeline=2", "replicas=3 pipeline=2", "replicas=1 pipeline=2"),
    ("replicas=1 pipeline=2", "replicas=1 pipeline=3", ALONE),
    ("replicas=1 pipeline=2", ZERO_3, "replicas=1 pipeline=2"),
]


def digits(strategy: str) -> Recipe:
    return Recipe(
        task="digits",
        options={"model": "convnet", "dropout": 0.1},
        steps=STEPS,
        batch={"size": 46, "shards": 6},
        optimizer={"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
        strategy=Strategy.parse(strategy),
    )


def ranks_of(text: str) -> int:
    strategy = Strategy.parse(text)
    return (strategy.replicas or 1) * strategy.ranks_per_replica


def connect(cluster: Cluster, port: int, num_ranks: int) -> Cluster:
    """The first ranks of the world as a job of their own."""
    alone = replace(
        cluster,
        world_size=num_ranks,
        local_world_size=num_ranks,
        port=port,
        store_fd=None,
        membership=None,
        token=f"of {num_ranks}",
    )
    if num_ranks == 1:
        return Cluster.single()
    return alone.connect("cpu", 30.0)


def resized(
    cluster: Cluster, phases: tuple[str, ...], ports: list[int], forgets: str = ""
) -> Trajectory | None:
    """Run the phases one after another; the state moves from one job to the next in memory."""
    cluster.disconnect()
    snapshot, losses, end = None, [], None
    for text, last, port in zip(phases, ENDS, ports, strict=True):
        num_ranks = ranks_of(text)
        if cluster.global_rank >= num_ranks:
            continue
        job = connect(cluster, port, num_ranks)
        session = build_test_session(job, digits(text))
        if losses or last != ENDS[0]:
            session.restore_shared(snapshot)
            _forget(session, forgets)
        for stats in session.rounds():
            losses.append(stats.loss)
            if session.state.step == last:
                break
        found = session.snapshot()
        snapshot = replace(found, whole={n: t.detach().clone() for n, t in found.tensors().items()})
        end = whole_trajectory(losses, session)
        job.disconnect()
    return end


def _forget(session: Any, what: str) -> None:
    if what == "moments":
        session.state.optimizer.state.clear()


def run(phases: tuple[str, ...], *more: str) -> list[Any]:
    return run_ranks(resized, max(map(ranks_of, phases)), phases, [free_port() for _ in ENDS], *more)


@pytest.mark.capability("Z1", "A11", "D1")
@pytest.mark.parametrize("phases", PHASES, ids=" to ".join)
def test_replicas_shards_and_stages_take_over_from_each_other(phases: tuple[str, ...]) -> None:
    """Two, three, one: the run ends where the run of one process ends."""
    ends = run(phases)
    right = run_oracle(digits(ALONE), STEPS)
    assert len(ends[0].losses) == STEPS
    assert ends[0].distance(right) <= 1e-5
    assert max(abs(a - b) for a, b in zip(ends[0].losses, right.losses, strict=True)) <= 1e-5


@pytest.mark.capability("Z1")
def test_a_resize_that_forgets_the_moments_is_seen() -> None:
    """The mutation twin."""
    ends = run(PHASES[0], "moments")
    assert ends[0].distance(run_oracle(digits(ALONE), STEPS)) > 1e-4


def growing(strategy: str) -> Recipe:
    """Eight samples a rank: the batch grows with the ranks, and with it the rate."""
    recipe = digits(strategy)
    return recipe.replace(
        batch={"size": 8 * ranks_of(strategy), "shards": 6},
        schedule={"batch_scaling": "linear", "base_batch": 8, "warmup_steps": 4, "decay": "cosine"},
    )


def rates(cluster: Cluster, phases: tuple[str, ...], ports: list[int]) -> list[tuple[int, float]]:
    """By update, the rate of this rank."""
    cluster.disconnect()
    snapshot, found = None, []
    for text, last, port in zip(phases, ENDS, ports, strict=True):
        if cluster.global_rank >= ranks_of(text):
            continue
        job = connect(cluster, port, ranks_of(text))
        session = build_test_session(job, growing(text))
        if last != ENDS[0]:
            session.restore_shared(snapshot)
        for stats in session.rounds():
            found.append((stats.step, stats.lr))
            if session.state.step == last:
                break
        snapshot = session.snapshot()
        job.disconnect()
    return found


@pytest.mark.soak
@pytest.mark.capability("J17")
def test_a_resize_that_changes_the_batch_applies_the_scaling_rule_anew() -> None:
    """Two, three, one: in its warm-up and after it the rate is that of the ranks that there are."""
    phases = PHASES[0]
    expected = []
    for text, first, last in zip(phases, (0, *ENDS), ENDS, strict=False):
        schedule = build_schedule(growing(text).schedule, STEPS, growing(text).batch.size)
        expected += [(step, 1e-3 * schedule.factor(step)) for step in range(first, last)]
    assert run_ranks(rates, 3, phases, [free_port() for _ in ENDS])[0] == expected
    assert len({round(rate / 1e-3, 1) for _, rate in expected}) > 5
