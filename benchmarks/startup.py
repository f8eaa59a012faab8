"""How long the command line takes to answer, and a job of one step: whole processes, from start to exit.

An empty Python is measured beside them: what it takes is not Paceline's. Jobs are started with each worker
anew; as ever, which is with a fork server of the job's own where workers are as many as cores; and with a
server that is there already, as in `paceline sweep`. One step and an evaluation are work, the rest is start.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.measure import Side, take_turns
from benchmarks.report import Options, Report, Table, present, series_data
from paceline.cli.study_runs import TRAIN_MODULES
from paceline.job.cluster import process_environment
from paceline.launch import fork_server
from paceline.launch.fork_client import FORK_SERVER_VARIABLE, NO_FORK_SERVER

_DEADLINE_SECONDS = 30.0
_WORKERS = (1, 2, 4)
_RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "sum.toml"
_PACELINE = str(Path(sys.executable).with_name("paceline"))

COMMANDS: dict[str, tuple[list[str], float | None]] = {
    'python -c "pass"': ([sys.executable, "-c", "pass"], None),
    'python -c "import paceline"': ([sys.executable, "-c", "import paceline"], 0.1),
    "paceline --help": ([_PACELINE, "--help"], 0.3),
    "paceline train --help": ([_PACELINE, "train", "--help"], 0.3),
}
"""By name: the command, and the seconds it may take."""


def run(command: list[str], environ: Mapping[str, str] | None = None, folder: str | None = None) -> float:
    """Run a command to its end, in a folder where it may leave something."""
    # With a pipe to read, its end is noticed at once; waiting with a deadline alone looks every 50 ms.
    subprocess.run(
        command, check=True, stdout=subprocess.PIPE, timeout=_DEADLINE_SECONDS, env=environ, cwd=folder
    )
    return 0.0


def jobs_table(repeats: int) -> Table:
    """Jobs of one step, by turns."""
    rows = []
    plain = process_environment()
    with (
        tempfile.TemporaryDirectory() as folder,
        fork_server(TRAIN_MODULES) as variables,
    ):
        ways = {
            "anew": {**plain, FORK_SERVER_VARIABLE: NO_FORK_SERVER},
            "as ever": plain,
            "server": {**plain, **variables},
        }
        for workers in _WORKERS:
            job = [_PACELINE, "train", str(_RECIPE), "-n", str(workers)]
            job += ["--set", "steps=1", "--set", "checkpoint.keep=1"]
            sides = [Side(name, partial(run, job, environ, folder)) for name, environ in ways.items()]
            found = take_turns(sides, repeats=repeats, steps=1, warmup=1)
            row = [str(workers)]
            for side in found:
                ratio = side.median_seconds / found[0].median_seconds
                spread = f"{min(side.seconds):.2f} .. {max(side.seconds):.2f}"
                row += [f"{side.median_seconds:.2f}", spread, f"{ratio:.2f}"][: 2 if side is found[0] else 3]
            rows.append(tuple(row))
    columns = ("workers", "anew: s", "min .. max")
    columns += ("as ever: s", "min .. max", "ratio", "server there: s", "min .. max", "ratio")
    return Table(f"A job of one step, {repeats} runs of each, by turns", columns, rows)


def measure(options: Options) -> Report:
    """Run every command, by turns."""
    sides = [Side(name, partial(run, command)) for name, (command, _) in COMMANDS.items()]
    found = take_turns(sides, repeats=3 if options.quick else 21, steps=1, warmup=1)
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
    tables = [Table(title, columns, rows), jobs_table(1 if options.quick else 7)]
    return Report("Whole-process time of commands and jobs.", tables, {"series": series_data(found)})


if __name__ == "__main__":
    present(measure, __doc__ or "")
