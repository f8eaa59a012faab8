"""From numbers to what is printed: a head, tables, and remarks; or the same as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.machine import describe_machine, number_format
from benchmarks.measure import Series, compare

_WIDTH = 140


@dataclass(frozen=True)
class Options:
    """How a benchmark runs.

    Args:
        quick: tiny models, few repeats: does it run at all.
        precision: number format of the GPT, "bf16" or "fp32".
        device: where the models compute, "cpu" or "cuda"; benchmarks that do not read it use the CPU.
    """

    quick: bool = False
    precision: str = "bf16"
    device: str = "cpu"


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """What one benchmark found.

    Args:
        question: what was measured, in one or two sentences.
        tables: for people.
        data: for programs; the raw blocks are in here.
    """

    question: str
    tables: Sequence[Table]
    data: dict[str, Any]


def comparison_table(title: str, found: Sequence[Series], reference: str, unit: str = "ms") -> Table:
    """Every side against one of them: times, ratios, losses."""
    scale = {"ms": 1e3, "us": 1e6}[unit]
    base = next(s for s in found if s.name == reference)
    rows = []
    for series in found:
        c = compare(series, base)
        ordered = sorted(series.seconds)
        rows.append(
            (
                series.name,
                f"{series.median_seconds * scale:.2f}",
                f"{ordered[0] * scale:.2f} .. {ordered[-1] * scale:.2f}",
                f"{c.ratio:.3f}",
                f"{c.paired.median:.3f} ({c.paired.low:.3f} .. {c.paired.high:.3f})",
                f"{c.cpu_ratio:.3f}",
                c.verdict if series is not base else "reference",
                f"{series.losses[0]:.4f} > {series.losses[-1]:.4f}",
                f"{c.loss_error:.0e}",
            )
        )
    columns = (
        "side", f"median {unit}", "min .. max", "ratio", "paired ratio", "cpu ratio", "verdict",
        "first > last loss", "diff",
    )  # fmt: skip
    return Table(title, columns, rows)


def rate_table(title: str, found: Sequence[Series], items_per_step: int, items: str) -> Table:
    """How much every side gets through, against the first one."""
    rows = []
    for series in found:
        speed_up = found[0].median_seconds / series.median_seconds
        ordered = sorted(series.seconds)
        rows.append(
            (
                series.name,
                f"{items_per_step / series.median_seconds:,.0f}",
                f"{speed_up:.2f}",
                f"{series.median_seconds * 1e3:.1f}",
                f"{ordered[0] * 1e3:.1f} .. {ordered[-1] * 1e3:.1f}",
                f"{series.losses[0]:.4f} > {series.losses[-1]:.4f}",
            )
        )
    return Table(
        title, ("side", f"{items}/s", "speed-up", "median ms", "min .. max", "first > last loss"), rows
    )


def series_data(found: Sequence[Series]) -> list[dict[str, Any]]:
    """The raw blocks."""
    return [asdict(series) for series in found]


def blocks(found: Sequence[Series]) -> str:
    """How many blocks were measured, and of how many steps."""
    return f"{len(found[0].seconds)} blocks of {found[0].steps} steps"


def present(
    measure: Callable[[Options], Report], description: str, arguments: Sequence[str] | None = None
) -> None:
    """The main of a benchmark: measure, then print text or JSON."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="tiny models, few repeats: does it run at all")
    parser.add_argument("--json", action="store_true", help="print numbers, with every block")
    parser.add_argument(
        "--precision",
        choices=["auto", "bf16", "fp32"],
        default="auto",
        help="of the GPT; auto: what is fast here",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of step_overhead")
    chosen = parser.parse_args(arguments)
    machine = describe_machine()
    precision, machine["number format"] = number_format(chosen.precision)
    report = measure(Options(chosen.quick, precision, chosen.device))
    if chosen.json:
        print(json.dumps({"question": report.question, "machine": machine, **report.data}, indent=1))
    else:
        print_report(report, machine, Console(width=_WIDTH, highlight=False))


def print_report(report: Report, machine: Mapping[str, str], console: Console) -> None:
    """Print head and tables."""
    console.print(report.question, markup=False)
    for name, value in machine.items():
        console.print(f"{name}: {value}", markup=False)
    for table in report.tables:
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for i, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
        for row in table.rows:
            drawn.add_row(*row)
        console.print(f"\n{table.title}", markup=False)
        console.print(drawn)
        for remark in table.remarks:
            console.print(remark, markup=False)
