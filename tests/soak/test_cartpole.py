"""Policies that are trained to their end: `make soak`. A few minutes each on two idle cores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gymnasium", reason="needs paceline[rl]")
ROOT = Path(__file__).parents[2]


def paceline(*words: str) -> str:
    """Run a command; return what it printed."""
    command = [sys.executable, "-m", "paceline", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.soak
@pytest.mark.capability("T1")
@pytest.mark.timeout(900)
def test_two_actors_solve_cartpole_in_a_hundred_thousand_steps(tmp_path: Path) -> None:
    paceline("train", "recipes/cartpole.toml", "-n", "2", "--set", f"run_dir={tmp_path / 'run'}")
    found = json.loads(paceline("evaluate", str(tmp_path / "run"), "--json"))
    for kind in ("greedy", "sampled"):
        assert len(found[kind]["returns"]) == 100 and found[kind]["mean"] >= 475.0, kind


@pytest.mark.soak
@pytest.mark.capability("T3", "T4")
@pytest.mark.timeout(1800)
def test_dqn_learns_cartpole_from_its_store(tmp_path: Path) -> None:
    paceline("train", "recipes/cartpole-dqn.toml", "-n", "1", "--set", f"run_dir={tmp_path / 'run'}")
    found = json.loads(paceline("evaluate", str(tmp_path / "run"), "--json"))
    assert found["greedy"]["mean"] >= 400.0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ppo_swings_a_pendulum_up_with_a_box_of_actions(tmp_path: Path) -> None:
    """A policy that does nothing has about -1,200."""
    paceline("train", "recipes/pendulum.toml", "-n", "1", "--set", f"run_dir={tmp_path / 'run'}")
    found = json.loads(paceline("evaluate", str(tmp_path / "run"), "--json"))
    assert found["greedy"]["mean"] >= -300.0
