"""Jobs by the command line, each in its own folder: what it holds, and how `paceline` is started in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.commands import Command

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


def start(folder: Path, *words: str, before: Sequence[str] = (), **environ: str) -> Command:
    """`paceline WORDS` in a prepared folder, behind the words `before`.

    With variables whose names begin with `PYTEST_` it can still be forked (see `tests.commands`).
    """
    variables = {"TMPDIR": str(folder / "tmp"), **environ}
    return Command(["paceline", *words], folder, variables, before=before)


def in_namespaces(script: str) -> list[str]:
    """Words before a command: a shell runs the script first, as root of namespaces of its own."""
    return ["unshare", "-Urm", "sh", "-c", script + '"$@"', "sh"]
