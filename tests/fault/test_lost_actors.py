"""An actor is lost or an environment fails in a job: groups move to other ranks, and every fault is named."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests import command_jobs

pytest.importorskip("gymnasium", reason="needs paceline[rl]")

# The process with the number DIES fails in a step of an environment, once.
TASK = """
import os, signal, time
from pathlib import Path
import gymnasium
import numpy as np
import torch
from torch import nn
from paceline import rl

class Watched(gymnasium.Wrapper):
    calls = 0
    def step(self, action):
        Watched.calls += 1
        dies = os.environ.get("RANK") == os.environ.get("PYTEST_DIES")
        if dies and Watched.calls == int(os.environ["PYTEST_AT"]):
            if not Path("died").exists():
                Path("died").touch()
                if os.environ["PYTEST_HOW"] == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if os.environ["PYTEST_HOW"] == "raises":
                    raise ValueError("the door is closed")
                if os.environ["PYTEST_HOW"] == "hangs":
                    time.sleep(600)
        observation, *others = self.env.step(action)
        if os.environ.get("PYTEST_HOW") == "nan" and Watched.calls > int(os.environ["PYTEST_AT"]):
            observation = observation * np.nan
        return observation, *others

def build(dqn=False):
    torch.manual_seed(0)
    layers = lambda outputs: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, outputs))
    return rl.Task(policy=layers(2), value=None if dqn else layers(1),
                   env=lambda: Watched(gymnasium.make("CartPole-v1")))
"""
RECIPE = """
task = "task.py:build"
run_dir = "run"
reproducible = true
options = {{dqn = {is_dqn}}}
[rl]
algorithm = "{algorithm}"
envs = 12
shards = 3
steps = 16
total_steps = 1152
normalize = ["observations", "rewards"]
{learner}
[batch]
shards = 3
[checkpoint]
every_steps = 8
mode = "blocking"
[optimizer]
name = "adam"
lr = 0.01
[runtime]
deadline_seconds = 20.0
"""
LEARNERS = {
    "ppo": "[rl.ppo]\nepochs = 2\nminibatches = 2",
    "dqn": "[rl.dqn]\nbatch = 24\nupdates = 6\nstart = 200\ncapacity = 500\npriority = 0.6\ntarget_every = 4",
}


def run(folder: Path, algorithm: str, *words: str, **environ: str) -> tuple[int, str, list[dict[str, Any]]]:
    """The exit code, the output and the events of a job of three processes."""
    command_jobs.prepare(folder, TASK)
    is_dqn = str(algorithm == "dqn").lower()
    recipe = RECIPE.format(algorithm=algorithm, learner=LEARNERS[algorithm], is_dqn=is_dqn)
    (folder / "recipe.toml").write_text(recipe)
    words = words or ("train", "recipe.toml", "-n", "3")
    with command_jobs.start(folder, *words, **environ) as command:
        output = "".join(text or "" for text in command.communicate(timeout=150))
    path = folder / "run" / "metrics.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return command.returncode, output, events


def sha256_of(output: str) -> str:
    return output.rpartition("state sha256: ")[2].split()[0]


@cache
def undisturbed(algorithm: str) -> str:
    """The hash of the run that loses nobody."""
    code, output, _ = run(Path(mkdtemp()), algorithm)
    assert code == 0, output
    return sha256_of(output)


# The groups of a rank have 64 calls in an iteration, and 16 steps in the episode that `rl.check` plays twice.
@pytest.mark.capability("T1", "T3")
@pytest.mark.parametrize(
    ("algorithm", "dies"), [pytest.param("ppo", "1", marks=pytest.mark.soak), ("dqn", "0")]
)
def test_the_groups_of_a_killed_actor_move_and_the_rows_are_the_same(
    algorithm: str, dies: str, tmp_path: Path
) -> None:
    """It dies in the middle of an iteration, whose rows the others make anew."""
    code, output, events = run(tmp_path, algorithm, PYTEST_DIES=dies, PYTEST_AT="230", PYTEST_HOW="killed")
    assert code == 0, output
    assert "was killed by SIGKILL" in output and "the other ranks continue without it" in output
    (change, *_) = [event for event in events if event["event"] == "members" and event["lost"]]
    assert change["lost"] == [int(dies)] and change["ranks"] == 2
    assert sha256_of(output) == undisturbed(algorithm)


ACTORS = ("train", "recipe.toml", "-n", "3", "--strategy", "servers=1 sync=actors")


@pytest.mark.soak
@pytest.mark.capability("T1", "T2")
def test_the_groups_of_a_killed_actor_move_to_another_one_and_the_learner_goes_on(tmp_path: Path) -> None:
    """Rank 0 learns; the state has the bits of a run in which every rank acts and learns."""
    code, output, events = run(
        tmp_path, "ppo", *ACTORS, PYTEST_DIES="1", PYTEST_AT="230", PYTEST_HOW="killed"
    )
    assert code == 0, output
    (lost,) = [event for event in events if event["event"] == "lost"]
    assert lost["rank"] == 1 and lost["workers_left"] == 1
    assert sha256_of(output) == undisturbed("ppo")


@pytest.mark.capability("T1")
def test_a_fault_of_an_environment_of_an_actor_ends_the_job_by_name(tmp_path: Path) -> None:
    """It would fail on the other actor as well, so it does not move there."""
    code, output, _ = run(tmp_path, "ppo", *ACTORS, PYTEST_DIES="2", PYTEST_AT="100", PYTEST_HOW="raises")
    assert code != 0 and "raised ValueError: the door is closed" in output
    assert "environment " in output and "(group " in output


@pytest.mark.capability("T1")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "raised ValueError: the door is closed"),
        pytest.param("hangs", "has not returned for 10 s", marks=pytest.mark.soak),
    ],
)
def test_a_fault_of_an_environment_ends_the_job_by_name_and_a_resume_has_the_same_bits(
    how: str, message: str, tmp_path: Path
) -> None:
    """Rank 2 has group 2, which would fail on another rank as well."""
    code, output, _ = run(tmp_path, "ppo", PYTEST_DIES="2", PYTEST_AT="230", PYTEST_HOW=how)
    assert code != 0 and message in output
    assert "(group 2), episode" in output
    code, output, _ = run(tmp_path, "ppo", "train", "--resume", "run", "-n", "2")
    assert code == 0, output
    assert sha256_of(output) == undisturbed("ppo")
