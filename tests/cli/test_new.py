"""`paceline new`: the folder trains at once, its test passes, and nothing is overwritten."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.new import render_files
from paceline.errors import RunFolderError
from tests.commands import run
from tests.marks import soak_param


@pytest.mark.parametrize("by_pytest", [False, soak_param(True)], ids=["called", "by pytest"])
def test_a_new_folder_trains_at_once_and_its_test_passes(
    by_pytest: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(tmp_path, "new", "my-model")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "my-model"
    assert {path.name for path in folder.iterdir()} == {"model.py", "recipe.toml", "test_my_model.py"}
    trained = run(tmp_path, "train", folder / "recipe.toml", "--set", "steps=3")
    assert trained.returncode == 0, trained.stderr
    if by_pytest:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
        done = subprocess.run(command, cwd=tmp_path, check=False, timeout=400, capture_output=True, text=True)
        assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout
    else:
        monkeypatch.chdir(tmp_path)
        tests = runpy.run_path(str(folder / "test_my_model.py"))
        tests["test_the_model_learns"](tmp_path)
        tests["test_two_processes_compute_what_one_does"]()

    before = {path.name: path.read_text() for path in folder.glob("*.*")}
    assert before == render_files("my-model")
    again = run(tmp_path, "new", "my-model")
    assert again.returncode == RunFolderError.exit_code and "'my-model' exists" in again.stderr
    assert before == {path.name: path.read_text() for path in folder.glob("*.*")}


@pytest.mark.parametrize("name", ["file", "file/inside"])
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    done = run(tmp_path, "new", name)
    assert done.returncode == RunFolderError.exit_code and "next" in done.stderr, done.stderr
    assert (tmp_path / "file").read_text() == "mine"
