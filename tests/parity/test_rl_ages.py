"""Actors that are older than the learner: bounded ages, V-trace, and the same bits on any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.recipe.rl_recipe import RLRecipe
from paceline.rl.normalizers import Normalizers
from paceline.rl.policy_versions import PolicyVersions, weights_hash
from paceline.session.train_rank import train
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from paceline.verification.verification_report import VerificationReport
from tests.marks import soak_param
from tests.parity.test_rl import hashes, recipe, run, verified
from tests.parity.test_rl_runs import SMALL_DQN, resume_on_rank, saved, walk, walk_recipe
from tests.parity.training_runs import each_case

BOTH = ("observations", "rewards")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of one thread, in this process as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.capability("T2")
@settings(max_examples=50, deadline=None)
@given(
    age=st.integers(0, 5),
    first=st.integers(0, 3),
    published=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_no_version_is_older_than_the_bound(age: int, first: int, published: list[bool]) -> None:
    """Whenever the learner publishes, and however far ahead an actor plays; the last S + 1 are kept."""
    network = nn.Linear(1, 1)
    versions = PolicyVersions(age, network, Normalizers(RLRecipe(), (1,)))
    present = first
    versions.publish(first, 0, network)
    for iteration in range(12):
        # The learner collects iterations up to its own, DQN several before its first update.
        present = max(present, iteration)
        versions.publish(present, present, network)
        for ahead in range(iteration, present + age + 1):
            version = versions.of(ahead)
            assert ahead - age <= version.iteration <= present
            assert version.iteration == max(first, ahead - age)
        if published[iteration]:
            versions.publish(present, -1, network)  # again, as after a lost rank: it changes nothing
        versions.forget(iteration)
        assert len(versions._versions) <= max(age, first - iteration) + 1


def aged(cluster: Cluster, age: int, **options: object) -> tuple[list[str], str, list[dict[str, int]]]:
    """The hashes of rows and weights, and the ages of all iterations."""
    chosen = recipe(iterations=5, rl={"age": age, "normalize": BOTH, **options})
    session = build_test_session(cluster, chosen)
    records = run(session)
    digest = weights_hash(session.complete()).hex()
    assert [record["not_equal"] for record in records] in ([0] * 5, [-1] * len(records))
    session.close()
    return [record["sha256"] for record in records], digest, [record["ages"] for record in records]


def newest(self: PolicyVersions, iteration: int) -> object:
    """A twin: the newest weights when an actor begins, whichever these are."""
    return self._versions[max(self._versions)]


@pytest.mark.capability("T1", "T2")
def test_older_actors_have_equal_bits_on_one_and_two_ranks_and_their_ages_are_counted() -> None:
    cases = [(0,), (2,)]
    alone = [aged(Cluster.single(), *case) for case in cases]
    assert run_ranks(each_case, 2, aged, cases) == [alone] * 2
    rows = 16 * 16
    assert [ages for *_, ages in alone] == [
        [{"0": rows}] * 5,
        [{"0": rows}, {"1": rows}, {"2": rows}, {"2": rows}, {"2": rows}],
    ]
    assert alone[0][1] == hashes(Cluster.single(), recipe(iterations=5, rl={"normalize": BOTH}))[1]
    assert alone[0][1] != alone[1][1]
    with patch.object(PolicyVersions, "of", newest):
        assert aged(Cluster.single(), 2)[1] != alone[1][1]


def learned(cluster: Cluster, age: int, channel: str) -> tuple[list[str], str]:
    """The hashes of rows, on the learner, and of weights of a run in which rank 0 learns."""
    strategy = f"servers=1 sync=actors channel={channel}"
    chosen = recipe(strategy, iterations=5, rl={"age": age, "normalize": BOTH})
    session = build_test_session(cluster, chosen)
    rows = [record["sha256"] for record in run(session)]
    digest = weights_hash(session.complete()).hex()
    session.close()
    return rows, digest


@pytest.mark.capability("T1", "T2")
def test_actors_apart_from_the_learner_have_the_bits_of_one_rank() -> None:
    """With the present weights, and with older ones over gRPC; tickets go to whichever actor is idle."""
    for age, channel in ((0, "socket"), (2, "grpc")):
        rows, weights, _ = aged(Cluster.single(), age)
        assert run_ranks(learned, 3, age, channel) == [(rows, weights), ([], weights), ([], weights)]


def learner_verified(cluster: Cluster) -> VerificationReport:
    return verified(cluster, "servers=1 sync=actors", rl={"age": 1})


@pytest.mark.capability("T1", "T6")
def test_the_learner_of_older_actors_is_the_oracle_on_their_rows() -> None:
    """In one process with its first ratios, and apart from its actors."""
    report = verified(Cluster.single(), "", rl={"age": 1})
    assert report.ok and report.worst["log-probability", "first minibatch"].error == 0.0
    for report in run_ranks(learner_verified, 2):
        assert report.ok and report.sha256 is not None, report.failure


@pytest.mark.capability("T2", "T3")
@pytest.mark.parametrize("options", [soak_param({"normalize": BOTH}), SMALL_DQN])
def test_a_run_with_older_actors_is_resumed_with_the_same_bits_on_two_ranks(
    options: dict[str, object], tmp_path: Path
) -> None:
    """Within an iteration: the versions that later ones are played with are in the checkpoint."""
    chosen = recipe(iterations=4, rl={"age": 2, **options}, checkpoint={"every_steps": 6})
    whole = train(chosen.replace(run_dir=str(tmp_path / "whole"))).sha256
    parts = chosen.replace(run_dir=str(tmp_path / "parts"))
    assert saved(Cluster.single(), parts, None, 8) is None
    assert run_ranks(resume_on_rank, 2, parts, str(tmp_path / "parts")) == [whole] * 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", r"environment 0 \(group 0\), episode \d, step \d raised ValueError: the door"),
        soak_param("nan", r"environment 0 \(group 0\), episode \d, step \d: returned a reward that is not"),
        soak_param("hangs", r"environment 0 \(group 0\), episode \d, step \d has not returned for 1 s"),
    ],
)
def test_a_fault_in_the_thread_of_an_older_actor_is_named(fault: str, message: str) -> None:
    chosen: Recipe = walk_recipe(runtime={"deadline_seconds": 2.0}, rl={"check": False, "age": 1})
    session = build_test_session(Cluster.single(), chosen, lambda: walk(fault))
    try:
        with pytest.raises(TaskError, match=message):
            run(session)
    finally:
        session.close()
        for thread in threading.enumerate():
            if thread.name == "actor":
                thread.join(5)
