"""A run in words: sentences whose every number is computed from the rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.report.rank_balance import RankTimes, describe_balance, find_imbalances, rank_loads, rank_times
from paceline.report.run_facts import (
    RunFacts,
    collect_facts,
    format_bytes,
    format_duration,
    format_number,
    format_percent,
)
from paceline.report.run_reader import RecordedRun, to_float
from paceline.report.sent_bytes import SentBytes, compare_sent_bytes

_WAITING_THRESHOLD = 0.1  # waiting is worth a sentence from this share of a rank's time on
_SLOW_STEP_RATIO = 2.0  # so is a step time of which one in twenty is this many times the median


def summarize_run(run: RecordedRun) -> list[str]:
    """One sentence or two on how it ended, on what it learned, on its speed, its time and its bytes."""
    found = collect_facts(run)
    lines = [
        _describe_end(run, found),
        *_describe_losses(run, found),
        *_describe_speed(found),
        *_describe_time(rank_times(run)),
    ]
    lines += [*_describe_bytes(run, compare_sent_bytes(run)), *_describe_imbalance(run)]
    return [*lines, *_describe_warnings(run)]


def _describe_end(run: RecordedRun, found: RunFacts) -> str:
    processes = f"{found.ranks} process{'es' if found.ranks != 1 else ''}"
    of = f" of {found.num_steps}" if found.num_steps else ""
    place = f"{found.steps}{of} steps on {processes} with {found.strategy}" if run.starts else ""
    error = run.error or {}
    words = {
        "finished": f"Finished {place}.",
        "stopped": f"Stopped by a signal after {place}. It can be resumed.",
        "running": f"Running: {place} so far.",
        "failed": f"Failed after {place}: {error.get('text', '')}",
        "lost": f"Ended without a word after {place}: the process is gone, as after kill -9 or a power cut.",
        "new": "Not started, or nothing was written yet.",
    }
    resumed = len(run.starts) - 1
    again = f" It was started {resumed + 1} times, last from step {run.start['step']}." if resumed > 0 else ""
    return words[run.status] + again


def _describe_losses(run: RecordedRun, found: RunFacts) -> Iterator[str]:
    if not run.steps:
        return
    first, last = to_float(run.steps[0]["loss"]), found.loss
    bad = next((s["step"] for s in run.steps if not math.isfinite(to_float(s["loss"]))), None)
    if bad is not None:
        yield f"The training loss is not finite from step {bad} on."
    elif last is not None:
        yield f"The training loss went from {format_number(first)} to {format_number(last)} (mean of the last fifth)."
    skipped = sum(not step["applied"] for step in run.steps)
    if skipped:
        yield f"{skipped} updates were skipped because a gradient overflowed."
    if found.held_out is None:
        yield "There is no evaluation on held-out data."
        return
    metrics = "".join(f", {name} {format_number(value)}" for name, value in found.metrics.items())
    yield f"On held-out data the loss is {format_number(found.held_out)}{metrics}{_describe_best(found)}."


def _describe_best(found: RunFacts) -> str:
    if found.best_held_out is None or found.held_out is None or found.best_held_out[0] >= found.held_out:
        return ""
    loss, step = found.best_held_out
    return f"; it was lowest, {format_number(loss)}, after {step} steps"


def _describe_speed(found: RunFacts) -> Iterator[str]:
    if found.rate is None or found.step_seconds is None or found.slow_seconds is None:
        return
    text = f"{format_number(found.rate)} {found.rate_unit}: a step takes {format_duration(found.step_seconds)} (median)"
    if found.slow_seconds > _SLOW_STEP_RATIO * found.step_seconds:
        text += f", but one in twenty takes {format_duration(found.slow_seconds)} or more"
    yield text + "."


def _describe_time(ranks: list[RankTimes]) -> Iterator[str]:
    if not ranks:
        return
    whole = sum(rank.seconds for rank in ranks)
    shares = (
        {part: sum(rank.parts[part] for rank in ranks) / whole for part in ranks[0].parts} if whole else {}
    )
    if not shares:
        return
    seen = shares.pop("transfer") + shares.pop("waiting")
    shares["communication"] = seen
    most = max(shares, key=lambda part: shares[part])
    yield f"Most of the time of a step goes to {most} ({format_percent(shares[most])})."
    if len(ranks) == 1:
        return
    hidden = sum(rank.hidden_seconds for rank in ranks)
    if hidden > 0:
        fraction = format_percent(hidden / (hidden + seen * whole))
        yield f"Ranks wait {format_percent(seen)} of the time for communication; {fraction} of it all is hidden."
    idle, busy = (pick(ranks, key=lambda rank: rank.share("waiting")) for pick in (max, min))
    if idle.share("waiting") >= _WAITING_THRESHOLD:
        waits = format_percent(idle.share("waiting"))
        yield f"Rank {idle.rank} waits {waits} of its time for slower ranks; rank {busy.rank} waits least."


def _describe_bytes(run: RecordedRun, ranks: list[SentBytes]) -> Iterator[str]:
    if not ranks or run.ranks < 2:
        return
    first = ranks[0]
    each = f"{format_bytes(first.counted_bytes / first.rounds)} {_round_text(first)}"
    less = first.dense_bytes / first.counted_bytes if first.counted_bytes else 1.0
    ratio = (
        f", {format_number(less, 3)} times less than replicas that agree in every step"
        if less > 1.005
        else ""
    )
    if first.expected_bytes is None:
        yield f"Rank 0 sends {each}{ratio}; no closed form is known for this strategy."
    elif all(rank.agrees for rank in ranks):
        yield f"Every rank sends {each}, which is what the closed form says{ratio}."
    else:
        wrong = max(ranks, key=lambda r: abs(r.counted_bytes - (r.expected_bytes or 0.0)))
        expected = format_bytes((wrong.expected_bytes or 0.0) / wrong.rounds)
        found = format_bytes(wrong.counted_bytes / wrong.rounds)
        yield f"Rank {wrong.rank} sends {found} {_round_text(wrong)}; the closed form says {expected}."


def _describe_imbalance(run: RecordedRun) -> Iterator[str]:
    """Ranks that have more than others, and what to do."""
    shares = rank_loads(run)
    return describe_balance(shares) if find_imbalances(shares) else iter(())


def _round_text(found: SentBytes) -> str:
    length = found.steps / found.rounds
    return "a step" if length <= 1 else f"a round of {format_number(length, 2)} steps"


def _describe_warnings(run: RecordedRun) -> Iterator[str]:
    """Warnings, the certificate, and lines that cannot be read."""
    warnings = run.of("warning")
    if warnings:
        many = f"{len(warnings)} warning{'s' if len(warnings) > 1 else ''}"
        yield f"{many}; the last: {warnings[-1].get('text', '')}"
    if run.certificate is not None:
        yield f"Certificate: {str(run.certificate.get('conclusion', '')).splitlines()[0]}"
    if run.unreadable:
        yield f"{run.unreadable} lines of the metrics cannot be read, as after a crash in the middle of one."
