"""`paceline sweep`: the same recipe under several settings, one job after the other, and what they show."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.console import error_output, output
from paceline.cli.sweep_runs import plan_runs, train_all
from paceline.studies import (
    Summary,
    Target,
    cells_of,
    parse_axis,
    render_plot,
    render_table,
    summarize,
)

if TYPE_CHECKING:
    from rich.console import Console


def run_sweep(
    recipe: Path,
    over: list[str],
    strategy: str | None,
    settings: list[str],
    target: str | None,
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """See `paceline sweep --help`."""
    wanted = Target.parse(target) if target is not None else None
    cells = cells_of([parse_axis(text) for text in over])
    folder = out or Path("sweeps") / f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.stem}"
    console = error_output() if as_json else output()
    runs = plan_runs(recipe, settings, strategy, cells, folder)
    done, failed, code = train_all(runs, lambda line: _say(console, line))
    summary = summarize(done, failed, wanted)
    _keep(summary, folder)
    if as_json:
        output().print_json(json.dumps(summary.to_json()))
    ends = [f"results: {folder / 'results.json'}", f"plot:    {folder / 'plot.svg'}"]
    _say(console, *render_table(summary), *ends)
    sys.exit(code)


def _keep(summary: Summary, folder: Path) -> None:
    """The same, as files."""
    files = {
        "results.json": json.dumps(summary.to_json(), indent=1) + "\n",
        "table.txt": "\n".join(render_table(summary)) + "\n",
        "plot.svg": render_plot(summary),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
