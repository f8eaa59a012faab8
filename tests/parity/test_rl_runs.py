"""Runs with environments: a kill and a resume, faults that are named, and episodes that are played."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from paceline import rl
from paceline.errors import PacelineError, RecipeError, TaskError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.rl import rollout_rounds
from paceline.rl.played_episodes import play_opened
from paceline.session.saved_run import open_run
from paceline.session.train_rank import train
from paceline.task import Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session, make_task
from tests.marks import soak_param
from tests.parity.test_rl import recipe, run

gymnasium = pytest.importorskip("gymnasium", reason="needs paceline[rl]")
SMALL_DQN = {
    "algorithm": "dqn",
    "ppo": {},
    "dqn": {"batch": 32, "updates": 8, "start": 256, "capacity": 600, "priority": 0.6},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The bits of one thread, in this process as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Walk(gymnasium.Env):
    """A walk on a line whose episode ends at 3, with faults at a step of an episode."""

    observation_space = gymnasium.spaces.Box(-100.0, 100.0, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault: str = "") -> None:
        self.fault, self.total, self.place = fault, 0, 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.place = float(self.np_random.integers(-1, 2))
        if self.fault == "random":
            self.place += np.random.random()
        return np.array([self.place, 1.0]), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.total += 1
        self.place += 2.0 * action - 1.0
        if self.total == 7 and self.fault == "raises":
            raise ValueError("the door is closed")
        if self.total == 7 and self.fault == "hangs":
            time.sleep(5)  # longer than the deadlines of these tests
        is_lost = self.total == 7 and self.fault == "nan"
        reward = float("nan") if is_lost else 1.0
        return np.array([self.place, 1.0]), reward, self.place >= 3.0, False, {}


def limited(fault: str = "") -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(Walk(fault), 5)


def walk(fault: str = "", make: Callable[[], Any] | None = None) -> Task:
    torch.manual_seed(1)
    return rl.Task(
        env=make or (lambda: limited(fault)),
        policy=nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)),
        value=nn.Linear(2, 1),
    )


def walk_recipe(iterations: int = 2, **settings: Any) -> Recipe:
    own = settings.pop("rl", {})
    return recipe(iterations=iterations, task="own", options={}, rl={"env": None, **own}, **settings)


# -- resume


def saved(cluster: Cluster, chosen: Recipe, resume: str | None, stop_at: int) -> str | None:
    """Train on this rank; the process of a rank is lost at a step if it is positive."""
    if stop_at:

        def lose(*_: Any) -> None:
            raise PacelineError("the actor was killed", next_step="")

        plain = rollout_rounds.RolloutRounds._report

        def report(self: Any, stats: Any, record: Any) -> None:
            plain(self, stats, record)
            if stats.step >= stop_at:
                lose()

        with patch.object(rollout_rounds.RolloutRounds, "_report", report):
            try:
                train(chosen, resume=resume)
            except PacelineError:
                return None
    return train(chosen, resume=resume).sha256


@pytest.mark.capability("T1", "T2")
@pytest.mark.parametrize("every_steps", [soak_param(8), 6])
def test_a_run_that_was_lost_is_resumed_with_the_same_bits(tmp_path: Path, every_steps: int) -> None:
    """Saved between two iterations, and within one: open episodes are replayed from their resets."""
    chosen = recipe(iterations=6, checkpoint={"every_steps": every_steps})
    whole = train(chosen.replace(run_dir=str(tmp_path / "whole"))).sha256
    parts = chosen.replace(run_dir=str(tmp_path / "parts"))
    assert saved(Cluster.single(), parts, None, 13) is None
    kept = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").glob("step-*"))
    assert kept[-1] == {8: "step-00000016", 6: "step-00000012"}[every_steps]
    resumed = train(parts, resume=tmp_path / "parts")
    assert resumed.sha256 == whole is not None and resumed.steps == 24


@pytest.mark.capability("T1")
def test_a_checkpoint_of_one_actor_goes_on_with_two(tmp_path: Path) -> None:
    chosen = recipe(iterations=4)
    whole = train(chosen.replace(run_dir=str(tmp_path / "whole"))).sha256
    parts = chosen.replace(run_dir=str(tmp_path / "parts"), checkpoint={"every_steps": 6})
    assert saved(Cluster.single(), parts, None, 8) is None
    shas = run_ranks(resume_on_rank, 2, parts, str(tmp_path / "parts"))
    assert shas == [whole] * 2


def resume_on_rank(cluster: Cluster, chosen: Recipe, folder: str) -> str:
    from paceline.parallel.state_hash import whole_sha256
    from paceline.session.checkpointing import checkpoint_files, restore_checkpoint

    session = build_test_session(cluster, chosen)
    restore_checkpoint(session, checkpoint_files(chosen, Path(folder)), None, print)
    list(session.rounds())
    return whole_sha256(session.state, session.mesh, session.net)


def test_an_environment_that_repeats_nothing_begins_new_episodes_on_resume(tmp_path: Path) -> None:
    chosen = walk_recipe(4, run_dir=str(tmp_path / "run"), checkpoint={"every_steps": 4, "mode": "blocking"})
    messages: list[str] = []
    with patch("paceline.session.train_rank.plain_printer", lambda console: messages.append):
        with (
            patch.object(
                rollout_rounds.RolloutRounds,
                "_report",
                side_effect=[None, PacelineError("", next_step="")],
            ),
            pytest.raises(PacelineError),
        ):
            train(chosen, lambda: walk("random"))
        train(chosen, lambda: walk("random"), resume=tmp_path / "run")
    text = "\n".join(messages)
    assert "the results differ: a resumed run begins new episodes" in text
    assert "open episodes cannot be replayed in this environment, so new ones have begun" in text


# -- faults and bad input


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("raises", TaskError, r"environment 0 \(group 0\), episode \d, step \d raised ValueError: the door"),
        ("nan", TaskError, r"environment 0 \(group 0\), episode \d, step \d: returned a reward that is not"),
        ("hangs", TaskError, r"environment 0 \(group 0\), episode \d, step \d has not returned for 1 s"),
    ],
)
def test_a_fault_of_an_environment_is_named(fault: str, kind: type[Exception], message: str) -> None:
    chosen = walk_recipe(runtime={"deadline_seconds": 2.0}, rl={"check": False})
    with pytest.raises(kind, match=message):
        run(build_test_session(Cluster.single(), chosen, lambda: walk(fault)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Walk, "has no time limit"),
        (lambda: _with(action_space=gymnasium.spaces.MultiBinary(3)), "only discrete ones and a box"),
        (lambda: _with(observation_space=gymnasium.spaces.Discrete(3)), "the observations are Discrete"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused(make: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message) as raised:
        build_test_session(Cluster.single(), walk_recipe(), lambda: walk(make=make))
    assert raised.value.next_step


def _with(**spaces: Any) -> gymnasium.Env:
    environment = limited()
    for name, space in spaces.items():
        setattr(environment, name, space)
    return environment


def test_a_task_without_environments_or_an_unknown_one_is_refused() -> None:
    with pytest.raises(TaskError, match="there is no environment 'CartPoleee-v1'"):
        make_task(recipe(rl={"env": "CartPoleee-v1"}))
    with pytest.raises(RecipeError, match="the task 'digits' has no environments"):
        build_test_session(Cluster.single(), recipe(task="digits", options={}, rl={"env": "CartPole-v1"}))
    with pytest.raises(RecipeError, match="neither the recipe nor the task names an environment"):
        make_task(recipe(rl={"env": None}))


@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
def test_observations_of_another_dtype_are_converted_once_and_that_is_reported(dtype: type) -> None:
    space = gymnasium.spaces.Box(0, 200, (2,), dtype)
    messages: list[str] = []
    with patch("paceline.session.train_rank.plain_printer", lambda console: messages.append):
        train(walk_recipe(1), lambda: walk(make=lambda: _with(observation_space=space)))
    text = f"observations of {np.dtype(dtype)} are converted to float32 once"
    assert sum(text in message for message in messages) == 1


# -- rows


@pytest.mark.capability("T4")
def test_rows_have_no_transition_of_a_reset_and_ends_are_counted_apart() -> None:
    """Every row is a step of the walk; truncated ones have the value of the final observation after them."""
    session = build_test_session(Cluster.single(), walk_recipe(1), walk)
    (record,) = run(session)
    rows = session.rule.rollouts.episodes.rows
    assert rows.reward.min() == 1.0 and record["episodes"] == record["terminated"] + record["truncated"]
    assert record["terminated"] > 0 and record["truncated"] > 0 and record["mean_length"] <= 5
    # 16 steps of 16 environments: as many rewards as rows, in ended episodes and in open ones.
    open_steps = sum(map(len, session.rule.rollouts.episodes.actions))
    ended = round(record["mean_length"] * record["episodes"])
    assert ended + open_steps == 16 * 16 == len(rows.reward)


def test_pendulum_runs_with_a_box_of_actions() -> None:
    session = build_test_session(Cluster.single(), recipe(iterations=2, rl={"env": "Pendulum-v1"}))
    records = run(session)
    assert [record["not_equal"] for record in records] == [0, 0]
    assert session.rule.rollouts.episodes.rows.action.shape == (256, 1)


BOTH = ("observations", "rewards")


@pytest.mark.capability("T1")
@pytest.mark.parametrize("settings", [soak_param({"env": "Pendulum-v1"}), SMALL_DQN])
def test_normalizers_are_state_that_does_not_depend_on_the_number_of_ranks(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """With a box of actions, and with a store; of a run that goes on with two ranks."""
    chosen = recipe(iterations=4, rl={"normalize": BOTH, **settings}, checkpoint={"every_steps": 6})
    whole = train(chosen.replace(run_dir=str(tmp_path / "whole"))).sha256
    parts = chosen.replace(run_dir=str(tmp_path / "parts"))
    assert saved(Cluster.single(), parts, None, 8) is None
    assert run_ranks(resume_on_rank, 2, parts, str(tmp_path / "parts")) == [whole] * 2
    assert whole != train(chosen.replace(rl={**chosen.rl.model_dump(), "normalize": ()})).sha256


def test_evaluation_uses_the_normalizers_of_the_run_and_does_not_change_them(tmp_path: Path) -> None:
    chosen = recipe(iterations=2, rl={"normalize": BOTH}, run_dir=str(tmp_path / "run"))
    train(chosen)
    with open_run(tmp_path / "run") as opened:
        normalizers = opened.session.rule.rollouts.normalizers
        before = {piece.slot.name: piece.tensor.clone() for piece in normalizers.pieces()}
        assert int(before["observations/count"]) == 2 * 256
        first = play_opened(opened, 5)
        after = {piece.slot.name: piece.tensor for piece in normalizers.pieces()}
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        normalizers.load({name: torch.zeros_like(value) for name, value in before.items()})
        assert play_opened(opened, 5).sampled != first.sampled  # the twin: evaluated without them


def test_play_has_the_same_returns_again_and_they_are_of_whole_episodes(tmp_path: Path) -> None:
    chosen = recipe(iterations=2, run_dir=str(tmp_path / "run"))
    train(chosen)
    first, again = (rl.play(tmp_path / "run", episodes=5) for _ in range(2))
    assert first == again and first.greedy.values != first.sampled.values
    assert first.sampled.values == tuple(map(float, first.sampled.lengths))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(record["event"] == "rollout" for record in records) == 2
