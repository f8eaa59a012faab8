"""The summary of a run in sentences, for the report page and the terminal. Pure.

Every number in a sentence is computed from the records of the run; a sentence without records is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.errors import format_count
from paceline.report.number_format import format_bytes, format_duration, format_number, format_percent
from paceline.report.rank_balance import RankTimes, describe_balance, find_imbalances, rank_loads, rank_times
from paceline.report.run_facts import RunFacts, collect_facts
from paceline.report.run_reader import RecordedRun, to_float
from paceline.report.sent_bytes import SentBytes, compare_sent_bytes

_WAITING_THRESHOLD = 0.1  # a rank that waits for a smaller fraction of its time is not mentioned
_SLOW_STEP_RATIO = 2.0  # slow steps are mentioned if one in twenty takes more than this many medians
_DENSE_RATIO = 1.005  # rounding alone makes no sentence about fewer bytes


def summarize_run(run: RecordedRun) -> list[str]:
    """Return sentences about the end, the losses, the speed, the time and the bytes of a run."""
    facts, times = collect_facts(run), rank_times(run)
    return [
        _describe_end(run, facts),
        *_describe_losses(run, facts),
        *_describe_speed(facts),
        *_describe_time(times),
        *_describe_waiting(times),
        *_describe_bytes(run, compare_sent_bytes(run)),
        *_describe_imbalance(run),
        *_describe_warnings(run),
        *(f"{record['warning'].capitalize()}." for record in run.of("privacy")[-1:] if record["warning"]),
    ]


def _describe_end(run: RecordedRun, facts: RunFacts) -> str:
    processes = format_count(facts.ranks, "process")
    steps = (
        f"{facts.steps} of {facts.num_steps} steps" if facts.num_steps else format_count(facts.steps, "step")
    )
    progress = f"{steps} on {processes} with {facts.strategy}" if run.starts else ""
    error = run.error or {}
    sentences = {
        "finished": f"Finished {progress}.",
        "stopped": f"Stopped by a signal after {progress}. It can be resumed.",
        "running": f"Running: {progress} so far.",
        "failed": f"Failed after {progress}: {error.get('text', '')}",
        "lost": f"Ended without a record of its end after {progress}: the process is gone, for example"
        " because of kill -9 or a power cut.",
        "new": "Not started: there are no records yet.",
    }
    # Another process that becomes rank 0 while the job runs records a start as well.
    num_resumes = len(run.starts) - 1 - sum(bool(record["takes_over"]) for record in run.of("members"))
    if num_resumes <= 0:
        return sentences[run.status]
    times = "once" if num_resumes == 1 else f"{num_resumes} times, last"
    return f"{sentences[run.status]} It was resumed {times} at step {run.start['step']}."


def _describe_losses(run: RecordedRun, facts: RunFacts) -> Iterator[str]:
    if not run.steps:
        return
    first, last = to_float(run.steps[0]["loss"]), facts.loss
    bad = next((s["step"] for s in run.steps if not math.isfinite(to_float(s["loss"]))), None)
    if bad is not None:
        yield f"The training loss is not finite from step {bad} on."
    elif last is not None:
        ends = f"from {format_number(first)} to {format_number(last)}"
        yield f"The training loss went {ends} (mean of the last fifth of the steps)."
    num_skipped = sum(not step["applied"] for step in run.steps)
    if num_skipped:
        updates = "update was" if num_skipped == 1 else "updates were"
        why = "no client returned one" if run.of("cohort") else "a gradient overflowed"
        yield f"{num_skipped} {updates} skipped because {why}."
    if facts.held_out is None:
        yield "There is no evaluation on held-out data."
        return
    metrics = "".join(f", {name} {format_number(value)}" for name, value in facts.metrics.items())
    yield f"The held-out loss is {format_number(facts.held_out)}{metrics}{_describe_best(facts)}."


def _describe_best(facts: RunFacts) -> str:
    if facts.best_held_out is None or facts.held_out is None or facts.best_held_out[0] >= facts.held_out:
        return ""
    loss, step = facts.best_held_out
    return f"; it was lowest, {format_number(loss)}, after {format_count(step, 'step')}"


def _describe_speed(facts: RunFacts) -> Iterator[str]:
    if facts.rate is None or facts.step_seconds is None or facts.slow_seconds is None:
        return
    rate = f"{format_number(facts.rate)} {facts.rate_unit}"
    text = f"Throughput was {rate}; a step took {format_duration(facts.step_seconds)} (median)"
    if facts.slow_seconds > _SLOW_STEP_RATIO * facts.step_seconds:
        text += f", but one in twenty took {format_duration(facts.slow_seconds)} or more"
    yield text + "."


def _describe_time(ranks: list[RankTimes]) -> Iterator[str]:
    total_seconds = sum(rank.seconds for rank in ranks)
    if total_seconds <= 0:
        return
    shares = {phase: sum(rank.parts[phase] for rank in ranks) / total_seconds for phase in ranks[0].parts}
    exposed = shares.pop("transfer") + shares.pop("waiting")
    shares["communication"] = exposed
    largest = max(shares, key=lambda phase: shares[phase])
    yield f"Most of the time of a step went to {largest} ({format_percent(shares[largest])})."
    hidden_seconds = sum(rank.hidden_seconds for rank in ranks)
    if len(ranks) > 1 and hidden_seconds > 0:
        hidden = hidden_seconds / (hidden_seconds + exposed * total_seconds)
        yield (
            f"Exposed communication took {format_percent(exposed)} of the time; {format_percent(hidden)} of"
            " all communication was hidden behind other work."
        )


def _describe_waiting(ranks: list[RankTimes]) -> Iterator[str]:
    if len(ranks) < 2:
        return
    idlest, busiest = (pick(ranks, key=lambda rank: rank.share("waiting")) for pick in (max, min))
    if idlest.share("waiting") >= _WAITING_THRESHOLD:
        waiting = format_percent(idlest.share("waiting"))
        yield (
            f"Rank {idlest.rank} spent {waiting} of its time waiting for slower ranks; rank {busiest.rank}"
            " waited least."
        )


def _describe_bytes(run: RecordedRun, ranks: list[SentBytes]) -> Iterator[str]:
    if not ranks or run.ranks < 2:
        return
    first = ranks[0]
    sent = f"{format_bytes(first.counted_bytes / first.rounds)} {_round_text(first)}"
    ratio = first.dense_bytes / first.counted_bytes if first.counted_bytes else 1.0
    less = (
        f", {format_number(ratio, 3)} times less than plain data parallelism" if ratio > _DENSE_RATIO else ""
    )
    if first.expected_bytes is None:
        yield f"Rank 0 sent {sent}{less}. For this strategy there is no prediction."
    elif all(rank.agrees for rank in ranks):
        yield f"Every rank sent {sent}, exactly as predicted{less}."
    else:
        wrong = max(ranks, key=lambda rank: abs(rank.counted_bytes - (rank.expected_bytes or 0.0)))
        expected = format_bytes((wrong.expected_bytes or 0.0) / wrong.rounds)
        counted = format_bytes(wrong.counted_bytes / wrong.rounds)
        yield f"Rank {wrong.rank} sent {counted} {_round_text(wrong)}, but the prediction is {expected}."


def _describe_imbalance(run: RecordedRun) -> Iterator[str]:
    loads = rank_loads(run)
    return describe_balance(loads) if find_imbalances(loads) else iter(())


def _round_text(sent: SentBytes) -> str:
    num_steps = sent.steps / sent.rounds
    return "per step" if num_steps <= 1 else f"per round of {format_number(num_steps, 2)} steps"


def _describe_warnings(run: RecordedRun) -> Iterator[str]:
    warnings = run.of("warning")
    if warnings:
        count = format_count(len(warnings), "warning")
        yield f"{count}; the last: {warnings[-1].get('text', '')}"
    if run.certificate is not None:
        yield f"Certificate: {str(run.certificate.get('conclusion', '')).splitlines()[0]}"
    if run.unreadable:
        lines = format_count(run.unreadable, "line")
        yield f"{lines} of metrics.jsonl could not be read, for example because a crash cut one short."
