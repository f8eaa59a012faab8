"""Where a job reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.console import job_output, print_error
from paceline.cli.runs import list_runs, write_page
from paceline.errors import PacelineError
from tests.hostile.formats import METRICS


def test_what_is_no_terminal_gets_lines_though_a_notebook_forces_colours(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """ipykernel sets this for all that a cell starts; a live line would be written as control codes."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = job_output()
    assert not console.is_terminal
    console.print("[red]step 1[/red]")
    assert capfd.readouterr().out == "step 1\n"


HOSTILE = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202e"


def with_controls(value: Any) -> Any:
    """A record of which every text moves the cursor, changes colours, and reads backwards."""
    if isinstance(value, dict):
        return {key: inside if key == "event" else with_controls(inside) for key, inside in value.items()}
    return value + HOSTILE if isinstance(value, str) and value not in ("nan", "data") else value


@pytest.mark.parametrize("as_json", [False, True])
def test_no_control_of_the_terminal_in_a_file_is_printed(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / f"run{HOSTILE}"
    run.mkdir()
    (run / "recipe.toml").write_text('task = "sum"\n')
    records = [with_controls(record) for record in METRICS]
    failure = {"event": "error", "time": 1e9, "rank": 0, "text": HOSTILE, "kind": "error", "exit_code": 1}
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [*records, failure]))
    write_page([run], None, as_json=as_json)
    list_runs([tmp_path], as_json=as_json)
    print_error(PacelineError(f"bad {HOSTILE}"))
    printed = "".join(capsys.readouterr())
    assert "\\x1b[2J" in printed and "bad" in printed
    assert not [c for c in printed if c != "\n" and not c.isprintable()], ascii(printed)
