"""The report as one self-contained HTML page: of one run, of several runs, or of a comparison of strategies.

Invariant: a page needs no other file and no network; style and script are inside it.
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

from paceline.errors import format_count
from paceline.observe.file_writing import create_draft
from paceline.report.html import Html, join, table, tag
from paceline.report.number_format import format_duration, format_number
from paceline.report.page_sections import (
    CURVE_COLORS,
    progress_table,
    render_charts,
    render_federated,
    render_hyperparameters,
    render_rank_times,
    render_returns,
    render_status,
    render_summaries,
    render_tiles,
    render_traffic,
)
from paceline.report.pipeline_pictures import render_pipeline
from paceline.report.rank_balance import rank_times
from paceline.report.run_facts import RunFacts, collect_facts
from paceline.report.run_files import CHECKPOINTS, RECIPE, REPORT
from paceline.report.run_reader import MetricsRecord, RecordedRun, read_run, to_float
from paceline.report.svg_chart import ChartCurve, ChartPoint, render_chart

_MAX_EVENTS = 60
_ROUTINE_EVENTS = (
    "step",
    "ranks",
    "communication",
    "cache",
    "timeline",
    "partition",
    "cohort",
    "privacy",
    "rollout",
)


def write_report(folder: Path) -> Path:
    """Write the page of a run into its folder, atomically.

    Raises:
        OSError: the page cannot be written; no part of it is left behind.
    """
    path = folder / REPORT
    # A browser may read the page at any time: it sees the old one or the new one.
    temporary = path.with_name(f".{REPORT}.{os.getpid()}")
    try:
        page = render_page([read_run(folder)])
        with create_draft(temporary) as stream:
            stream.write(page.encode())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path


def render_page(runs: Sequence[RecordedRun], at: Path | None = None) -> str:
    """Return the page of one run, or of several runs side by side.

    Args:
        runs: at least one.
        at: the folder of the page, for its links; None for the folder of the run.
    """
    if len(runs) == 1:
        return render_document(runs[0].name, _render_one(runs[0], at))
    return render_document(f"{len(runs)} runs compared", _render_several(runs), wide=True)


def render_document(title: str, body: Sequence[Html], *, wide: bool = False) -> str:
    """Return a complete page around `body`, with its style and its script."""
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<link rel="icon" href="data:,">'),
        tag("title", f"{title} · Paceline"),
        Html(f"<style>{_read_asset('page.css')}</style>"),
    )
    script = Html(f"<script>{_read_asset('page.js')}</script>")
    content = tag("body", tag("main", body, class_="wide" if wide else None), script)
    return f"<!DOCTYPE html>\n{tag('html', head, content, lang='en')}\n"


def _read_asset(name: str) -> str:
    return resources.files("paceline.report").joinpath(name).read_text(encoding="utf-8")


def _render_one(run: RecordedRun, at: Path | None) -> list[Html]:
    facts = collect_facts(run)
    header = tag(
        "header",
        tag("h1", run.name),
        render_status(facts.status),
        tag("div", _subtitle(run, facts), class_="sub"),
    )
    return [
        header,
        render_tiles(facts, rank_times(run)),
        render_summaries([run]),
        render_hyperparameters(run),
        tag("h2", "Curves"),
        render_charts([run]),
        render_federated(run),
        render_returns(run),
        render_rank_times([run]),
        render_pipeline(run),
        render_traffic([run]),
        _render_checkpoints(run, at or run.folder),
        _render_events(run),
        _render_certificate(run),
        _render_recipe(run),
        tag("footer", _footer_text(run)),
    ]


def _subtitle(run: RecordedRun, facts: RunFacts) -> str:
    facts_shown = [str(run.recipe.get("task", "")), facts.strategy]
    if run.start:
        facts_shown.append(f"{format_count(run.ranks, 'process')} on {run.start['devices']}")
        facts_shown.append(f"{run.start['parameters']:,} parameters")
    if facts.started is not None:
        facts_shown.append(f"{datetime.fromtimestamp(facts.started, UTC):%Y-%m-%d %H:%M} UTC")
    return " · ".join(fact for fact in facts_shown if fact)


def _footer_text(run: RecordedRun) -> str:
    if not run.start:
        return str(run.folder)
    versions = " · ".join(f"{name} {version}" for name, version in run.start.get("versions", {}).items())
    return f"{run.folder} · {versions} · host {run.start.get('host', 'unknown')}"


def _render_events(run: RecordedRun) -> Html:
    """Return the events other than steps, in order; the middle of a long list is left out."""
    events = [r for r in run.records if r.get("event") not in _ROUTINE_EVENTS]
    if not events:
        return Html("")
    half = _MAX_EVENTS // 2
    shown = events if len(events) <= _MAX_EVENTS else [*events[:half], *events[-half:]]
    rows = [[_format_clock(r), str(r["event"]), _event_text(r)] for r in shown]
    if len(events) > len(shown):
        rows.insert(half, ["…", "", f"… {len(events) - len(shown)} more in metrics.jsonl"])
    listed = table(["time (UTC)", "event", ""], rows, kind="scroll left")
    return tag("details", tag("summary", format_count(len(events), "event")), listed)


def _render_checkpoints(run: RecordedRun, at: Path) -> Html:
    """Return the checkpoints that still exist, newest first, with a link and their held-out loss."""
    saved = {str(r["path"]).rstrip("/").rpartition("/")[2]: int(r["step"]) for r in run.of("checkpoint")}
    folder = run.folder / CHECKPOINTS
    existing = {name: step for name, step in saved.items() if (folder / name).is_dir()}
    if not existing:
        return Html("")
    losses = {int(e["step"]): format_number(to_float(e["loss"])) for e in run.evaluations}
    link = quote(os.path.relpath(folder, at))
    rows = [
        [tag("a", name, href=f"{link}/{quote(name)}/"), f"{step:,}", losses.get(step, "–")]
        for name, step in sorted(existing.items(), key=lambda item: -item[1])
    ]
    listed = table(["checkpoint", "steps", "held-out loss"], rows)
    return tag("details", tag("summary", format_count(len(rows), "checkpoint")), listed)


def _format_clock(record: Mapping[str, Any]) -> str:
    seconds = record.get("time")
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S}" if seconds else ""


def _event_text(record: Mapping[str, Any]) -> str:
    flat = {**record, **record.get("metrics", {})}
    hidden = ("event", "level", "rank", "time", "process_start", "schema")
    return "  ".join(
        f"{name} {format_number(value, 5) if isinstance(value, float) else value}"
        for name, value in flat.items()
        if name not in hidden and not isinstance(value, dict)
    )


def _render_certificate(run: RecordedRun) -> Html:
    certificate = run.certificate
    if certificate is None:
        return Html("")
    is_verified = bool(certificate.get("ok"))
    lines = [tag("p", line) for line in str(certificate.get("conclusion", "")).splitlines()]
    verdict = tag("span", "verified" if is_verified else "diverges", class_="ok" if is_verified else "no")
    counted = (("processes", "process"), ("steps", "step"))
    sizes = [format_count(certificate[name], noun) for name, noun in counted if name in certificate]
    strategy = ", ".join([str(certificate.get("strategy", "")), *sizes])
    card = tag("div", tag("p", strategy), lines, class_="card words")
    return join([tag("h2", "Verification: ", verdict), card])


def _render_recipe(run: RecordedRun) -> Html:
    path = run.folder / RECIPE
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return tag("details", tag("summary", "Recipe"), tag("pre", text))


# -- several runs ------------------------------------------------------------------------------------------


def _render_several(runs: Sequence[RecordedRun]) -> list[Html]:
    return [
        tag("header", tag("h1", f"{len(runs)} runs compared")),
        _render_facts_table(runs),
        _render_recipe_differences(runs),
        tag("h2", "Curves"),
        render_charts(runs),
        render_rank_times(runs),
        render_traffic(runs),
        tag("h2", "Summaries"),
        render_summaries(runs),
    ]


_FACTS_HEADER = (
    *("run", "status", "strategy", "ranks", "steps", "training loss", "held-out", "throughput"),
    *("median step", "time"),
)


def _render_facts_table(runs: Sequence[RecordedRun]) -> Html:
    rows = [_facts_row(i, run, collect_facts(run)) for i, run in enumerate(runs)]
    return table(_FACTS_HEADER, rows, kind="scroll facts")


def _facts_row(i: int, run: RecordedRun, facts: RunFacts) -> list[str]:
    name = tag(
        "span",
        tag("i", class_="key", style=f"background: var(--{CURVE_COLORS[i % len(CURVE_COLORS)]})"),
        run.name,
    )
    rate = "–" if facts.rate is None else f"{format_number(facts.rate, 3)} {facts.rate_unit}"
    metrics = "".join(f" · {key} {format_number(value, 3)}" for key, value in list(facts.metrics.items())[:1])
    return [
        name,
        render_status(facts.status),
        facts.strategy,
        str(facts.ranks or "–"),
        f"{facts.steps:,}",
        format_number(facts.loss),
        format_number(facts.held_out) + metrics,
        rate,
        format_duration(facts.step_seconds),
        format_duration(facts.seconds),
    ]


def _render_recipe_differences(runs: Sequence[RecordedRun]) -> Html:
    """Return a table of the recipe keys whose values differ between runs."""
    flat = [dict(_flatten_keys(run.recipe)) for run in runs]
    names = sorted({name for keys in flat for name in keys})
    rows = [
        [name, *(keys.get(name, "–") for keys in flat)]
        for name in names
        if len({k.get(name) for k in flat}) > 1
    ]
    if not rows:
        return tag("p", "The recipes are identical.", class_="note")
    return join(
        [tag("h2", "Differences between the recipes"), table(["key", *(run.name for run in runs)], rows)]
    )


def _flatten_keys(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    keys: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            keys += _flatten_keys(value, f"{prefix}{name}.")
        else:
            keys.append((prefix + name, str(value)))
    return keys


# -- a comparison of strategies ----------------------------------------------------------------------------

_MAX_METRICS = 4


@dataclass(frozen=True)
class ComparisonTable:
    """A table of a comparison page; its first column names the strategies.

    Args:
        about: an explanation, shown below the table.
    """

    title: str
    about: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def render_comparison_page(
    title: str, about: str, tables: Sequence[ComparisonTable], groups: Mapping[str, Sequence[RecordedRun]]
) -> str:
    """Return the page of a comparison.

    Args:
        about: one line about what was compared.
        groups: the runs of each strategy by its name; they share the colour of the strategy.
    """
    colors = {name: CURVE_COLORS[i % len(CURVE_COLORS)] for i, name in enumerate(groups)}
    header = tag("header", tag("h1", title), tag("div", about, class_="sub"))
    sections = [section for content in tables for section in _render_table(content, colors)]
    curves = tag("h2", "Held-out curves of every run, over steps, time, samples or bytes")
    return render_document(title, [header, *sections, curves, _render_eval_charts(groups, colors)], wide=True)


def _render_table(content: ComparisonTable, colors: dict[str, str]) -> list[Html]:
    rows = [[_color_key(name, colors), *cells] for name, *cells in content.rows]
    return [
        tag("h2", content.title),
        table(content.head, rows, kind="scroll facts wrap"),
        tag("p", content.about, class_="note"),
    ]


def _color_key(name: str, colors: dict[str, str]) -> Html:
    color = f"background: var(--{colors[name]})" if name in colors else None
    return tag("span", tag("i", class_="key", style=color), name)


def _render_eval_charts(groups: Mapping[str, Sequence[RecordedRun]], colors: dict[str, str]) -> Html:
    runs = [(name, run) for name, members in groups.items() for run in members]
    charts = [render_chart("Loss", _eval_curves(runs, colors, None), may_be_logarithmic=True)]
    metrics = sorted({key for _, run in runs for record in run.evaluations[:1] for key in record["metrics"]})
    for metric in metrics[:_MAX_METRICS]:
        charts.append(render_chart(metric.replace("_", " ").capitalize(), _eval_curves(runs, colors, metric)))
    speeds = [
        ChartCurve(name, colors[name], _speed_points(run), "noisy", i) for i, (name, run) in enumerate(runs)
    ]
    charts.append(render_chart("Throughput", speeds, unit="samples/s", from_zero=True))
    progress = json.dumps([progress_table(run) for _, run in runs], separators=(",", ":"))
    return tag("div", charts, class_="charts", data_runs=progress)


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
    return to_float(record["loss"] if metric is None else record["metrics"].get(metric, "nan"))


def _speed_points(run: RecordedRun) -> list[ChartPoint]:
    return [(float(step["step"]) + 1, to_float(step["samples_per_second"])) for step in run.steps]
