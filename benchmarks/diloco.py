"""DiLoCo on slow links: four hosts of the lab, and what every-step sends and waits for at the same samples.

Each host has one rank of one thread and one window of text a step, so there is little to compute beside what
travels; hosts share the cores of this machine. DiLoCo is the streaming one: four fragments, coded in four
bits, that travel beside the steps. Its round is the longest that a run has, two intervals, at the end of
which all replicas meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.diloco_job import MARK
from benchmarks.marked import found_in
from benchmarks.report import Options, Report, Table, present
from paceline.lab import Lab, Links

_ROOT = Path(__file__).resolve().parent.parent
_HOSTS = 4
_FEWER, _COMPUTING = 500.0, 95.0


@dataclass(frozen=True)
class Case:
    """Which links, and how many steps replicas train alone.

    Args:
        rate: of every host's link.
    """

    title: str
    rate: str
    interval: int


def cases(options: Options) -> list[Case]:
    """What is measured."""
    if options.quick:
        return [Case("quick byte-gpt, 100 Mbit/s, diloco:8", "100mbit", 8)]
    return [
        Case("100 Mbit/s, diloco:96", "100mbit", 96),
        Case("100 Mbit/s, diloco:240", "100mbit", 240),
        Case("10 Mbit/s, diloco:240", "10mbit", 240),
    ]


def run(case: Case, options: Options) -> dict[str, Any]:
    """Measure one case in a lab of its own."""
    words = ["quick" if options.quick else "full", options.precision, str(case.interval)]
    command = ["paceline", "run", "-n", str(_HOSTS), "-m", "benchmarks.diloco_job", *words]
    with Lab(hosts=_HOSTS, links=Links(rate=case.rate)) as lab:
        outcome = lab.run(command, directory=_ROOT, deadline_seconds=900.0)
    return found_in(outcome, MARK)


def table_of(case: Case, found: dict[str, Any]) -> Table:
    """Both sides: a step, what a host sends, how much of the time ranks compute."""
    rows, sent, computing = [], [], 0.0
    for side in found["sides"]:
        first, seconds = side[0], sum(one["seconds"] for one in side)
        sent.append(sum(one["sent"] for one in side) / len(side) / first["steps"])
        computing = 100 * (1 - sum(one["waited"] for one in side) / seconds)
        rows.append(
            (
                first["name"],
                f"{first['steps']}",
                f"{seconds / len(side) / first['steps'] * 1e3:.0f}",
                f"{sent[-1] / 1e6:.4f}",
                f"{sent[0] / sent[-1]:.0f}",
                f"{computing:.1f} %",
                f"{first['loss']:.3f}",
            )
        )
    fewer = sent[0] / sent[1]
    remark = (
        f"{fewer:.0f} times fewer bytes ({'met' if fewer >= _FEWER else 'missed'}: {_FEWER:.0f});"
        f" computing {computing:.1f} % ({'met' if computing >= _COMPUTING else 'missed'}: {_COMPUTING:.0f},"
        " which is asked at 100 Mbit/s)"
    )
    columns = ("side", "steps", "ms a step", "MB a host and step", "times fewer", "computing", "loss")
    title = f"{case.title}, int4 ({found['parameters'] / 1e6:.2f} M parameters)"
    return Table(title, columns, rows, (remark,))


def measure(options: Options) -> Report:
    """All cases."""
    tables, data = [], {}
    for case in cases(options):
        found = run(case, options)
        tables.append(table_of(case, found))
        data[case.title] = found
    question = f"{_HOSTS} hosts of the lab on slow links: Streaming DiLoCo beside every-step."
    return Report(question, tables, {"cases": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
