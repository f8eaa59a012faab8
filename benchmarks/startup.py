"""How long the command line takes to answer: whole processes, from start to exit.

An empty Python is measured beside them: what it takes is not Paceline's.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.measure import Side, take_turns
from benchmarks.report import Report, Table, present, series_data

_DEADLINE_SECONDS = 30.0
_PACELINE = str(Path(sys.executable).with_name("paceline"))

COMMANDS: dict[str, tuple[list[str], float | None]] = {
    'python -c "pass"': ([sys.executable, "-c", "pass"], None),
    'python -c "import paceline"': ([sys.executable, "-c", "import paceline"], 0.1),
    "paceline --help": ([_PACELINE, "--help"], 0.3),
    "paceline train --help": ([_PACELINE, "train", "--help"], 0.3),
}
"""By name: the command, and the seconds it may take."""


def run(command: list[str]) -> float:
    """Run a command to its end."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_DEADLINE_SECONDS)
    return 0.0


def measure(quick: bool) -> Report:
    """Run every command, by turns."""
    sides = [Side(name, partial(run, command)) for name, (command, _) in COMMANDS.items()]
    found = take_turns(sides, repeats=3 if quick else 21, steps=1, warmup=1)
    rows = []
    for series in found:
        limit = COMMANDS[series.name][1]
        verdict = "" if limit is None else "met" if series.median_seconds < limit else "missed"
        low, *_, high = statistics.quantiles(series.seconds, n=4)
        rows.append(
            (
                series.name,
                f"{series.median_seconds:.3f}",
                f"{low:.3f} .. {high:.3f}",
                f"{min(series.seconds):.3f} .. {max(series.seconds):.3f}",
                "" if limit is None else f"< {limit:g}",
                verdict,
            )
        )
    columns = ("command", "median s", "quartiles", "min .. max", "wanted", "verdict")
    title = f"{len(found[0].seconds)} runs of each, by turns"
    return Report(
        "Whole-process time of commands.", [Table(title, columns, rows)], {"series": series_data(found)}
    )


if __name__ == "__main__":
    present(measure, __doc__ or "")
