"""Versions, help, strategies on a screen, logs and prints of all ranks, a resume that keeps its processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_run_files import SHORT, SUM
from tests.commands import run

TASK = """
import torch
from paceline import Cluster, Loss, Task

def build():
    print("hello of rank", Cluster.from_env().global_rank)
    def loss(model, batch):
        return Loss(model(batch).square().sum(), len(batch))
    return Task(torch.nn.Linear(3, 1), torch.randn(16, 3), loss)
"""


def test_versions_and_short_help(tmp_path: Path) -> None:
    said = run(tmp_path, "--version").stdout
    assert said.startswith("paceline 0.") and "torch 2." in said and "Python 3." in said
    for words in (["-h"], ["train", "-h"], ["recipe", "show", "-h"]):
        done = run(tmp_path, *words)
        assert done.returncode == 0 and "Usage: paceline" in done.stdout
    assert "--show-completion" in run(tmp_path, "-h").stdout


def test_strategies_fit_a_screen(tmp_path: Path) -> None:
    lines = run(tmp_path, "strategies").stdout.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert not any("not supported:" in line for line in lines) and "--all prints the reasons" in lines[-1]
    every = run(tmp_path, "strategies", "--all").stdout
    assert every.count("not supported: ") == int(lines[-1].split()[0])


def test_the_schema_is_printed(tmp_path: Path) -> None:
    assert "properties" in json.loads(run(tmp_path, "recipe", "schema").stdout)


@pytest.mark.capability("O1")
def test_prints_of_all_ranks_appear_and_are_kept(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "own.toml").write_text('task = "task.py:build"\nsteps = 2\n[batch]\nsize = 8\n')
    done = run(tmp_path, "train", "own.toml", "-n", 2, "--logs", "logs", *SHORT)
    assert done.returncode == 0, done.stderr
    assert "hello of rank 0" in done.stdout and "[rank 1] hello of rank 1" in done.stderr
    assert "hello of rank 1" in (tmp_path / "logs" / "rank-1.log").read_text()


@pytest.mark.capability("N1")
def test_a_resume_keeps_the_number_of_processes_or_says_that_it_changes(tmp_path: Path) -> None:
    first = run(tmp_path, "train", SUM, "-n", 2, *SHORT, "--set", "run_dir=run")
    assert first.returncode == 0, first.stderr
    same = run(tmp_path, "train", "--resume", "run", "--set", "steps=4")
    assert same.returncode == 0 and "from here on" not in same.stdout.replace("from here on steps", "")
    other = run(tmp_path, "train", "--resume", "run", "--set", "steps=6", "-n", 1)
    assert other.returncode == 0 and "the run continues on 1 process (before: 2)" in other.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [one["ranks"] for one in map(json.loads, lines) if one["event"] == "run"] == [2, 2, 1]
