"""ZeRO-1 over hosts of the lab: gradients scattered two buckets at a time, or all at a time.

Two at a time go through memory that stays, and their sums lie in the buckets; backward waits where the link
is slower than it. All at a time never wait, and take as much memory as the gradients again. Both are sessions
of the same processes, which take turns.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.marked import found_in
from benchmarks.report import Options, Report, Table, present
from benchmarks.scatters_job import ALL, MARK
from paceline.lab import Lab, Links

_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """What is trained over which links.

    Args:
        subject: see `benchmarks.scatters_job.subject_of`.
        rate: of every host's link; empty: as fast as the machine makes it.
    """

    title: str
    subject: str
    hosts: int
    rate: str
    repeats: int = 15


def cases(options: Options) -> list[Case]:
    """What is measured."""
    if options.quick:
        return [Case("quick MLP, 2 hosts, 1 Gbit/s", "quick", 2, "1gbit", 2)]
    gpt = f"byte-gpt, {options.precision}"
    return [
        Case("8.4 M MLP, 2 hosts, links as fast as the machine makes them", "mlp", 2, ""),
        Case("8.4 M MLP, 2 hosts, 1 Gbit/s", "mlp", 2, "1gbit"),
        Case("8.4 M MLP, 2 hosts, 100 Mbit/s", "mlp", 2, "100mbit", 5),
        Case(f"{gpt}, 2 hosts, 1 Gbit/s", "gpt", 2, "1gbit"),
        Case(f"{gpt}, 2 hosts, 100 Mbit/s", "gpt", 2, "100mbit", 9),
        Case(f"{gpt}, 4 hosts, 1 Gbit/s", "gpt", 4, "1gbit", 9),
    ]


def run(case: Case, precision: str) -> dict[str, Any]:
    """Measure one case in a lab of its own."""
    command = ["paceline", "run", "-n", str(case.hosts), "-m", "benchmarks.scatters_job", case.subject]
    links = Links(rate=case.rate) if case.rate else Links()
    with Lab(hosts=case.hosts, links=links) as lab:
        outcome = lab.run([*command, str(case.repeats), precision], directory=_ROOT, deadline_seconds=200.0)
    return found_in(outcome, MARK)


def table_of(case: Case, found: dict[str, Any]) -> Table:
    """Both sides: a step, and its memory."""
    rows, medians = [], {one["name"]: statistics.median(one["seconds"]) for one in found["series"]}
    for series in found["series"]:
        name, own, memory = series["name"], sorted(series["seconds"]), found["memory"][series["name"]]
        rows.append(
            (
                name,
                f"{1e3 * medians[name]:.1f}",
                f"{1e3 * own[0]:.1f} .. {1e3 * own[-1]:.1f}",
                f"{medians[name] / medians[ALL]:.3f}",
                f"{memory['most'] / 1e6:.2f}",
                str(memory["blocks"]),
            )
        )
    columns = ("scattered", "ms", "min .. max", "/ all", "MB at most beside what stays", "blocks of 64 KiB")
    return Table(f"{case.title} ({found['parameters'] / 1e6:.2f} M parameters)", columns, rows)


def measure(options: Options) -> Report:
    """All cases."""
    tables, data = [], {}
    for case in cases(options):
        found = run(case, options.precision)
        tables.append(table_of(case, found))
        data[case.title] = found
    return Report("ZeRO-1 over hosts, by how many buckets travel at a time.", tables, {"cases": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
