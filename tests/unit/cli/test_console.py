"""Where a job reports."""

from __future__ import annotations

import pytest

from paceline.cli.console import job_output


def test_what_is_no_terminal_gets_lines_though_a_notebook_forces_colours(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """ipykernel sets this for all that a cell starts; a live line would be written as control codes."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = job_output()
    assert not console.is_terminal
    console.print("[red]step 1[/red]")
    assert capfd.readouterr().out == "step 1\n"
