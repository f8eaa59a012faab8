"""The sections of the report page: status, tiles, hyperparameters, summary, charts, ranks and traffic.
Pure.

Each function returns the HTML of one section, or nothing if the runs have no records for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.errors import format_count
from paceline.report.html import Html, join, table, tag
from paceline.report.number_format import format_bytes, format_duration, format_number, format_percent
from paceline.report.rank_balance import (
    COMPUTE_PARTS,
    TIME_PARTS,
    RankLoad,
    RankTimes,
    describe_balance,
    rank_loads,
    rank_times,
)
from paceline.report.run_facts import RunFacts, collect_facts
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
_MAX_EVALUATION_MARKS = 50  # more lines would hide the curve; its dots are there anyway
_MAX_POINTS = 200  # of a progress table; the page interpolates between them


def render_status(status: str) -> Html:
    """Return the status as a coloured word."""
    return tag("span", status, class_="pill", style=f"--tone: var(--{_STATUS_COLORS[status]})")


def render_tiles(facts: RunFacts, ranks: Sequence[RankTimes]) -> Html:
    """Return the main numbers of a run in large print."""
    total_steps = f" / {facts.num_steps:,}" if facts.num_steps else ""
    tiles = [(f"{facts.steps:,}", total_steps, "steps")]
    if facts.loss is not None:
        tiles.append((format_number(facts.loss), "", "training loss"))
    if facts.held_out is not None:
        tiles.append((format_number(facts.held_out), "", "held-out loss"))
    tiles += [
        (format_number(value), "", f"held-out {name}") for name, value in list(facts.metrics.items())[:2]
    ]
    if facts.rate is not None:
        tiles.append((format_number(facts.rate, 3), f" {facts.rate_unit}", "throughput"))
        tiles.append((format_duration(facts.step_seconds), "", "median step"))
    if len(ranks) > 1:
        total_seconds = sum(rank.seconds for rank in ranks) or 1.0
        exposed = sum(rank.communication * rank.seconds for rank in ranks) / total_seconds
        tiles.append((format_percent(exposed), "", "exposed communication"))
    return tag("div", [_render_tile(*tile) for tile in tiles], class_="tiles")


_HYPERPARAMETERS = ("options", "batch", "optimizer", "schedule", "precision", "average")
_RUN_KEYS = ("steps", "epochs", "seed")


def render_hyperparameters(run: RecordedRun) -> Html:
    """Return the keys of the recipe that decide what is learned, with their values."""
    # The run folder's recipe has every key; tables that a run without them would leave at "off" are short.
    keys = [(name, run.recipe[name]) for name in _RUN_KEYS if name in run.recipe]
    for name in _HYPERPARAMETERS:
        values = run.recipe.get(name)
        if isinstance(values, dict):
            keys += [(f"{name}.{key}", value) for key, value in values.items()]
    if not keys:
        return Html("")
    cells = [tag("div", tag("dt", name), tag("dd", _format_value(value))) for name, value in keys]
    return join([tag("h2", "Hyperparameters"), tag("dl", cells, class_="card keys")])


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _render_tile(value: str, small: str, name: str) -> Html:
    return tag("div", tag("b", value, tag("small", small)), tag("span", name), class_="card tile")


def render_summaries(runs: Sequence[RecordedRun]) -> Html:
    """Return the summary of each run, under its name if there are several."""
    paragraphs: list[Html] = []
    for i, run in enumerate(runs):
        if len(runs) > 1:
            paragraphs.append(
                tag("h3", run.name, style=f"--tone: var(--{CURVE_COLORS[i % len(CURVE_COLORS)]})")
            )
        paragraphs += [tag("p", line) for line in summarize_run(run)]
    return tag("section", paragraphs, class_="card words")


# -- curves ------------------------------------------------------------------------------------------------


def render_charts(runs: Sequence[RecordedRun]) -> Html:
    """Return charts of loss, metrics, throughput, gradient norm, learning rate and step time."""
    marks = _resume_marks(runs[0]) if len(runs) == 1 else []
    dots = "dots: held-out" if len(runs) > 1 and any(run.evaluations for run in runs) else ""
    losses = _train_and_eval_curves(runs, lambda record: record["loss"])
    evaluations = [*marks, *(_evaluation_marks(runs[0]) if len(runs) == 1 else [])]
    charts = [render_chart("Loss", losses, unit=dots, may_be_logarithmic=True, marks=evaluations)]
    for name in _metric_names(runs)[:_MAX_METRICS]:
        title = name.replace("_", " ").capitalize()
        charts.append(
            render_chart(title, _train_and_eval_curves(runs, partial(_metric_value, name)), marks=marks)
        )
    progress = json.dumps([progress_table(run) for run in runs], separators=(",", ":"))
    return tag("div", charts, _render_step_charts(runs, marks), class_="charts", data_runs=progress)


def progress_table(run: RecordedRun) -> dict[str, list[float]]:
    """Return seconds, samples and bytes of all ranks by steps taken, for other horizontal axes of the charts.

    Returns:
        Columns "step", "seconds", "samples" and "bytes" of equal length; values between rows are
        interpolated.
    """
    seconds = samples = 0.0
    totals = [(0.0, 0.0, 0.0)]
    for step in run.steps:
        seconds += to_float(step["seconds"])
        samples += to_float(step["num_samples"])
        totals.append((_steps_taken(step), seconds, samples))
    stride = max(1, len(totals) // _MAX_POINTS)
    sampled = [*totals[:-1:stride], totals[-1]]
    columns = {name: [row[i] for row in sampled] for i, name in enumerate(("step", "seconds", "samples"))}
    sent_bytes = cumulative_sent_bytes(run)
    return columns | {"bytes": [sent_bytes(step) for step in columns["step"]]}


def _render_step_charts(runs: Sequence[RecordedRun], marks: Sequence[tuple[float, str]]) -> list[Html]:
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


def _evaluation_marks(run: RecordedRun) -> list[tuple[float, str]]:
    """Return where a run was evaluated, with the loss; the best one is named."""
    if len(run.evaluations) > _MAX_EVALUATION_MARKS:
        return []
    best = collect_facts(run).best_held_out
    return [
        (step, f"evaluation at step {step:,}: held-out loss {format_number(loss)}{', the best' * is_best}")
        for e in run.evaluations
        for step, loss in [(int(e["step"]), to_float(e["loss"]))]
        for is_best in [len(run.evaluations) > 1 and best == (loss, step)]
    ]


def _curve_name(runs: Sequence[RecordedRun], i: int, name: str) -> str:
    if len(runs) == 1:
        return name
    return f"{runs[i].name}, {name}" if name == "held-out" else runs[i].name


def _steps_taken(record: MetricsRecord) -> float:
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
    """Return for each run the curve of its steps and the dots of its evaluations; `value` may return None."""
    curves = []
    for i, run in enumerate(runs):
        color = CURVE_COLORS[i % len(CURVE_COLORS)]
        steps = [(_steps_taken(s), to_float(v)) for s in run.steps if (v := value(s)) is not None]
        held_out = [(float(e["step"]), to_float(v)) for e in run.evaluations if (v := value(e)) is not None]
        curves.append(ChartCurve(_curve_name(runs, i, "training"), color, steps, "noisy", i))
        dot_color = color if len(runs) > 1 else "c2"
        curves.append(ChartCurve(_curve_name(runs, i, "held-out"), dot_color, held_out, "dots", i))
    return curves


def _metric_value(name: str, record: MetricsRecord) -> Any:
    return record["metrics"].get(name)


def _throughput(run: RecordedRun, step: MetricsRecord) -> float:
    return to_float(step["samples_per_second"]) * (run.tokens_per_sample or 1)


_TIMES_NOTE = (
    "Time inside the steps, measured by each process. Transfer and waiting are exposed communication; "
    "waiting is the time beyond that of the rank with the shortest communication in the same round."
)
_BYTES_NOTE = (
    "Counted: bytes that the collectives of the steps sent. Predicted: 2 (P − 1) / P times the bytes of the "
    "gradients and of the summed losses and counts, once per round, where P is the number of ranks."
)
_COLUMNS_NOTE = (
    "All times are means per round. Compute is forward, backward and update; sent bytes are those of a round."
    " Hidden communication is the share that overlapped with other work. Cores busy is the CPU time of the"
    " process divided by the time of its steps: 1 means that one core worked all the time, 2 that two did,"
    " and less than 1 that the process waited: for other ranks, for data, or for a core that is in use."
)
_LIGHT_PARTS = ("waiting", "other")


def render_rank_times(runs: Sequence[RecordedRun]) -> Html:
    """Return a bar with the parts of the time for each rank, and one table of time, bytes and memory by rank.

    A single run of several ranks has sentences about what is uneven among them.
    """
    ranks = [(run, rank) for run in runs for rank in rank_times(run)]
    if not ranks:
        return Html("")
    loads = {(id(run), load.rank): load for run in runs for load in rank_loads(run)}
    keys = [tag("span", tag("i", style=f"background: var(--{phase})"), phase) for phase in TIME_PARTS]
    bars = [_render_bar(_rank_name(runs, run, rank), rank) for run, rank in ranks]
    card = tag(
        "div", tag("div", keys, class_="legend"), tag("div", bars, class_="bars"), class_="card shares"
    )
    rows = [
        [_load_name(runs, run, rank, load), *_rank_cells(rank, load)]
        for run, rank in ranks
        for load in [loads.get((id(run), rank.rank))]
    ]
    lines = [tag("p", line) for line in describe_balance(rank_loads(runs[0]))] if len(runs) == 1 else []
    return join(
        [
            tag("h2", "Where the time goes"),
            card,
            tag("p", _TIMES_NOTE, class_="note"),
            table(RANK_HEADER, rows, style="margin-top: 12px"),
            tag("p", _COLUMNS_NOTE, class_="note"),
            tag("div", lines, class_="card words") if lines else "",
        ]
    )


RANK_HEADER = (
    *("", "mean step", "slowest step", "compute", "exposed communication", "idle", "hidden communication"),
    *("sent", "cores busy", "peak memory"),
)


def _rank_cells(rank: RankTimes, load: RankLoad | None) -> list[str]:
    """Return the columns of `RANK_HEADER` after the name; a run of one process has no load."""
    shared = (load.communication_seconds, load.idle_seconds) if load else ()
    return [
        format_duration(rank.seconds / rank.rounds),
        format_duration(rank.slowest_seconds),
        format_duration(sum(rank.parts[part] for part in COMPUTE_PARTS) / rank.rounds),
        *(map(format_duration, shared) if load else ("–", "–")),
        format_percent(rank.hidden_fraction) if rank.hidden_seconds else "–",
        format_bytes(load.sent_bytes) if load else "–",
        f"{rank.cpu_seconds / rank.seconds:.2f}" if rank.seconds else "–",
        format_bytes(rank.peak_bytes),
    ]


def _load_name(runs: Sequence[RecordedRun], run: RecordedRun, rank: RankTimes, load: RankLoad | None) -> str:
    name = load.label if load else f"rank {rank.rank}"
    return name if len(runs) == 1 else f"{run.name}, {name}"


def _rank_name(runs: Sequence[RecordedRun], run: RecordedRun, rank: RankTimes) -> str:
    return f"rank {rank.rank}" if len(runs) == 1 else f"{run.name}, rank {rank.rank}"


def _render_bar(name: str, rank: RankTimes) -> Html:
    segments = [_render_bar_part(rank, phase) for phase in TIME_PARTS if rank.share(phase) >= 0.0005]
    return tag("div", tag("span", name), tag("div", segments), class_="bar")


def _render_bar_part(rank: RankTimes, phase: str) -> Html:
    share = rank.share(phase)
    seconds = format_duration(rank.parts[phase] / rank.rounds)
    return tag(
        "b",
        f"{100 * share:.0f}%" if share >= 0.05 else "",
        class_="light" if phase in _LIGHT_PARTS else None,
        style=f"width: {100 * share:.3f}%; background: var(--{phase})",
        data_tip=f"{phase}: {100 * share:.1f} % · {seconds} per round",
    )


# -- bytes -------------------------------------------------------------------------------------------------


def render_traffic(runs: Sequence[RecordedRun]) -> Html:
    """Return the counted and predicted bytes of each rank, and the ledger of rank 0 for a single run."""
    rows = []
    for run in runs:
        for sent in compare_sent_bytes(run) if run.ranks > 1 else ():
            expected = "–" if sent.expected_bytes is None else format_bytes(sent.expected_bytes / sent.rounds)
            name = f"rank {sent.rank}" if len(runs) == 1 else f"{run.name}, rank {sent.rank}"
            counted = format_bytes(sent.counted_bytes / sent.rounds)
            rows.append([name, f"{sent.rounds:,}", counted, expected, _render_agreement(sent.agrees)])
    if not rows:
        return Html("")
    head = ["", "rounds", "counted per round", "predicted per round", ""]
    ledger = _render_ledger(runs[0]) if len(runs) == 1 else Html("")
    return join([tag("h2", "Bytes sent"), table(head, rows), tag("p", _BYTES_NOTE, class_="note"), ledger])


def _render_agreement(agrees: bool | None) -> Html:
    if agrees is None:
        return tag("span", "no prediction")
    return tag("span", "equal", class_="ok") if agrees else tag("span", "differs", class_="no")


def _render_ledger(run: RecordedRun) -> Html:
    ledgers = [record for record in run.last_training_records if record.get("event") == "communication"]
    if not ledgers:
        return Html("")
    ledger = table(
        ["operation, group", "calls", "payload", "sent", "hidden"],
        [_ledger_row(name, row) for name, row in sorted(ledgers[-1]["rows"].items())],
    )
    return tag(
        "details", tag("summary", "All collectives of rank 0, including those outside of the steps"), ledger
    )


def _ledger_row(name: str, row: MetricsRecord) -> list[str]:
    sizes = [format_bytes(row["payload_bytes"]), format_bytes(row["sent_bytes"])]
    return [name, f"{row['calls']:,}", *sizes, format_percent(row["hidden_fraction"])]


# -- clients -----------------------------------------------------------------------------------------------

_MAX_COHORTS = 200  # rows; a run may have a million rounds
_CLIENTS_NOTE = (
    "Bytes of a round are those of the weights that each client receives and of the updates that come back,"
    " by their size; of network clients, those of whole messages. Simulated clients send nothing: what"
    " ranks sent is under Bytes sent."
)


def render_federated(run: RecordedRun) -> Html:
    """Return the clients of a federated run, their samples by label, and the cohorts."""
    partitions, cohorts = run.of("partition"), run.of("cohort")
    if not partitions:
        return Html("")
    weights = run.recipe.get("federated", {}).get("weights", "samples")
    counted = "its samples" if weights == "samples" else "1, whatever its samples"
    lines = [
        describe_partition(partitions[-1]),
        f"The weight of a client in the mean is {counted}.",
        *describe_cohorts(cohorts),
        *map(describe_privacy, run.of("privacy")[-1:]),
    ]
    parts = [tag("h2", "Clients"), tag("div", [tag("p", line) for line in lines], class_="card words")]
    if cohorts:
        rows = [_cohort_row(cohort) for cohort in cohorts[-_MAX_COHORTS:]]
        listed = table(["round", "clients", "left out", "samples", "down", "up"], rows)
        parts += [tag("details", tag("summary", f"Cohorts of {len(rows)} rounds"), listed)]
        parts.append(tag("p", _CLIENTS_NOTE, class_="note"))
    return join([*parts, _render_client_table(cohorts), _render_label_table(partitions[-1])])


def _render_client_table(cohorts: Sequence[MetricsRecord]) -> Html:
    """Return the rounds and bytes of each network client, and how often it was left out."""
    rows: dict[str, list[int]] = {}
    for cohort in cohorts:
        for name in cohort["clients"]:
            row = rows.setdefault(name, [0, 0, 0, 0])
            row[0] += 1
        for name in cohort["left_out"]:
            rows.setdefault(name, [0, 0, 0, 0])[1] += 1
        for name, (down, up) in cohort.get("bytes", {}).items():
            row = rows.setdefault(name, [0, 0, 0, 0])
            row[2], row[3] = row[2] + down, row[3] + up
    if not any(down + up for _, _, down, up in rows.values()):
        return Html("")
    listed = table(
        ["client", "rounds", "left out", "down", "up"],
        [
            [name, f"{rounds:,}", f"{left_out:,}", format_bytes(down), format_bytes(up)]
            for name, (rounds, left_out, down, up) in sorted(rows.items())
        ],
    )
    return tag("details", tag("summary", "Rounds and bytes by client"), listed)


def describe_partition(record: MetricsRecord) -> str:
    """Return how the data was divided, as a sentence."""
    redraws = record["redraws"]
    repeated = f" {format_count(redraws, 'draw')} left a client empty and was repeated." if redraws else ""
    if record["how"] == "network":
        return (
            f"{format_count(record['clients'], 'client')} of a network had connected when the run began, with"
            f" {record['smallest']:,} to {record['largest']:,} samples of their own."
        )
    return (
        f"{record['samples']:,} samples were divided among {format_count(record['clients'], 'client')}"
        f' ("{record["how"]}"), who have {record["smallest"]:,} to {record["largest"]:,} samples.{repeated}'
    )


def describe_cohorts(cohorts: Sequence[MetricsRecord]) -> list[str]:
    """Return the clients of a round, what they would send, and who was left out, in sentences."""
    if not cohorts:
        return []
    sizes = [len(cohort["clients"]) for cohort in cohorts]
    down, up = (sum(cohort[name] for cohort in cohorts) for name in ("down_bytes", "up_bytes"))
    size = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    reasons: dict[str, int] = {}
    for cohort in cohorts:
        for name, reason in cohort["left_out"].items():
            reasons[f"{name} ({reason})"] = reasons.get(f"{name} ({reason})", 0) + 1
    named = ", ".join(f"{text} {format_count(times, 'time')}" for text, times in [*reasons.items()][:10])
    left_out = f"Left out: {named}." if reasons else "No client was left out."
    return [
        f"A round had {size} of them; in {format_count(len(cohorts), 'round')} {format_bytes(down)} went to"
        f" clients and {format_bytes(up)} came back. {left_out}"
    ]


def describe_privacy(record: MetricsRecord) -> str:
    """Return what the server of a round learned, as sentences."""
    if record["warning"]:
        return f"Of this run it holds: {record['warning']}."
    learned = "; ".join(record["released"])
    return f'With secure = "{record["secure"]}" the server of a round learned: {learned}.'


def _cohort_row(cohort: MetricsRecord) -> list[str]:
    left_out = "; ".join(f"{name}: {reason}" for name, reason in cohort["left_out"].items())
    sizes = [format_bytes(cohort["down_bytes"]), format_bytes(cohort["up_bytes"])]
    return [
        str(cohort["step"]),
        ", ".join(cohort["clients"]),
        left_out or "–",
        f"{cohort['samples']:,}",
        *sizes,
    ]


def _render_label_table(record: MetricsRecord) -> Html:
    if not record["table"]:
        return Html("")
    rows = [
        [name, f"{size:,}", *(str(count) if count else "" for count in counts)]
        for name, size, counts in zip(record["names"], record["sizes"], record["table"], strict=False)
    ]
    more = f" of the first {len(rows)}" if record["clients"] > len(rows) else ""
    listed = table(["client", "samples", *record["labels"]], rows)
    return tag("details", tag("summary", f"Samples by client and label{more}"), listed)


def render_returns(run: RecordedRun) -> Html:
    """Return the returns of the episodes of a run with environments, and the ages of its rows."""
    rollouts = run.of("rollout")
    if not rollouts:
        return Html("")
    curves = [
        ChartCurve(name, color, [(r["step"] + 1, float(r[key])) for r in rollouts])
        for name, color, key in (
            ("of the iteration", "c1", "mean_return"),
            ("of the last 100 episodes", "c2", "recent_return"),
        )
    ]
    chart = render_chart("mean return", curves)
    lines = tag("div", [tag("p", line) for line in describe_rollouts(rollouts)], class_="card words")
    return join([tag("h2", "Returns"), lines, chart])


def describe_rollouts(rollouts: Sequence[MetricsRecord]) -> list[str]:
    """Return what the environments of a run did, in sentences."""
    episodes, ended, cut = (sum(r[key] for r in rollouts) for key in ("episodes", "terminated", "truncated"))
    ages: dict[str, int] = {}
    for record in rollouts:
        for age, count in record["ages"].items():
            ages[age] = ages.get(age, 0) + count
    by_age = ", ".join(
        f"{count:,} of age {age}" for age, count in sorted(ages.items(), key=lambda x: int(x[0]))
    )
    other = sum(max(0, record["not_equal"]) for record in rollouts)
    is_counted = any(record["not_equal"] >= 0 for record in rollouts)
    ratio = "The learner's log-probabilities were not compared with those of the actors."
    if is_counted:
        differing = f"{other:,} rows" if other else "no row"
        ratio = f"In first minibatches {differing} had another log-probability in learner and actor."
    return [
        f"{rollouts[-1]['environment_steps']:,} steps of environments;"
        f" {format_count(episodes, 'episode')} ended:"
        f" {ended:,} terminated, {cut:,} were truncated. Open episodes are in no mean.",
        f"Rows by the age of their weights, in versions: {by_age}.",
        ratio,
    ]
