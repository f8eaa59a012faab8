"""One run or several as one page, whole in itself: no file beside it, nothing from a network.

Several strategies on one page: tables that were made elsewhere, and the curves of all their runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.report.html import Html, join, table, tag
from paceline.report.page_sections import (
    CURVE_COLORS,
    progress_table,
    render_balance,
    render_charts,
    render_rank_times,
    render_status,
    render_summaries,
    render_tiles,
    render_traffic,
)
from paceline.report.rank_balance import rank_times
from paceline.report.run_facts import RunFacts, collect_facts, format_duration, format_number
from paceline.report.run_files import CHECKPOINTS, RECIPE, REPORT
from paceline.report.run_reader import MetricsRecord, RecordedRun, read_run, to_float
from paceline.report.svg_chart import ChartCurve, ChartPoint, render_chart

_MAX_EVENTS = 60
_ROUTINE_EVENTS = ("run", "step", "ranks", "communication", "cache", "end")


def write_report(folder: Path) -> Path:
    """Write the page of a run into its folder; who reads it meanwhile sees the old one or the new one.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    path = folder / REPORT
    hidden = path.with_name(f".{REPORT}.{os.getpid()}")
    try:
        hidden.write_text(render_page([read_run(folder)]), encoding="utf-8")
        hidden.replace(path)
    except OSError:
        hidden.unlink(missing_ok=True)
        raise
    return path


