"""DQN: equal bits on any number of ranks and after a resume, and batches that are right by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from paceline import rl
from paceline.errors import TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.rl.dqn import Replay
from paceline.session.train_rank import train
from paceline.testing import run_ranks
from paceline.testing.parity import CPU, build_test_session, make_task
from paceline.verification import compare_with_oracle
from tests.marks import soak_param
from tests.parity.test_rl import hashes, recipe, run
from tests.parity.test_rl_runs import limited, resume_on_rank, saved, walk_recipe

pytest.importorskip("gymnasium", reason="needs paceline[rl]")
DQN = {"batch": 32, "updates": 8, "start": 512, "capacity": 1000, "target_every": 6, "n_step": 3}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of one thread, in this process as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def dqn(iterations: int = 6, strategy: str = "", **settings: Any) -> Recipe:
    own = {**DQN, **settings.pop("dqn", {})}
    env = settings.pop("env", "CartPole-v1")
    return recipe(
        strategy, iterations, rl={"env": env, "algorithm": "dqn", "ppo": {}, "dqn": own}, **settings
    )


@pytest.mark.capability("T3", "T4")
@pytest.mark.parametrize("priority", [soak_param(0.0), 0.6])
def test_rows_priorities_and_weights_are_equal_on_one_and_two_ranks(priority: float) -> None:
    chosen = dqn(dqn={"priority": priority})
    alone = all_hashes(Cluster.single(), chosen)
    assert len(alone[0]) == 4  # the first three iterations come before the first update
    assert run_ranks(all_hashes, 2, chosen) == [alone] * 2


def all_hashes(cluster: Cluster, chosen: Recipe) -> tuple[list[str], str, bytes]:
    """The hashes of rows, of weights, and the priorities, of which ranks share one store."""
    kept = []
    with patch.object(Replay, "before_step", lambda self, session: kept.append(self) or plain(self, session)):
        rows, weights = hashes(cluster, chosen)
    assert kept[0]._shares == (cluster.world_size > 1)
    return rows, weights, kept[0]._tree.priorities.tobytes()


plain = Replay.before_step


@pytest.mark.capability("T3")
@pytest.mark.parametrize("every_steps", [8, soak_param(6)])
def test_a_run_that_was_lost_is_resumed_on_two_ranks_with_the_same_bits(
    tmp_path: Path, every_steps: int
) -> None:
    """The store, its priorities and the target network are state."""
    chosen = dqn(7, checkpoint={"every_steps": every_steps}, dqn={"priority": 0.6})
    whole = train(chosen.replace(run_dir=str(tmp_path / "whole"))).sha256
    parts = chosen.replace(run_dir=str(tmp_path / "parts"))
    assert saved(Cluster.single(), parts, None, 14) is None
    assert run_ranks(resume_on_rank, 2, parts, str(tmp_path / "parts")) == [whole] * 2


@pytest.mark.capability("T6")
def test_the_learner_is_the_oracle_on_the_rows_that_were_drawn() -> None:
    chosen = dqn(dqn={"priority": 0.6})
    report = compare_with_oracle(chosen, make_task(chosen), Cluster.single(), CPU, 10)
    assert report.ok and report.sha256 is not None, report.failure


@pytest.mark.capability("T4")
def test_the_target_network_has_the_weights_before_each_interval_of_updates() -> None:
    chosen = dqn()
    session = build_test_session(Cluster.single(), chosen)
    replay, every, copies, num_changes = session.rule.rollouts, DQN["target_every"], {}, 0
    assert isinstance(replay, Replay)
    plain_batch = Replay._draw_batch

    def compare(self: Replay, step: int) -> None:
        nonlocal num_changes
        present = {name: value.clone() for name, value in session.complete().state_dict().items()}
        if step % every == 0:
            num_changes += bool(copies) and any(not torch.equal(copies[n], present[n]) for n in present)
            copies.update(present)
        target = self.target.state_dict()
        assert all(torch.equal(target[name], copies[name]) for name in copies), step
        plain_batch(self, step)

    with patch.object(Replay, "_draw_batch", compare):
        for _ in session.rounds():
            pass
    assert num_changes >= 3


def q_task() -> rl.Task:
    torch.manual_seed(1)
    return rl.Task(env=limited, policy=nn.Linear(2, 2))


@pytest.mark.parametrize("n_step", [1, 3])
def test_rewards_of_n_steps_end_with_the_episode_and_a_time_limit_is_no_end(n_step: int) -> None:
    """Each drawn row is compared with a walk by hand: rewards of 1, at most 5 steps, ends at place 3."""
    chosen = walk_recipe(
        3, rl={"algorithm": "dqn", "ppo": {}, "dqn": {**DQN, "start": 0, "n_step": n_step, "gamma": 0.5}}
    )
    session = build_test_session(Cluster.single(), chosen, q_task)
    replay = session.rule.rollouts
    assert isinstance(replay, Replay)
    num_terminated = num_truncated = num_short = 0
    for _ in session.rounds():
        rows = replay._kept_rows()
        first_number = replay.num_rows - replay.num_kept
        for k, number in enumerate(replay.batch.number.tolist()):
            reward, discount, end = 0.0, 1.0, number
            for step in range(n_step):
                end = number + 16 * step
                reward, discount = reward + discount * 1.0, discount * 0.5
                row = rows[end - first_number]
                if row["terminated"] or row["truncated"] or end + 16 >= replay.num_rows:
                    break
            num_terminated += bool(row["terminated"])
            num_truncated += bool(row["truncated"])
            num_short += step < n_step - 1
            assert float(replay.batch.reward[k]) == pytest.approx(reward)
            assert float(replay.batch.discount[k]) == (0.0 if row["terminated"] else discount)
            assert np.array_equal(replay.batch.after[k].numpy(), row["after"])
            # The observation after a step is one place away, also at the end: it is not that of a reset.
            assert abs(row["after"][0] - row["observation"][0]) == 1.0
            assert row["terminated"] == (row["after"][0] >= 3.0)
    assert num_terminated > 0 and num_truncated > 0 and (num_short > 0) == (n_step > 1)


def test_a_value_module_or_a_box_of_actions_is_refused() -> None:
    with pytest.raises(TaskError, match="DQN takes no value module"):
        build_test_session(
            Cluster.single(), dqn(), lambda: rl.Task(policy=nn.Linear(4, 2), value=nn.Linear(4, 1))
        )
    with pytest.raises(TaskError, match="DQN needs discrete actions"):
        build_test_session(Cluster.single(), dqn(env="Pendulum-v1"))


def test_epsilon_falls_over_the_run() -> None:
    session = build_test_session(Cluster.single(), dqn(8, dqn={"epsilon": 0.0, "epsilon_fraction": 0.5}))
    replay = session.rule.rollouts
    shares = []
    for iteration in range(8):
        noise = replay.noise(range(16), range(16 * iteration, 16 * (iteration + 1)))
        shares.append(float(np.isinf(noise).any(2).mean()))
    assert shares[:2] == [1.0, 1.0] and 0.3 < shares[2] < 0.7 and shares[4:] == [0.0] * 4
    assert run(session)
