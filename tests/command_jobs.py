"""Jobs by the command line, each in its own folder: what it holds, and how `paceline` is started in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.cluster import process_environment

RECIPE = """
task = "task.py:build"
steps = 6
run_dir = "run"
[batch]
size = 8
shards = 2
[checkpoint]
every_steps = 2
mode = "blocking"
[runtime]
threads = 1
"""


def prepare(folder: Path, task: str) -> None:
    """A recipe and its task, and a folder for temporary files."""
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    (folder / "task.py").write_text(task)
    (folder / "recipe.toml").write_text(RECIPE)


def start(folder: Path, *words: str, before: Sequence[str] = (), **environ: str) -> subprocess.Popen[str]:
    """`paceline WORDS` in a prepared folder, behind the words `before`."""
    variables = {**process_environment(), "TMPDIR": str(folder / "tmp"), **environ}
    pipe = subprocess.PIPE
    command = [*before, sys.executable, "-m", "paceline", *words]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=variables)


def in_namespaces(script: str) -> list[str]:
    """Words before a command: a shell runs the script first, as root of namespaces of its own."""
    return ["unshare", "-Urm", "sh", "-c", script + '"$@"', "sh"]
