"""Several strategies on one page: tables that were made elsewhere, and the curves of all their runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.report.chart import chart
from paceline.report.curves import Curve, Point
from paceline.report.html import Html, table, tag
from paceline.report.page import document
from paceline.report.parts import COLORS, progress
from paceline.report.read import Record, Run, number

_MOST_METRICS = 4


@dataclass(frozen=True)
class Listed:
    """A table of the page; the first column names strategies.

    Args:
        about: what it shows, under its title.
    """

    title: str
    about: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def render_compared(
    title: str, about: str, tables: Sequence[Listed], groups: Mapping[str, Sequence[Run]]
) -> str:
    """The page.

    Args:
        about: what was compared, in a line.
        groups: the runs of every strategy, by its name; all in the colour of the strategy.
    """
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(groups)}
    header = tag("header", tag("h1", title), tag("div", about, class_="sub"))
    shown = [part for listed in tables for part in _listed(listed, colors)]
    curves = tag("h2", "Held-out curves, one for every run: over steps, time, samples or bytes")
    return document(title, [header, *shown, curves, _charts(groups, colors)], wide=True)


def _listed(listed: Listed, colors: dict[str, str]) -> list[Html]:
    rows = [[_key(name, colors), *cells] for name, *cells in listed.rows]
    return [
        tag("h2", listed.title),
        table(listed.head, rows, kind="scroll facts"),
        tag("p", listed.about, class_="note"),
    ]


def _key(name: str, colors: dict[str, str]) -> Html:
    color = f"background: var(--{colors[name]})" if name in colors else None
    return tag("span", tag("i", class_="key", style=color), name)


def _charts(groups: Mapping[str, Sequence[Run]], colors: dict[str, str]) -> Html:
    runs = [(name, run) for name, members in groups.items() for run in members]
    found = [chart("Loss", _curves(runs, colors, None), may_be_logarithmic=True)]
    metrics = sorted({key for _, run in runs for record in run.evaluations[:1] for key in record["metrics"]})
    for metric in metrics[:_MOST_METRICS]:
        found.append(chart(metric.replace("_", " ").capitalize(), _curves(runs, colors, metric)))
    speeds = [Curve(name, colors[name], _speeds(run), "noisy", i) for i, (name, run) in enumerate(runs)]
    found.append(chart("Throughput", speeds, unit="samples/s", from_zero=True))
    across = json.dumps([progress(run) for _, run in runs], separators=(",", ":"))
    return tag("div", found, class_="charts", data_runs=across)


def _curves(runs: Sequence[tuple[str, Run]], colors: dict[str, str], metric: str | None) -> list[Curve]:
    return [
        Curve(name, colors[name], [(float(e["step"]), _value(e, metric)) for e in run.evaluations], "dots", i)
        for i, (name, run) in enumerate(runs)
    ]


def _value(record: Record, metric: str | None) -> float:
    found = record["loss"] if metric is None else record["metrics"].get(metric, "nan")
    return number(found)


def _speeds(run: Run) -> list[Point]:
    return [(float(step["step"]) + 1, number(step["samples_per_second"])) for step in run.steps]