def render_page(runs: Sequence[RecordedRun], at: Path | None = None) -> str:
    """The page.

    Args:
        runs: one to show, or several to compare; at least one.
        at: the folder in which it will lie, for its links; None: the run's.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    return render_document(
        title, _render_one(runs[0], at) if len(runs) == 1 else _render_several(runs), wide=len(runs) > 1
    )


def render_document(title: str, body: Sequence[Html], *, wide: bool = False) -> str:
    """A whole page around its parts, with its style and its script inside."""
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<link rel="icon" href="data:,">'),
        tag("title", f"{title} · Paceline"),
        Html(f"<style>{_read_asset('page.css')}</style>"),
    )
    script = Html(f"<script>{_read_asset('page.js')}</script>")
    shown = tag("body", tag("main", body, class_="wide" if wide else None), script)
    return f"<!DOCTYPE html>\n{tag('html', head, shown, lang='en')}\n"


def _read_asset(name: str) -> str:
    return resources.files("paceline.report").joinpath(name).read_text(encoding="utf-8")


def _render_one(run: RecordedRun, at: Path | None) -> list[Html]:
    found = collect_facts(run)
    title = tag(
        "header",
        tag("h1", run.name),
        render_status(found.status),
        tag("div", _subtitle(run, found), class_="sub"),
    )
    shown = [
        title,
        render_tiles(found, rank_times(run)),
        render_summaries([run]),
        tag("h2", "Curves"),
        render_charts([run]),
    ]
    more = [
        render_rank_times([run]),
        render_balance(run),
        render_traffic([run]),
        _render_checkpoints(run, at or run.folder),
        _render_events(run),
    ]
    more += [_render_certificate(run), _render_recipe(run)]
    return [*shown, *more, tag("footer", _footer_text(run))]


def _subtitle(run: RecordedRun, found: RunFacts) -> str:
    parts = [str(run.recipe.get("task", "")), found.strategy]
    if run.start:
        parts.append(f"{run.ranks} process{'es' if run.ranks != 1 else ''} on {run.start['devices']}")
        parts.append(f"{run.start['parameters']:,} parameters")
    if found.started is not None:
        parts.append(f"{datetime.fromtimestamp(found.started, UTC):%Y-%m-%d %H:%M} UTC")
    return " · ".join(part for part in parts if part)


def _footer_text(run: RecordedRun) -> str:
    versions = " · ".join(f"{name} {version}" for name, version in run.start.get("versions", {}).items())
    return (
        f"{run.folder} · {versions} · host {run.start.get('host', 'unknown')}"
        if run.start
        else str(run.folder)
    )


def _render_events(run: RecordedRun) -> Html:
    """What happened beside the steps, in order; the middle of a long list is left out, and that is said."""
    told = [
        r for r in run.records if r.get("event") not in _ROUTINE_EVENTS or r.get("event") in ("run", "end")
    ]
    if not told:
        return Html("")
    half = _MAX_EVENTS // 2
    shown = told if len(told) <= _MAX_EVENTS else [*told[:half], *told[-half:]]
    rows = [[_format_clock(r), str(r["event"]), _event_text(r)] for r in shown]
    if len(told) > len(shown):
        rows.insert(half, ["…", "", f"… {len(told) - len(shown)} more in metrics.jsonl"])
    listed = table(["time (UTC)", "event", ""], rows, kind="scroll left")
    return tag("details", tag("summary", f"{len(told)} events"), listed)


def _render_checkpoints(run: RecordedRun, at: Path) -> Html:
    """Those that are still there, the newest first, with the held-out loss of their step and a link."""
    saved = {str(r["path"]).rstrip("/").rpartition("/")[2]: int(r["step"]) for r in run.of("checkpoint")}
    folder = run.folder / CHECKPOINTS
    kept = {name: step for name, step in saved.items() if (folder / name).is_dir()}
    if not kept:
        return Html("")
    losses = {int(e["step"]): format_number(to_float(e["loss"])) for e in run.evaluations}
    place = os.path.relpath(folder, at)
    rows = [
        [tag("a", name, href=f"{quote(place)}/{quote(name)}/"), f"{step:,}", losses.get(step, "–")]
        for name, step in sorted(kept.items(), key=lambda item: -item[1])
    ]
    listed = table(["checkpoint", "steps", "held-out loss"], rows)
    return tag("details", tag("summary", f"{len(rows)} checkpoint{'s' if len(rows) > 1 else ''}"), listed)


def _format_clock(record: Mapping[str, Any]) -> str:
    when = record.get("time")
    return f"{datetime.fromtimestamp(when, UTC):%H:%M:%S}" if when else ""


def _event_text(record: Mapping[str, Any]) -> str:
    flat = {**record, **record.get("metrics", {})}
    hidden = ("event", "level", "rank", "time", "process_start", "schema")
    return "  ".join(
        f"{name} {format_number(value, 5) if isinstance(value, float) else value}"
        for name, value in flat.items()
        if name not in hidden and not isinstance(value, dict)
    )


def _render_certificate(run: RecordedRun) -> Html:
    if run.certificate is None:
        return Html("")
    found = run.certificate
    lines = [tag("p", line) for line in str(found.get("conclusion", "")).splitlines()]
    word = tag(
        "span", "verified" if found.get("ok") else "diverges", class_="ok" if found.get("ok") else "no"
    )
    size = f"{found.get('processes', '?')} processes, {found.get('steps', '?')} steps"
    place = f"{found.get('strategy', '')}, {size}"
    return join([tag("h2", "Is it right? ", word), tag("div", tag("p", place), lines, class_="card words")])


def _render_recipe(run: RecordedRun) -> Html:
    path = run.folder / RECIPE
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return tag("details", tag("summary", "Recipe"), tag("pre", text))


# -- several runs ------------------------------------------------------------------------------------------


def _render_several(runs: Sequence[RecordedRun]) -> list[Html]:
    title = tag("header", tag("h1", f"{len(runs)} runs compared"))
    table_of_facts = _render_facts_table(runs)
    shown = [
        title,
        table_of_facts,
        _render_recipe_differences(runs),
        tag("h2", "Curves"),
        render_charts(runs),
        render_rank_times(runs),
    ]
    return [*shown, render_traffic(runs), tag("h2", "In words"), render_summaries(runs)]


def _render_facts_table(runs: Sequence[RecordedRun]) -> Html:
    head = [
        "run",
        "status",
        "strategy",
        "ranks",
        "steps",
        "training loss",
        "held-out",
        "throughput",
        "median step",
        "time",
    ]
    return table(
        head, [_facts_row(i, run, collect_facts(run)) for i, run in enumerate(runs)], kind="scroll facts"
    )


def _facts_row(i: int, run: RecordedRun, found: RunFacts) -> list[str]:
    name = tag(
        "span",
        tag("i", class_="key", style=f"background: var(--{CURVE_COLORS[i % len(CURVE_COLORS)]})"),
        run.name,
    )
    rate = "–" if found.rate is None else f"{format_number(found.rate, 3)} {found.rate_unit}"
    metrics = "".join(f" · {key} {format_number(value, 3)}" for key, value in list(found.metrics.items())[:1])
    return [
        name,
        render_status(found.status),
        found.strategy,
        str(found.ranks or "–"),
        f"{found.steps:,}",
        format_number(found.loss),
        format_number(found.held_out) + metrics,
        rate,
        format_duration(found.step_seconds),
        format_duration(found.seconds),
    ]


def _render_recipe_differences(runs: Sequence[RecordedRun]) -> Html:
    """The keys of the recipes that are not the same in all."""
    flat = [dict(_flatten_keys(run.recipe)) for run in runs]
    names = sorted({name for keys in flat for name in keys})
    rows = [
        [name, *(keys.get(name, "–") for keys in flat)]
        for name in names
        if len({k.get(name) for k in flat}) > 1
    ]
    if not rows:
        return tag("p", "Their recipes are the same.", class_="note")
    return join([tag("h2", "What differs in the recipes"), table(["key", *(run.name for run in runs)], rows)])


def _flatten_keys(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        found += (
            _flatten_keys(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else [(prefix + name, str(value))]
        )
    return found


_MAX_METRICS = 4


@dataclass(frozen=True)
class ComparisonTable:
    """A table of the page; the first column names strategies.

    Args:
        about: what it shows, under its title.
    """

    title: str
    about: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def render_comparison_page(
    title: str, about: str, tables: Sequence[ComparisonTable], groups: Mapping[str, Sequence[RecordedRun]]
) -> str:
    """The page.

    Args:
        about: what was compared, in a line.
        groups: the runs of every strategy, by its name; all in the colour of the strategy.
    """
    colors = {name: CURVE_COLORS[i % len(CURVE_COLORS)] for i, name in enumerate(groups)}
    header = tag("header", tag("h1", title), tag("div", about, class_="sub"))
    shown = [part for listed in tables for part in _render_table(listed, colors)]
    curves = tag("h2", "Held-out curves, one for every run: over steps, time, samples or bytes")
    return render_document(title, [header, *shown, curves, _render_eval_charts(groups, colors)], wide=True)


def _render_table(listed: ComparisonTable, colors: dict[str, str]) -> list[Html]:
    rows = [[_color_key(name, colors), *cells] for name, *cells in listed.rows]
    return [
        tag("h2", listed.title),
        table(listed.head, rows, kind="scroll facts"),
        tag("p", listed.about, class_="note"),
    ]


def _color_key(name: str, colors: dict[str, str]) -> Html:
    color = f"background: var(--{colors[name]})" if name in colors else None
    return tag("span", tag("i", class_="key", style=color), name)


def _render_eval_charts(groups: Mapping[str, Sequence[RecordedRun]], colors: dict[str, str]) -> Html:
    runs = [(name, run) for name, members in groups.items() for run in members]
    found = [render_chart("Loss", _eval_curves(runs, colors, None), may_be_logarithmic=True)]
    metrics = sorted({key for _, run in runs for record in run.evaluations[:1] for key in record["metrics"]})
    for metric in metrics[:_MAX_METRICS]:
        found.append(render_chart(metric.replace("_", " ").capitalize(), _eval_curves(runs, colors, metric)))
    speeds = [
        ChartCurve(name, colors[name], _speed_points(run), "noisy", i) for i, (name, run) in enumerate(runs)
    ]
    found.append(render_chart("Throughput", speeds, unit="samples/s", from_zero=True))
    across = json.dumps([progress_table(run) for _, run in runs], separators=(",", ":"))
    return tag("div", found, class_="charts", data_runs=across)


def _eval_curves(
    runs: Sequence[tuple[str, RecordedRun]], colors: dict[str, str], metric: str | None
) -> list[ChartCurve]:
    return [
        ChartCurve(
            name,
            colors[name],
            [(float(e["step"]), _evaluation_value(e, metric)) for e in run.evaluations],
            "dots",
            i,
        )
        for i, (name, run) in enumerate(runs)
    ]


def _evaluation_value(record: MetricsRecord, metric: str | None) -> float:
    found = record["loss"] if metric is None else record["metrics"].get(metric, "nan")
    return to_float(found)


def _speed_points(run: RecordedRun) -> list[ChartPoint]:
    return [(float(step["step"]) + 1, to_float(step["samples_per_second"])) for step in run.steps]
