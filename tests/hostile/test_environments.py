"""Machines and users as they are elsewhere: it works, or the error says what is in the way."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.errors import RecipeError
from paceline.job.launcher_reports import LauncherAddress
from paceline.launch.node_liveness import NodeLivenessProbe, probe_node
from paceline.recipe import load_recipe
from tests.hostile.jobs import End, end_of, prepare, start

pytestmark = pytest.mark.timeout(240)
NOBODY = ("unshare", "-U", "--map-user=12345", "--map-group=12345", "env", "-uHOME", "-uUSER", "-uLOGNAME")


def job(folder: Path, *before: str, processes: int = 1, **environ: str) -> End:
    prepare(folder)
    words = ("train", "recipe.toml", "-n", str(processes))
    with start(folder, *words, before=before, **environ) as process:
        return end_of(process)


def limited(what: str) -> tuple[str, ...]:
    return ("sh", "-c", f'ulimit {what} && exec "$@"', "sh")


def may_be_nobody() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NOBODY, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.soak
@pytest.mark.skipif(not may_be_nobody(), reason="needs user namespaces")
def test_a_user_that_no_passwd_knows_trains_in_a_locale_of_ascii_in_a_folder_of_other_letters(
    tmp_path: Path,
) -> None:
    end = job(tmp_path / "käse-東", *NOBODY, LC_ALL="C")
    assert end.code == 0, end.err


def test_a_folder_that_no_text_can_name_is_a_named_error(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    prepare(folder)
    with pytest.raises(RecipeError, match="task: expected text in UTF-8"):
        load_recipe(folder / "recipe.toml", [f'task="{folder}/task.py:build"'])


def require_named(end: End, text: str) -> None:
    assert end.code == 7, end.err
    assert text in end.err and "next:" in end.err


def test_a_limit_of_memory_that_is_too_small_is_named(tmp_path: Path) -> None:
    end = job(tmp_path, *limited("-v 200000"), processes=2)
    require_named(end, "MemoryLimitError: out of memory: ")


@pytest.mark.soak  # a limit of memory is in the suite
def test_a_limit_of_open_files_that_is_too_small_is_named(tmp_path: Path) -> None:
    """How many a job needs depends on the machine; with so few it ends, wherever it is by then."""
    for most in (16, 13):
        end = job(tmp_path / str(most), *limited(f"-n {most}"), processes=2)
        if end.code:
            break
    require_named(end, "MemoryLimitError: too many files are open: ")


def test_a_hundred_and_twenty_nine_that_say_nothing_do_not_make_a_launcher_look_dead(tmp_path: Path) -> None:
    with NodeLivenessProbe(2, 0, tmp_path, ("127.0.0.1", 29500)) as peers, ExitStack() as idle:
        for _ in range(129):
            idle.enter_context(socket.create_connection(("127.0.0.1", peers.port), timeout=20))
        assert probe_node(LauncherAddress(0, "here", "127.0.0.1", peers.port)) == ""
