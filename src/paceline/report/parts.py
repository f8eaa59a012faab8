"""The parts of the page about what a run learned: tiles, words and curves, of one run or several. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.report.chart import chart
from paceline.report.curves import Curve
from paceline.report.facts import Facts, facts, spell, spell_seconds, spell_share
from paceline.report.html import Html, tag
from paceline.report.read import Record, Run, number
from paceline.report.sent import sent_bytes
from paceline.report.shares import RankTime
from paceline.report.summary import summary

COLORS = tuple(f"c{number}" for number in range(1, 13))
_TONES = {
    "finished": "good",
    "stopped": "warn",
    "running": "busy",
    "failed": "bad",
    "lost": "bad",
    "new": "soft",
}
_MOST_METRICS = 4
_MOST_PLACES = 200


def pill(status: str) -> Html:
    """The status as a coloured word."""
    return tag("span", status, class_="pill", style=f"--tone: var(--{_TONES[status]})")


def tiles(found: Facts, ranks: Sequence[RankTime]) -> Html:
    """The numbers that one looks for first."""
    of = f" / {found.num_steps:,}" if found.num_steps else ""
    shown = [(f"{found.steps:,}", of, "steps")]
    if found.loss is not None:
        shown.append((spell(found.loss), "", "training loss"))
    if found.held_out is not None:
        shown.append((spell(found.held_out), "", "held-out loss"))
    shown += [(spell(value), "", f"held-out {name}") for name, value in list(found.metrics.items())[:2]]
    if found.rate is not None:
        shown.append((spell(found.rate, 3), f" {found.rate_unit}", "throughput"))
        shown.append((spell_seconds(found.step_seconds), "", "median step"))
    if len(ranks) > 1:
        whole = sum(rank.seconds for rank in ranks) or 1.0
        share = sum(rank.communication * rank.seconds for rank in ranks) / whole
        shown.append((spell_share(share), "", "of the time in communication"))
    return tag("div", [_tile(*one) for one in shown], class_="tiles")


def _tile(value: str, small: str, name: str) -> Html:
    return tag("div", tag("b", value, tag("small", small)), tag("span", name), class_="card tile")


def words(runs: Sequence[Run]) -> Html:
    """The summary; with several runs each under its name."""
    found: list[Html] = []
    for i, run in enumerate(runs):
        if len(runs) > 1:
            found.append(tag("h3", run.name, style=f"--tone: var(--{COLORS[i % len(COLORS)]})"))
        found += [tag("p", line) for line in summary(run)]
    return tag("section", found, class_="card words")


# -- curves ------------------------------------------------------------------------------------------------


def charts(runs: Sequence[Run]) -> Html:
    """Loss, metrics, throughput, gradient norm, learning rate and step time."""
    marks = _resumes(runs[0]) if len(runs) == 1 else []
    dots = "dots: held-out" if len(runs) > 1 and any(run.evaluations for run in runs) else ""
    losses = _both(runs, lambda record: record["loss"])
    shown = [chart("Loss", losses, unit=dots, may_be_logarithmic=True, marks=marks)]
    for name in _metrics(runs)[:_MOST_METRICS]:
        title = name.replace("_", " ").capitalize()
        shown.append(chart(title, _both(runs, partial(_metric, name)), marks=marks))
    across = json.dumps([progress(run) for run in runs], separators=(",", ":"))
    return tag("div", shown, _of_each_step(runs, marks), class_="charts", data_runs=across)


def progress(run: Run) -> dict[str, list[float]]:
    """Seconds, samples, and bytes of all ranks after some numbers of steps; lines may join them."""
    seconds = samples = 0.0
    found = [(0.0, 0.0, 0.0)]
    for step in run.steps:
        seconds += number(step["seconds"])
        samples += number(step["num_samples"])
        found.append((_taken(step), seconds, samples))
    every = max(1, len(found) // _MOST_PLACES)
    shown = [*found[:-1:every], found[-1]]
    rows = {name: [row[i] for row in shown] for i, name in enumerate(("step", "seconds", "samples"))}
    sent = sent_bytes(run)
    return rows | {"bytes": [sent(step) for step in rows["step"]]}


def _of_each_step(runs: Sequence[Run], marks: Sequence[tuple[float, str]]) -> list[Html]:
    """What steps have and evaluations have not."""
    norms = _each(runs, lambda run, s: number(s["grad_norm"]))
    rates = _each(runs, lambda run, s: number(s["lr"]), "line")
    times = _each(runs, lambda run, s: 1000 * number(s["seconds"]))
    speed = facts(runs[0]).rate_unit
    return [
        chart("Throughput", _each(runs, _rate), unit=speed, from_zero=True, marks=marks),
        chart("Gradient norm", norms, may_be_logarithmic=True, marks=marks),
        chart("Learning rate", rates, from_zero=True, marks=marks),
        chart("Step time", times, unit="ms", from_zero=True, marks=marks),
    ]


def _resumes(run: Run) -> list[tuple[float, str]]:
    return [(float(s["step"]), f"resumed at step {s['step']}") for s in run.starts[1:]]


def _named(runs: Sequence[Run], i: int, name: str) -> str:
    return name if len(runs) == 1 else (f"{runs[i].name}, {name}" if name == "held-out" else runs[i].name)


def _taken(record: Record) -> float:
    """Steps taken after a step."""
    return float(record["step"]) + 1


def _each(runs: Sequence[Run], value: Callable[[Run, Record], float], style: str = "noisy") -> list[Curve]:
    return [
        Curve(
            _named(runs, i, "each step"),
            COLORS[i % len(COLORS)],
            [(_taken(s), value(run, s)) for s in run.steps],
            style,
            i,
        )
        for i, run in enumerate(runs)
    ]


def _metrics(runs: Sequence[Run]) -> list[str]:
    return sorted(
        {name for run in runs for r in (*run.steps[:1], *run.evaluations[:1]) for name in r["metrics"]}
    )


def _both(runs: Sequence[Run], value: Callable[[Record], Any]) -> list[Curve]:
    """What `value` finds in the steps and in the evaluations."""
    found = []
    for i, run in enumerate(runs):
        color = COLORS[i % len(COLORS)]
        steps = [(_taken(s), number(v)) for s in run.steps if (v := value(s)) is not None]
        held_out = [(float(e["step"]), number(v)) for e in run.evaluations if (v := value(e)) is not None]
        found.append(Curve(_named(runs, i, "training"), color, steps, "noisy", i))
        other = color if len(runs) > 1 else "c2"
        found.append(Curve(_named(runs, i, "held-out"), other, held_out, "dots", i))
    return found


def _metric(name: str, record: Record) -> Any:
    return record["metrics"].get(name)


def _rate(run: Run, step: Record) -> float:
    return number(step["samples_per_second"]) * (run.tokens_per_sample or 1)
