"""A round of DiLoCo beside one of Hivemind's averager, on four lab hosts, in three codecs.

The model is one matrix, of which a sample reads all. A round of ours is a whole step: forward, backward, the
inner and the outer update and the exchange of outer gradients. Hivemind's is the averaging of one tensor of
the same size alone, with the search for a group in it. Needs Hivemind, which the project does not install.
"""

from __future__ import annotations

import importlib.util
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.diloco_libraries_job import CODECS, MARK
from benchmarks.marked import found_in
from benchmarks.measure import Series
from benchmarks.report import Options, Report, Table, blocks, present, series_data
from paceline.lab import Lab, Links

_ROOT = Path(__file__).resolve().parent.parent
_HOSTS = 4
_CASES = (("1gbit", 10), ("100mbit", 10))
"""Rate of every host's link, and megabytes of parameters."""


def run(rate: str, megabytes: int, options: Options) -> dict[str, Any]:
    """Measure one case in a lab of its own."""
    repeats, steps = (3, 1) if options.quick else (9, 2)
    command = ["paceline", "run", "-n", str(_HOSTS), "-m", "benchmarks.diloco_libraries_job"]
    with Lab(hosts=_HOSTS, links=Links(rate=rate)) as lab, tempfile.TemporaryDirectory() as folder:
        words = [str(megabytes), str(repeats), str(steps), folder]
        outcome = lab.run([*command, *words], directory=_ROOT, deadline_seconds=600.0)
    return found_in(outcome, MARK)


def table_of(rate: str, megabytes: int, series: list[Series], sent: dict[str, float]) -> Table:
    """Both sides of every codec."""
    named, rows = {one.name: one for one in series}, []
    for ours, theirs in CODECS.items():
        pair = [named[f"diloco, {ours}"], named[f"Hivemind, {theirs}"]]
        rows += [
            (
                one.name,
                f"{1e3 * one.median_seconds:.0f}",
                f"{1e3 * min(one.seconds):.0f} .. {1e3 * max(one.seconds):.0f}",
                f"{pair[0].median_seconds / one.median_seconds:.2f}",
                f"{sent[one.name] / 1e6:.2f}",
            )
            for one in pair
        ]
    columns = ("side", "ms a round", "blocks", "diloco / this", "MB a host sends")
    title = f"{_HOSTS} hosts at {rate}, {megabytes} MB of parameters ({blocks(series)})"
    return Table(title, columns, rows)


def measure(options: Options) -> Report:
    """All cases, if Hivemind is there."""
    question = f"{_HOSTS} hosts of the lab: a round of DiLoCo beside one of Hivemind's averager."
    if importlib.util.find_spec("hivemind") is None:
        return Report(question + " Hivemind is not installed: `pip install hivemind`.", [], {})
    question += f" Hivemind {version('hivemind')}."
    tables, data = [], {}
    for rate, megabytes in _CASES[: 1 if options.quick else None]:
        found = run(rate, megabytes, options)
        series = [
            Series(**{k: tuple(v) if isinstance(v, list) else v for k, v in s.items()})
            for s in found["series"]
        ]
        tables.append(table_of(rate, megabytes, series, found["sent"]))
        data[f"{rate}, {megabytes} MB"] = {"series": series_data(series), "sent": found["sent"]}
    return Report(question, tables, {"cases": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
