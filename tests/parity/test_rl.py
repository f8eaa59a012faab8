"""Reinforcement learning: equal rows and weights on any number of actors, and a learner that is the actor."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from paceline import rl
from paceline.job.cluster import Cluster, process_environment
from paceline.recipe import Recipe
from paceline.rl import environments, rollouts
from paceline.rl.actors import GroupPlayer
from paceline.rl.policy_versions import weights_hash
from paceline.rl.rollouts import Rollouts
from paceline.session import Session
from paceline.session.reproducibility import MKL_VARIABLE
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import compare_with_oracle
from paceline.verification.verification_report import VerificationReport
from tests.parity.training_runs import each_case
from tests.recipes import recipe_of

gymnasium = pytest.importorskip("gymnasium", reason="needs paceline[rl]")

PPO = {"epochs": 2, "minibatches": 2}
SMALL = {"env": "CartPole-v1", "envs": 16, "shards": 4, "steps": 16, "ppo": PPO}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of one thread, in this process as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ROOT = Path(__file__).parents[2]


def recipe(strategy: str = "", iterations: int = 3, **settings: Any) -> Recipe:
    """A recipe of CartPole with small networks."""
    chosen = {**SMALL, **settings.pop("rl", {})}
    values: dict[str, Any] = {
        "task": "rl",
        "steps": None,
        "options": {"hidden": [16, 16]},
        "batch": {"shards": 4},
        "reproducible": True,
        "optimizer": {"name": "adam", "lr": 1e-2, "clip_norm": 0.5},
        "rl": {"total_steps": iterations * chosen["envs"] * chosen["steps"], **chosen},
    }
    return recipe_of(strategy, **(values | settings))


def hashes(cluster: Cluster, chosen: Recipe, make: Callable[[], Task] | None = None) -> tuple[list[str], str]:
    """The hashes of the rows of all iterations and of the state at the end."""
    session = build_test_session(cluster, chosen, make)
    rows = [record["sha256"] for record in run(session)]
    digest = weights_hash(session.complete()).hex()
    session.close()
    return rows, digest


def run(session: Session) -> list[dict[str, Any]]:
    """Train to the end; return the records of all rollouts."""
    records = []
    for _ in session.rounds():
        records += [dict(record) for name, record in session.events.take() if name == "rollout"]
    return records


# -- equal bits


@pytest.mark.capability("T1", "T2", "A3")
def test_rows_and_weights_after_twenty_iterations_are_equal_on_one_two_and_four_actors() -> None:
    alone = hashes(Cluster.single(), recipe(iterations=20))
    assert len(set(alone[0])) == 20
    assert run_ranks(hashes, 2, recipe(iterations=20)) == [alone] * 2
    assert run_ranks(hashes, 4, recipe(iterations=20)) == [alone] * 4
    assert hashes(Cluster.single(), recipe("lanes=3", iterations=20)) == alone
    assert run_ranks(hashes, 2, recipe("lanes=2", iterations=20)) == [alone] * 2


@pytest.mark.capability("T1", "T2")
@pytest.mark.parametrize("age", [0, 1])
def test_every_lane_acts_in_a_thread_of_its_own(age: int, monkeypatch: pytest.MonkeyPatch) -> None:
    acted: dict[str, list[int]] = {}
    play = GroupPlayer.play

    def recorded(player: GroupPlayer, number: int, *inputs: Any) -> Any:
        acted.setdefault(str(threading.get_ident()), []).append(number)
        return play(player, number, *inputs)

    monkeypatch.setattr(GroupPlayer, "play", recorded)
    chosen = {"rl": {"age": age}, "iterations": 2}
    of_lanes = hashes(Cluster.single(), recipe("lanes=2", **chosen))
    assert sorted(acted.values()) == [[0, 1] * 2, [2, 3] * 2]
    acted.clear()
    assert hashes(Cluster.single(), recipe(**chosen)) == of_lanes
    assert [*acted.values()] == [[0, 1, 2, 3] * 2]


def sequential_stream(seed: int, purpose: str, envs: range, steps: range, width: int) -> np.ndarray:
    """A twin: uniform numbers from one stream, in the order in which a process asks for them."""
    return np.random.random((len(steps), len(envs), width))


def one_generator(seed: int, purpose: str, environment: int, episode: int) -> int:
    """A twin: seeds of resets from one generator for all environments."""
    return int(np.random.randint(2**31))


def normalized_by_rank(rank: int, size: int, self: Rollouts, advantage: np.ndarray) -> np.ndarray:
    """A twin: mean and deviation of the environments of one rank."""
    part = np.array_split(advantage, size, axis=1)[rank]
    return (advantage - part.mean()) / (part.std() + 1e-8)


def broken(cluster: Cluster, twin: str, chosen: Recipe) -> tuple[list[str], str]:
    np.random.seed(1)
    rank, size = cluster.global_rank, cluster.world_size
    if twin == "size":  # of a group; it depends on the number of actors
        chosen = chosen.replace(rl={**SMALL, "total_steps": chosen.rl.total_steps, "shards": 2 * size})
        return hashes(cluster, chosen)
    where, name, replacement = {
        "stream": (rollouts, "keyed_uniforms", sequential_stream),
        "generator": (environments, "reset_seed", one_generator),
        "normalized": (Rollouts, "normalize", partial(normalized_by_rank, rank, size)),
    }[twin]
    if twin == "normalized":
        replacement = lambda self, advantage: normalized_by_rank(rank, size, self, advantage)  # noqa: E731
    with patch.object(where, name, replacement):
        return hashes(cluster, chosen)


@pytest.mark.capability("T1")
def test_no_action_of_a_run_is_drawn_with_the_key_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[tuple[int, int]] = []
    draw = rollouts.keyed_uniforms

    def recorded(seed: int, purpose: str, envs: range, steps: range, width: int) -> np.ndarray:
        keys.extend((environment, step) for environment in envs for step in steps)
        return draw(seed, purpose, envs, steps, width)

    monkeypatch.setattr(rollouts, "keyed_uniforms", recorded)
    hashes(Cluster.single(), recipe(iterations=3))
    assert sorted(keys) == [(environment, step) for environment in range(16) for step in range(3 * 16)]


@pytest.mark.capability("T1")
def test_no_episode_of_a_run_begins_with_the_key_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[int, list[int]] = {}
    seed_of = environments.reset_seed

    def recorded(seed: int, purpose: str, environment: int, episode: int) -> int:
        if purpose != "check":  # the episode that is played twice
            keys.setdefault(environment, []).append(episode)
        return seed_of(seed, purpose, environment, episode)

    monkeypatch.setattr(environments, "reset_seed", recorded)
    hashes(Cluster.single(), recipe(iterations=3))
    assert sorted(keys) == [*range(16)] and max(map(len, keys.values())) > 2
    assert all(episodes == [*range(len(episodes))] for episodes in keys.values())


@pytest.mark.capability("T1")
def test_four_broken_versions_depend_on_the_number_of_actors() -> None:
    small = recipe(iterations=2)
    twins = [(twin, small) for twin in ("size", "stream", "generator", "normalized")]
    alone = [broken(Cluster.single(), *twin) for twin in twins]
    both = run_ranks(each_case, 2, broken, twins)
    for (twin, _), one, two in zip(twins, alone, both[0], strict=True):
        assert one != two, twin


def noisy_logits() -> Task:
    return rl.Task(policy=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2)),
                   value=nn.Linear(4, 1))  # fmt: skip


COUNT_UNEQUAL = """
import sys
from paceline.job.cluster import Cluster
from paceline.testing.parity import build_test_session
from tests.parity.test_rl import recipe, run
rl = {"shards": int(sys.argv[1])}
chosen = recipe(reproducible=False, iterations=6, rl=rl, options={"hidden": [64, 64]})
print(sum(record["not_equal"] for record in run(build_test_session(Cluster.single(), chosen))))
"""


def unequal_rows(shards: int, mkl: str | None) -> int:
    """Rows of the first minibatches in which actor and learner differ, in a new process."""
    environ = {**process_environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", MKL_VARIABLE: mkl or ""}
    if mkl is None:
        del environ[MKL_VARIABLE]
    command = [sys.executable, "-c", COUNT_UNEQUAL, str(shards)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=True)
    return int(ended.stdout.split()[-1])


@pytest.mark.capability("T1")
def test_a_row_has_other_bits_in_a_small_group_unless_kernels_are_chosen_for_equal_rows() -> None:
    """Groups of four rows have the learner's bits; the twin: groups of two whose kernels follow shapes."""
    assert unequal_rows(4, None) == 0
    assert unequal_rows(8, "COMPATIBLE") > 0


