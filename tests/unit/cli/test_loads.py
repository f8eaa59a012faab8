"""Commands load what they need when they run."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code, without",
    [
        (
            "from paceline.cli.main import build_app; build_app(['--help'])",
            ["rich", "pydantic", "paceline.recipe"],
        ),
        (
            "from paceline.cli.main import build_app; build_app(['train', '--help'])",
            ["rich", "pydantic", "paceline.recipe", "paceline.launch", "paceline.report"],
        ),
        ("import paceline.report", ["paceline.recipe", "pydantic", "torch"]),
    ],
)
def test_a_command_loads_what_it_needs_when_it_runs(code: str, without: list[str]) -> None:
    code += f"; import sys; print([name for name in {without} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=240, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
