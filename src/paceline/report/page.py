"""One run or several as one page, whole in itself: no file beside it, nothing from a network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.report.costs import evenness, times, traffic
from paceline.report.facts import Facts, facts, spell, spell_seconds
from paceline.report.folder import CHECKPOINTS, RECIPE, REPORT
from paceline.report.html import Html, join, table, tag
from paceline.report.parts import COLORS, charts, pill, tiles, words
from paceline.report.read import Run, number, read_run
from paceline.report.shares import rank_times

_MOST_EVENTS = 60
_ROUTINE = ("run", "step", "ranks", "communication", "cache", "end")


def write_report(folder: Path) -> Path:
    """Write the page of a run into its folder; who reads it meanwhile sees the old one or the new one.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    path = folder / REPORT
    hidden = path.with_name(f".{REPORT}.{os.getpid()}")
    try:
        hidden.write_text(render([read_run(folder)]), encoding="utf-8")
        hidden.replace(path)
    except OSError:
        hidden.unlink(missing_ok=True)
        raise
    return path


def render(runs: Sequence[Run], at: Path | None = None) -> str:
    """The page.

    Args:
        runs: one to show, or several to compare; at least one.
        at: the folder in which it will lie, for its links; None: the run's.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    return document(title, _one(runs[0], at) if len(runs) == 1 else _several(runs), wide=len(runs) > 1)


def document(title: str, body: Sequence[Html], *, wide: bool = False) -> str:
    """A whole page around its parts, with its style and its script inside."""
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<link rel="icon" href="data:,">'),
        tag("title", f"{title} · Paceline"),
        Html(f"<style>{_asset('page.css')}</style>"),
    )
    script = Html(f"<script>{_asset('page.js')}</script>")
    shown = tag("body", tag("main", body, class_="wide" if wide else None), script)
    return f"<!DOCTYPE html>\n{tag('html', head, shown, lang='en')}\n"


def _asset(name: str) -> str:
    return resources.files("paceline.report").joinpath(name).read_text(encoding="utf-8")


def _one(run: Run, at: Path | None) -> list[Html]:
    found = facts(run)
    title = tag(
        "header", tag("h1", run.name), pill(found.status), tag("div", _under(run, found), class_="sub")
    )
    shown = [title, tiles(found, rank_times(run)), words([run]), tag("h2", "Curves"), charts([run])]
    more = [times([run]), evenness(run), traffic([run]), _checkpoints(run, at or run.folder), _events(run)]
    more += [_certificate(run), _recipe(run)]
    return [*shown, *more, tag("footer", _origin(run))]


def _under(run: Run, found: Facts) -> str:
    parts = [str(run.recipe.get("task", "")), found.strategy]
    if run.start:
        parts.append(f"{run.ranks} process{'es' if run.ranks != 1 else ''} on {run.start['devices']}")
        parts.append(f"{run.start['parameters']:,} parameters")
    if found.started is not None:
        parts.append(f"{datetime.fromtimestamp(found.started, UTC):%Y-%m-%d %H:%M} UTC")
    return " · ".join(part for part in parts if part)


def _origin(run: Run) -> str:
    versions = " · ".join(f"{name} {version}" for name, version in run.start.get("versions", {}).items())
    return (
        f"{run.folder} · {versions} · host {run.start.get('host', 'unknown')}"
        if run.start
        else str(run.folder)
    )


def _events(run: Run) -> Html:
    """What happened beside the steps, in order; the middle of a long list is left out, and that is said."""
    told = [r for r in run.records if r.get("event") not in _ROUTINE or r.get("event") in ("run", "end")]
    if not told:
        return Html("")
    half = _MOST_EVENTS // 2
    shown = told if len(told) <= _MOST_EVENTS else [*told[:half], *told[-half:]]
    rows = [[_clock(r), str(r["event"]), _say(r)] for r in shown]
    if len(told) > len(shown):
        rows.insert(half, ["…", "", f"… {len(told) - len(shown)} more in metrics.jsonl"])
    listed = table(["time (UTC)", "event", ""], rows, kind="scroll left")
    return tag("details", tag("summary", f"{len(told)} events"), listed)


def _checkpoints(run: Run, at: Path) -> Html:
    """Those that are still there, the newest first, with the held-out loss of their step and a link."""
    saved = {str(r["path"]).rstrip("/").rpartition("/")[2]: int(r["step"]) for r in run.of("checkpoint")}
    folder = run.folder / CHECKPOINTS
    kept = {name: step for name, step in saved.items() if (folder / name).is_dir()}
    if not kept:
        return Html("")
    losses = {int(e["step"]): spell(number(e["loss"])) for e in run.evaluations}
    place = os.path.relpath(folder, at)
    rows = [
        [tag("a", name, href=f"{quote(place)}/{quote(name)}/"), f"{step:,}", losses.get(step, "–")]
        for name, step in sorted(kept.items(), key=lambda item: -item[1])
    ]
    listed = table(["checkpoint", "steps", "held-out loss"], rows)
    return tag("details", tag("summary", f"{len(rows)} checkpoint{'s' if len(rows) > 1 else ''}"), listed)


def _clock(record: Mapping[str, Any]) -> str:
    when = record.get("time")
    return f"{datetime.fromtimestamp(when, UTC):%H:%M:%S}" if when else ""


def _say(record: Mapping[str, Any]) -> str:
    flat = {**record, **record.get("metrics", {})}
    hidden = ("event", "level", "rank", "time", "process_start", "schema")
    return "  ".join(
        f"{name} {spell(value, 5) if isinstance(value, float) else value}"
        for name, value in flat.items()
        if name not in hidden and not isinstance(value, dict)
    )


def _certificate(run: Run) -> Html:
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


def _recipe(run: Run) -> Html:
    path = run.folder / RECIPE
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return tag("details", tag("summary", "Recipe"), tag("pre", text))


# -- several runs ------------------------------------------------------------------------------------------


def _several(runs: Sequence[Run]) -> list[Html]:
    title = tag("header", tag("h1", f"{len(runs)} runs compared"))
    table_of_facts = _compared(runs)
    shown = [title, table_of_facts, _differences(runs), tag("h2", "Curves"), charts(runs), times(runs)]
    return [*shown, traffic(runs), tag("h2", "In words"), words(runs)]


def _compared(runs: Sequence[Run]) -> Html:
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
    return table(head, [_row(i, run, facts(run)) for i, run in enumerate(runs)], kind="scroll facts")


def _row(i: int, run: Run, found: Facts) -> list[str]:
    name = tag(
        "span", tag("i", class_="key", style=f"background: var(--{COLORS[i % len(COLORS)]})"), run.name
    )
    rate = "–" if found.rate is None else f"{spell(found.rate, 3)} {found.rate_unit}"
    metrics = "".join(f" · {key} {spell(value, 3)}" for key, value in list(found.metrics.items())[:1])
    return [
        name,
        pill(found.status),
        found.strategy,
        str(found.ranks or "–"),
        f"{found.steps:,}",
        spell(found.loss),
        spell(found.held_out) + metrics,
        rate,
        spell_seconds(found.step_seconds),
        spell_seconds(found.seconds),
    ]


def _differences(runs: Sequence[Run]) -> Html:
    """The keys of the recipes that are not the same in all."""
    flat = [dict(_keys(run.recipe)) for run in runs]
    names = sorted({name for keys in flat for name in keys})
    rows = [
        [name, *(keys.get(name, "–") for keys in flat)]
        for name in names
        if len({k.get(name) for k in flat}) > 1
    ]
    if not rows:
        return tag("p", "Their recipes are the same.", class_="note")
    return join([tag("h2", "What differs in the recipes"), table(["key", *(run.name for run in runs)], rows)])


def _keys(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        found += (
            _keys(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, str(value))]
        )
    return found
