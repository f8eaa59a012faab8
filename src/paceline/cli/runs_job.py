"""`paceline runs` and `paceline report`: what there is, and what it says."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.cli.console import output
from paceline.errors import DataError
from paceline.report import Facts, Run, facts, find_runs, read_run, render, summary, write_report
from paceline.report.facts import spell, spell_seconds
from paceline.report.folder import REPORT, RUNS


def list_runs(folders: list[Path] | None, *, as_json: bool) -> None:
    """A line for each run, or JSON."""
    wanted = folders or [RUNS]
    found = [read_run(path) for path in find_runs(wanted if folders or RUNS.is_dir() else [])]
    if as_json:
        output().print_json(json.dumps([_record(run) for run in found]))
        return
    if not found:
        output().print(f"no runs in {', '.join(map(str, wanted))}", markup=False, highlight=False)
        return
    head = ["run", "status", "started", "ranks", "steps", "loss", "held-out", "speed", "time"]
    rows = [head, *(_row(run, facts(run)) for run in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        output().print(line, markup=False, highlight=False, soft_wrap=True)


def write_page(run: list[Path], to: Path | None, *, as_json: bool) -> None:
    """One page about them, and its words."""
    found = [read_run(path) for path in run]
    path, refusal = _written(found, to)
    if as_json:
        page = None if refusal else str(path)
        output().print_json(json.dumps({"page": page, "runs": [_record(one) for one in found]}))
    else:
        for one in found:
            for line in ([f"{one.name}:"] if len(found) > 1 else []) + summary(one):
                output().print(line, markup=False, highlight=False, soft_wrap=True)
    if refusal is not None:
        raise refusal
    if not as_json:
        output().print(f"page: {path}", markup=False, highlight=False, soft_wrap=True)


def _written(found: list[Run], to: Path | None) -> tuple[Path, DataError | None]:
    """Where the page goes, and why it cannot be written there."""
    path = to or (found[0].folder / REPORT if len(found) == 1 else Path(REPORT))
    try:
        if to is None and len(found) == 1:
            return write_report(found[0].folder), None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(found, path.parent), encoding="utf-8")
    except OSError as error:
        what = f"the page cannot be written: {error.strerror or error}"
        return path, DataError(what, where=str(path), next_step="choose another place: -o FILE")
    return path, None


def _record(run: Run) -> dict[str, Any]:
    return {"run": str(run.folder), **_finite(asdict(facts(run))), "summary": summary(run)}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    found = json.loads(json.dumps(values), parse_constant=str)
    return dict(found)


def _row(run: Run, found: Facts) -> list[str]:
    begun = f"{datetime.fromtimestamp(found.started):%Y-%m-%d %H:%M}" if found.started is not None else "–"
    return [
        str(run.folder),
        found.status,
        begun,
        str(found.ranks or "–"),
        f"{found.steps}/{found.num_steps}" if found.num_steps else str(found.steps),
        spell(found.loss),
        spell(found.held_out),
        "–" if found.rate is None else f"{spell(found.rate, 3)} {found.rate_unit}",
        spell_seconds(found.seconds),
    ]
