"""A policy that is trained to its end: `make soak`. A minute and a half on two idle cores."""

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
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=ROOT, check=False)
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
