"""Commands load what they need when they run."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("rich", "pydantic", "numpy", "torch")
ROOMS = ("recipe", "launch", "report", "studies", "observe", "pipeline_schedule", "lab", "plan", "session")
HELP = [*HEAVY, *(f"paceline.{room}" for room in ROOMS)]
COUNTED = """
import sys, typer
libraries = len(sys.modules)
from paceline.cli.main import build_app
build_app({words})
print(len(sys.modules) / libraries)
"""


def printed(code: str) -> str:
    """What a fresh Python says."""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=240, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "code, without",
    [
        ("from paceline.cli.main import build_app; build_app(['--help'])", HELP),
        ("from paceline.cli.main import build_app; build_app()", HELP),
        ("import paceline.report", ["paceline.recipe", "pydantic", "torch"]),
    ],
    ids=["help", "the help of every command", "a run folder"],
)
def test_a_command_loads_what_it_needs_when_it_runs(code: str, without: list[str]) -> None:
    """`build_app()` loads what every command takes, as the help of each does for one."""
    assert printed(f"{code}; import sys; print([m for m in {without} if m in sys.modules])") == "[]"


def test_what_a_command_takes_is_far_less_than_typer_itself() -> None:
    """Start-up is imports: all commands at once, and each the more, add less than typer has modules."""
    assert float(printed(COUNTED.format(words="None"))) < 2.0


def test_a_command_that_runs_does_load() -> None:
    """The twin of the first: the names are those that are looked for, and they can be there."""
    code = (
        "import paceline.cli.comparison_runs, paceline.cli.study_runs, paceline.cli.console as c; c.output()"
    )
    found = printed(f"{code}; import sys; print([m for m in {HELP} if m in sys.modules])")
    assert {"'rich'", "'paceline.launch'", "'paceline.report'", "'paceline.studies'"} <= set(
        found.strip("[]").split(", ")
    )
