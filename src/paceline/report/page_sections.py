"""The parts of the page about what a run learned: tiles, words and curves, of one run or several. Pure.

What a run cost, as parts of the page: the time of every rank, and the bytes that it sent. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.report.html import Html, join, table, tag
from paceline.report.rank_balance import (
    BALANCE_HEADER,
    TIME_PARTS,
    RankTimes,
    describe_balance,
    rank_loads,
    rank_times,
    render_balance_rows,
)
from paceline.report.run_facts import (
    RunFacts,
    collect_facts,
    format_bytes,
    format_duration,
    format_number,
    format_percent,
)
from paceline.report.run_reader import MetricsRecord, RecordedRun, to_float
from paceline.report.sent_bytes import compare_sent_bytes, cumulative_sent_bytes
from paceline.report.summary_sentences import summarize_run
from paceline.report.svg_chart import ChartCurve, render_chart

CURVE_COLORS = tuple(f"c{number}" for number in range(1, 13))
_STATUS_COLORS = {
    "finished": "good",
    "stopped": "warn",
    "running": "busy",
    "failed": "bad",
    "lost": "bad",
    "new": "soft",
}
_MAX_METRICS = 4
_MAX_POINTS = 200


def render_status(status: str) -> Html:
    """The status as a coloured word."""
    return tag("span", status, class_="pill", style=f"--tone: var(--{_STATUS_COLORS[status]})")


def render_tiles(found: RunFacts, ranks: Sequence[RankTimes]) -> Html:
    """The numbers that one looks for first."""
    of = f" / {found.num_steps:,}" if found.num_steps else ""
    shown = [(f"{found.steps:,}", of, "steps")]
    if found.loss is not None:
        shown.append((format_number(found.loss), "", "training loss"))
    if found.held_out is not None:
        shown.append((format_number(found.held_out), "", "held-out loss"))
    shown += [
        (format_number(value), "", f"held-out {name}") for name, value in list(found.metrics.items())[:2]
    ]
    if found.rate is not None:
        shown.append((format_number(found.rate, 3), f" {found.rate_unit}", "throughput"))
        shown.append((format_duration(found.step_seconds), "", "median step"))
    if len(ranks) > 1:
        whole = sum(rank.seconds for rank in ranks) or 1.0
        share = sum(rank.communication * rank.seconds for rank in ranks) / whole
        shown.append((format_percent(share), "", "of the time in communication"))
    return tag("div", [_render_tile(*one) for one in shown], class_="tiles")


def _render_tile(value: str, small: str, name: str) -> Html:
    return tag("div", tag("b", value, tag("small", small)), tag("span", name), class_="card tile")


def render_summaries(runs: Sequence[RecordedRun]) -> Html:
    """The summary; with several runs each under its name."""
    found: list[Html] = []
    for i, run in enumerate(runs):
        if len(runs) > 1:
            found.append(tag("h3", run.name, style=f"--tone: var(--{CURVE_COLORS[i % len(CURVE_COLORS)]})"))
        found += [tag("p", line) for line in summarize_run(run)]
    return tag("section", found, class_="card words")


# -- curves ------------------------------------------------------------------------------------------------


def render_charts(runs: Sequence[RecordedRun]) -> Html:
    """Loss, metrics, throughput, gradient norm, learning rate and step time."""
    marks = _resume_marks(runs[0]) if len(runs) == 1 else []
    dots = "dots: held-out" if len(runs) > 1 and any(run.evaluations for run in runs) else ""
    losses = _train_and_eval_curves(runs, lambda record: record["loss"])
    shown = [render_chart("Loss", losses, unit=dots, may_be_logarithmic=True, marks=marks)]
    for name in _metric_names(runs)[:_MAX_METRICS]:
        title = name.replace("_", " ").capitalize()
        shown.append(
            render_chart(title, _train_and_eval_curves(runs, partial(_metric_value, name)), marks=marks)
        )
    across = json.dumps([progress_table(run) for run in runs], separators=(",", ":"))
    return tag("div", shown, _render_step_charts(runs, marks), class_="charts", data_runs=across)


def progress_table(run: RecordedRun) -> dict[str, list[float]]:
    """Seconds, samples, and bytes of all ranks after some numbers of steps; lines may join them."""
    seconds = samples = 0.0
    found = [(0.0, 0.0, 0.0)]
    for step in run.steps:
        seconds += to_float(step["seconds"])
        samples += to_float(step["num_samples"])
        found.append((_steps_taken(step), seconds, samples))
    every = max(1, len(found) // _MAX_POINTS)
    shown = [*found[:-1:every], found[-1]]
    rows = {name: [row[i] for row in shown] for i, name in enumerate(("step", "seconds", "samples"))}
    sent = cumulative_sent_bytes(run)
    return rows | {"bytes": [sent(step) for step in rows["step"]]}


def _render_step_charts(runs: Sequence[RecordedRun], marks: Sequence[tuple[float, str]]) -> list[Html]:
    """What steps have and evaluations have not."""
    norms = _step_curves(runs, lambda run, s: to_float(s["grad_norm"]))
    rates = _step_curves(runs, lambda run, s: to_float(s["lr"]), "line")
    times = _step_curves(runs, lambda run, s: 1000 * to_float(s["seconds"]))
    speed = collect_facts(runs[0]).rate_unit
    return [
        render_chart("Throughput", _step_curves(runs, _throughput), unit=speed, from_zero=True, marks=marks),
        render_chart("Gradient norm", norms, may_be_logarithmic=True, marks=marks),
        render_chart("Learning rate", rates, from_zero=True, marks=marks),
        render_chart("Step time", times, unit="ms", from_zero=True, marks=marks),
    ]


def _resume_marks(run: RecordedRun) -> list[tuple[float, str]]:
    return [(float(s["step"]), f"resumed at step {s['step']}") for s in run.starts[1:]]


def _curve_name(runs: Sequence[RecordedRun], i: int, name: str) -> str:
    return name if len(runs) == 1 else (f"{runs[i].name}, {name}" if name == "held-out" else runs[i].name)


def _steps_taken(record: MetricsRecord) -> float:
    """Steps taken after a step."""
    return float(record["step"]) + 1


def _step_curves(
    runs: Sequence[RecordedRun], value: Callable[[RecordedRun, MetricsRecord], float], style: str = "noisy"
) -> list[ChartCurve]:
    return [
        ChartCurve(
            _curve_name(runs, i, "each step"),
            CURVE_COLORS[i % len(CURVE_COLORS)],
            [(_steps_taken(s), value(run, s)) for s in run.steps],
            style,
            i,
        )
        for i, run in enumerate(runs)
    ]


def _metric_names(runs: Sequence[RecordedRun]) -> list[str]:
    return sorted(
        {name for run in runs for r in (*run.steps[:1], *run.evaluations[:1]) for name in r["metrics"]}
    )


def _train_and_eval_curves(
    runs: Sequence[RecordedRun], value: Callable[[MetricsRecord], Any]
) -> list[ChartCurve]:
    """What `value` finds in the steps and in the evaluations."""
    found = []
    for i, run in enumerate(runs):
        color = CURVE_COLORS[i % len(CURVE_COLORS)]
        steps = [(_steps_taken(s), to_float(v)) for s in run.steps if (v := value(s)) is not None]
        held_out = [(float(e["step"]), to_float(v)) for e in run.evaluations if (v := value(e)) is not None]
        found.append(ChartCurve(_curve_name(runs, i, "training"), color, steps, "noisy", i))
        other = color if len(runs) > 1 else "c2"
        found.append(ChartCurve(_curve_name(runs, i, "held-out"), other, held_out, "dots", i))
    return found


def _metric_value(name: str, record: MetricsRecord) -> Any:
    return record["metrics"].get(name)


def _throughput(run: RecordedRun, step: MetricsRecord) -> float:
    return to_float(step["samples_per_second"]) * (run.tokens_per_sample or 1)


_TIMES_NOTE = (
    "Time inside the steps, between marks of each process. Transfer and waiting are the communication that "
    "a rank saw; waiting is what it waited longer than the rank that waited least in the same round."
)
_BYTES_NOTE = (
    "Counted: what was passed to the collectives inside the steps. Closed form: 2 (P − 1) / P times the "
    "bytes of gradient and tally once a round, from the size of the model and the number of ranks P alone."
)
_LIGHT_PARTS = ("waiting", "other")


def render_rank_times(runs: Sequence[RecordedRun]) -> Html:
    """Stacked shares of every rank, and a table of what its process used."""
    found = [(run, rank) for run in runs for rank in rank_times(run)]
    if not found:
        return Html("")
    keys = [tag("span", tag("i", style=f"background: var(--{part})"), part) for part in TIME_PARTS]
    bars = [_render_bar(_rank_name(runs, run, rank), rank) for run, rank in found]
    rows = [[_rank_name(runs, run, rank), *_resource_cells(rank)] for run, rank in found]
    head = ["", "mean step", "slowest step", "hidden communication", "cores busy", "peak memory"]
    card = tag(
        "div", tag("div", keys, class_="legend"), tag("div", bars, class_="bars"), class_="card shares"
    )
    return join(
        [
            tag("h2", "Where the time goes"),
            card,
            tag("p", _TIMES_NOTE, class_="note"),
            table(head, rows, style="margin-top: 12px"),
        ]
    )


def _resource_cells(rank: RankTimes) -> list[str]:
    return [
        format_duration(rank.seconds / rank.rounds),
        format_duration(rank.slowest_seconds),
        format_percent(rank.hidden_fraction) if rank.hidden_seconds else "–",
        f"{rank.cpu_seconds / rank.seconds:.2f}" if rank.seconds else "–",
        format_bytes(rank.peak_bytes),
    ]


def _rank_name(runs: Sequence[RecordedRun], run: RecordedRun, rank: RankTimes) -> str:
    return f"rank {rank.rank}" if len(runs) == 1 else f"{run.name}, rank {rank.rank}"


def _render_bar(name: str, rank: RankTimes) -> Html:
    parts = [_render_bar_part(rank, part) for part in TIME_PARTS if rank.share(part) >= 0.0005]
    return tag("div", tag("span", name), tag("div", parts), class_="bar")


def _render_bar_part(rank: RankTimes, part: str) -> Html:
    share = rank.share(part)
    seconds = format_duration(rank.parts[part] / rank.rounds)
    return tag(
        "b",
        f"{100 * share:.0f}%" if share >= 0.05 else "",
        class_="light" if part in _LIGHT_PARTS else None,
        style=f"width: {100 * share:.3f}%; background: var(--{part})",
        data_tip=f"{part}: {100 * share:.1f} % · {seconds} a round",
    )


def render_balance(run: RecordedRun) -> Html:
    """Seconds, bytes and memory of every rank in one table, and what is uneven in words."""
    shares = rank_loads(run)
    if not shares:
        return Html("")
    lines = [tag("p", line) for line in describe_balance(shares)]
    shown = table(list(BALANCE_HEADER), render_balance_rows(shares))
    return join([tag("h2", "How even the ranks are"), shown, tag("div", lines, class_="card words")])


# -- bytes -------------------------------------------------------------------------------------------------


def render_traffic(runs: Sequence[RecordedRun]) -> Html:
    """Bytes of every rank against the closed form, and the ledger of rank 0."""
    rows = []
    for run in runs:
        for one in compare_sent_bytes(run) if run.ranks > 1 else ():
            expected = "–" if one.expected_bytes is None else format_bytes(one.expected_bytes / one.rounds)
            name = f"rank {one.rank}" if len(runs) == 1 else f"{run.name}, rank {one.rank}"
            counted = format_bytes(one.counted_bytes / one.rounds)
            rows.append([name, f"{one.rounds:,}", counted, expected, _render_agreement(one.agrees)])
    if not rows:
        return Html("")
    head = ["", "rounds", "counted, a round", "closed form", ""]
    books = _render_ledger(runs[0]) if len(runs) == 1 else Html("")
    return join([tag("h2", "What is sent"), table(head, rows), tag("p", _BYTES_NOTE, class_="note"), books])


def _render_agreement(agrees: bool | None) -> Html:
    if agrees is None:
        return tag("span", "no form known")
    return tag("span", "equal", class_="ok") if agrees else tag("span", "differs", class_="no")


def _render_ledger(run: RecordedRun) -> Html:
    books = [record for record in run.last_training_records if record.get("event") == "communication"]
    if not books:
        return Html("")
    ledger = table(
        ["operation, group", "calls", "payload", "sent", "hidden"],
        [_ledger_row(name, row) for name, row in sorted(books[-1]["rows"].items())],
    )
    return tag("details", tag("summary", "Every collective of rank 0, also outside of the steps"), ledger)


def _ledger_row(name: str, row: MetricsRecord) -> list[str]:
    sizes = [format_bytes(row["payload_bytes"]), format_bytes(row["sent_bytes"])]
    return [name, f"{row['calls']:,}", *sizes, format_percent(row["hidden_fraction"])]
