"""Two hosts of two ranks in the lab: the hierarchical route against the native one.

Both train in the same four processes and take turns. What a host sends over its link in a step is counted
by the kernel and stands beside the closed forms: 2 (P-1)/P n for a node of the native ring, 2 (N-1)/N n for
one of the hierarchical route.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.marked import found_in
from benchmarks.measure import Series
from benchmarks.report import Options, Report, Table, blocks, comparison_table, present, series_data
from benchmarks.route_job import MARK, ROUTES
from paceline.comm import hierarchical_cost, native_cost
from paceline.lab import Lab, Links

_ROOT = Path(__file__).resolve().parent.parent
_HOSTS, _LOCAL = 2, 2


@dataclass(frozen=True)
class Case:
    """What is trained over which links, and how long.

    Args:
        subject: name in `benchmarks.route_job.SUBJECTS`.
        rate: of every host's link; empty: as fast as the machine makes it.
    """

    title: str
    subject: str
    rate: str
    steps: int
    repeats: int = 7


def cases(options: Options) -> list[Case]:
    """What is measured."""
    if options.quick:
        return [Case("quick MLP, 100 Mbit/s", "quick", "100mbit", 2, 3)]
    return [
        Case("MLP 1024-1024-512-10, fp32, batch 64, 100 Mbit/s", "mlp", "100mbit", 2),
        Case(f"byte-gpt, {options.precision}, batch 8 x 256 bytes, 100 Mbit/s", "gpt", "100mbit", 2),
        Case("the MLP, 1 Gbit/s", "mlp", "1gbit", 5),
        Case("the MLP, links as fast as the machine makes them", "mlp", "", 5),
    ]


def run(case: Case, precision: str) -> dict[str, Any]:
    """Measure one case in a lab of its own."""
    links = Links(rate=case.rate) if case.rate else Links()
    command = ["paceline", "run", "-n", str(_HOSTS * _LOCAL), "-m", "benchmarks.route_job"]
    with Lab(hosts=_HOSTS, links=links) as lab:
        outcome = lab.run(
            [*command, case.subject, str(case.repeats), str(case.steps), precision],
            directory=_ROOT,
            deadline_seconds=200.0,
        )
    return found_in(outcome, MARK)


def closed_form(num_parameters: int) -> dict[str, float]:
    """Bytes that a host sends in a step for the gradients, by route."""
    num_bytes = 4 * num_parameters
    between = hierarchical_cost(num_bytes, _HOSTS, _LOCAL)[1].sent_bytes
    ring = native_cost(
        "all_reduce", num_bytes, _HOSTS * _LOCAL
    ).sent_bytes  # one rank's neighbour is elsewhere
    return dict(zip(ROUTES, (ring, _LOCAL * between), strict=True))


def bytes_table(case: Case, found: dict[str, Any]) -> Table:
    """Closed form and kernel's count."""
    rows = []
    wanted_of = closed_form(found["parameters"])
    for name, sent in found["sent"].items():
        wanted = wanted_of[name.partition(",")[0]]
        rows.append((name, f"{wanted / 1e6:.3f}", f"{sent / 1e6:.3f}", f"{sent / wanted:.3f}"))
    columns = ("side", "gradients, closed form, MB", "on the link, MB", "ratio")
    return Table(f"{case.title}: what a host sends in a step", columns, rows)


def measure(options: Options) -> Report:
    """Run all cases."""
    tables: list[Table] = []
    data = {}
    for case in cases(options):
        found = run(case, options.precision)
        series = [
            Series(**{k: tuple(v) if isinstance(v, list) else v for k, v in s.items()})
            for s in found["series"]
        ]
        size = found["parameters"] / 1e6
        title = f"{case.title} ({size:.2f} M parameters, {blocks(series)})"
        tables += [comparison_table(title, series, "native"), bytes_table(case, found)]
        data[case.title] = {"series": series_data(series), "sent": found["sent"]}
    question = f"{_HOSTS} hosts of {_LOCAL} ranks in the lab: the hierarchical route against the native one."
    return Report(question, tables, {"cases": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