def learning_rates(cluster: Cluster) -> list[float]:
    session = build_test_session(cluster, recipe(schedule={"decay": "linear"}))
    rates = [stats.lr for stats in session.rounds()]
    session.close()
    return rates


def test_an_annealed_rate_follows_iterations_and_not_the_number_of_actors() -> None:
    alone = learning_rates(Cluster.single())
    assert len(alone) == 3 * 4 and alone == sorted(set(alone), reverse=True)
    assert run_ranks(learning_rates, 2) == [alone] * 2


# -- verification


def verified(
    cluster: Cluster, strategy: str, make: Callable[[], Task] | None = None, **settings: Any
) -> VerificationReport:
    chosen = recipe(strategy, iterations=3, **settings)
    return compare_with_oracle(chosen, make() if make else make_task(chosen), cluster, CPU, 6)


@pytest.mark.capability("T6")
def test_the_learner_is_the_oracle_on_the_rows_of_its_actors() -> None:
    """Under ddp and zero with equal bits, under tensor within the bounds of a step."""
    cases = [("replicas=2",), ("replicas=1 shard=2 zero=1",), ("replicas=1 shard=2 zero=3",)]
    for report in run_ranks(each_case, 2, verified, cases)[0]:
        assert report.ok and report.sha256 is not None, report.failure
        assert report.worst["log-probability", "first minibatch"].error == 0.0
    (report,) = run_ranks(each_case, 2, tensor_verified, [()])[0]
    assert report.ok, report.failure
    assert ("log-probability", "first minibatch") not in report.worst


def tensor_verified(cluster: Cluster) -> VerificationReport:
    return verified(cluster, "replicas=1 tensor=2", reproducible=False)


@pytest.mark.capability("T1")
def test_verify_finds_a_policy_that_is_another_one_when_it_learns() -> None:
    report = verified(Cluster.single(), "", noisy_logits, reproducible=False)
    assert not report.ok and report.failure.quantity == "log-probability"
    assert "dropout" in report.diagnosis.explanation
