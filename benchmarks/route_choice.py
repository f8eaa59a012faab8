"""`route=auto` in the lab: is the route that it chooses for a size the best one, and are its times right?

On each network the routes are tried as a session does, for a few seconds; then all of them are measured at
sizes from 1 KiB to 64 MiB, taking turns; short sums are timed four in a row. Two bounds: the chosen route is
within 10 % of the best one, and every route takes what was predicted, within 20 %. It takes eight minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.marked import found_in
from benchmarks.report import Options, Report, Table, present
from benchmarks.route_choice_job import MARK
from paceline.lab import Lab, Links

_ROOT = Path(__file__).resolve().parent.parent
_CHOSEN, _PREDICTED = 1.1, 0.2


@dataclass(frozen=True)
class Case:
    """A network.

    Args:
        hosts: by name.
        links: of every host.
        racks: host names by rack; none: one switch.
        ranks: processes, over all hosts.
    """

    title: str
    hosts: tuple[str, ...]
    ranks: int
    links: Links = field(default_factory=Links)
    racks: dict[str, list[str]] | None = None
    uplinks: Links | None = None
    most_bytes: int = 1 << 26
    repeats: int = 15


def cases(options: Options) -> list[Case]:
    """What is measured."""
    four = ("a", "b", "c", "d")
    if options.quick:
        return [Case("quick: 2 hosts", four[:2], 2, most_bytes=1 << 14, repeats=1)]
    racks = {"left": ["a", "b"], "right": ["c", "d"]}
    return [
        Case("4 hosts, links as fast as the machine makes them", four, 4),
        Case("4 hosts, 1 Gbit/s", four, 4, Links(rate="1gbit")),
        Case("4 hosts, 100 Mbit/s, 1 ms", four, 4, Links(rate="100mbit", latency="1ms")),
        Case(
            "2 racks of 2 hosts, 200 Mbit/s, uplinks of 50 Mbit/s",
            four,
            4,
            Links(rate="200mbit"),
            racks,
            Links(rate="50mbit"),
        ),
        Case("2 hosts of 2 ranks, 100 Mbit/s", four[:2], 4, Links(rate="100mbit")),
    ]


def run(case: Case) -> dict[str, Any]:
    """Measure one network in a lab of its own."""
    command = ["paceline", "run", "-n", str(case.ranks), "-m", "benchmarks.route_choice_job"]
    with Lab(case.hosts, case.links, racks=case.racks, uplinks=case.uplinks) as lab:
        outcome = lab.run(
            [*command, str(case.most_bytes), str(case.repeats)], directory=_ROOT, deadline_seconds=420.0
        )
    return found_in(outcome, MARK)


def table_of(case: Case, found: dict[str, Any]) -> Table:
    """Each size: the choice, the best, and all routes as measured / predicted."""
    rows, words = [], [*found["sizes"][0]["measured"]]
    met = close = total = 0
    for size in found["sizes"]:
        measured, predicted = size["measured"], size["predicted"]
        best = min(measured, key=measured.get)
        ratio = measured[size["chosen"]] / measured[best]
        met += ratio <= _CHOSEN
        close += sum(abs(predicted[word] / measured[word] - 1) <= _PREDICTED for word in words)
        total += len(words)
        cells = [f"{measured[word] * 1e3:.3g}/{predicted[word] * 1e3:.3g}" for word in words]
        rows.append((f"{size['bytes']:,}", size["chosen"], best, f"{ratio:.2f}", *cells))
    title = f"{case.title}: {found['choice']} (tried for {found['seconds']:.1f} s); ms measured / predicted"
    remarks = [
        f"chosen within {_CHOSEN - 1:.0%} of the best: {met} of {len(rows)} sizes; predicted within"
        f" {_PREDICTED:.0%}: {close} of {total}"
    ]
    return Table(
        title,
        ("bytes", "chosen", "best", "ratio", *(word.replace("recursive-", "") for word in words)),
        rows,
        remarks,
    )


def measure(options: Options) -> Report:
    """All networks."""
    tables, data = [], {}
    for case in cases(options):
        found = run(case)
        tables.append(table_of(case, found))
        data[case.title] = found
    return Report("route=auto in the lab: an all_reduce of 4 ranks by size.", tables, {"cases": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
