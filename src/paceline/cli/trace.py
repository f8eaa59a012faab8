"""`paceline trace`: what each rank did in some steps, as one file for Perfetto, also of a running job."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import error_output, print_json, print_plain
from paceline.errors import DataError, DeadlineError, format_count

if TYPE_CHECKING:
    from paceline.observe.rank_activity import RankOperation
    from paceline.observe.step_trace import RankSpans, TraceRequest, TraceSummary

_LOOK_SECONDS = 0.2
_LEAVING_SECONDS = 5.0
"""How long a rank that has left may take to write what it has recorded."""


def trace(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    steps: Annotated[
        str | None,
        typer.Option(
            help="First step and the one after the last, counted from 0, as 10:13. Default: what the run has"
            " recorded.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File. Default: RUN/trace/steps-10-13.json.gz.", show_default=False
        ),
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for the ranks of a running job.")
    ] = 600.0,
    max_spans: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most spans that a rank keeps. Default: 100000, or less with many ranks.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write what each rank did in some steps to a file for Perfetto; also of a running job."""
    from paceline.observe.rank_activity import read_operations
    from paceline.observe.step_trace import FOLDER, merge_spans, read_spans
    from paceline.report.run_files import resolve_run_folder

    folder = resolve_run_folder(run)
    wanted = None if steps is None else _parse(steps)
    ranks = read_spans(folder)
    present = [one for one in read_operations(folder) if one.alive is not False]
    if wanted is not None and not _has_steps(ranks, wanted):
        if not present:
            raise _not_recorded(folder, ranks, wanted)
        ranks = _record(folder, present, wanted, max_spans, deadline)
    recorded = [rank for rank in ranks if not rank.error]
    if not recorded:
        raise _not_recorded(folder, ranks, wanted)
    end = max(rank.end for rank in recorded)
    output = to or folder / FOLDER / f"steps-{recorded[0].first}-{end}.json.gz"
    summary = merge_spans(recorded, output)
    if as_json:
        print_json(_as_json(recorded, output, summary))
    else:
        _print_summary(ranks, recorded, output, summary, wanted)


def _parse(text: str) -> tuple[int, int]:
    from paceline.recipe.tables import parse_step_range

    try:
        return parse_step_range(text)
    except ValueError as error:
        raise DataError(
            f"--steps {text}: expected the first step and the one after the last, counted from 0",
            next_step='as in "--steps 10:13", which is steps 10, 11 and 12',
        ) from error


def _has_steps(ranks: Sequence[RankSpans], wanted: tuple[int, int]) -> bool:
    """Return whether all ranks have recorded these steps."""
    has_all = len(ranks) > 0 and len(ranks) == ranks[0].num_ranks
    return has_all and all((rank.first, rank.end) == wanted and not rank.error for rank in ranks)


def _not_recorded(folder: Path, ranks: Sequence[RankSpans], wanted: tuple[int, int] | None) -> DataError:
    errors = [f"rank {rank.rank}: {rank.error}" for rank in ranks if rank.error]
    if errors:
        return DataError(
            f"no rank has recorded the steps: {errors[0]}",
            next_step="choose steps that the run has yet to take",
        )
    found = f"it has spans of steps {ranks[0].first}:{ranks[0].end}" if ranks else "it has no spans"
    missing = "" if wanted is None else f" of steps {wanted[0]}:{wanted[1]}"
    first, end = wanted or (10, 13)
    return DataError(
        f"'{folder}' is not running, and {found}, not{missing}"
        if ranks
        else f"'{folder}' has no spans{missing}",
        next_step=f"ask while it runs: paceline trace {folder} --steps {first}:{end}; or train with"
        f" --set log.trace={first}:{end}",
    )


def _record(
    folder: Path,
    present: Sequence[RankOperation],
    wanted: tuple[int, int],
    max_spans: int | None,
    deadline: float,
) -> list[RankSpans]:
    """Ask the ranks of a running job for the steps, and return their spans.

    Raises:
        DataError: they have taken these steps, or never will.
        DeadlineError: a rank has not taken them in time; says what it does.
    """
    from paceline.observe.file_writing import explain_os_errors
    from paceline.observe.step_trace import TraceRequest, new_request

    first, num_steps, num_ranks = wanted[0], present[0].num_steps, present[0].num_ranks
    step = max(one.step for one in present)
    if first >= num_steps:
        raise DataError(
            f"--steps {first}:{wanted[1]}: the run has {format_count(num_steps, 'step')}, the last is"
            f" {num_steps - 1}",
            next_step=f"choose steps from {step + 1} to {num_steps - 1}",
        )
    if first <= step:
        raise _too_late(first, wanted[1], step, num_steps)
    request = new_request(*wanted, num_ranks, max_spans)
    with explain_os_errors(folder):
        request.write(folder)
    print_plain(f"waiting for step {wanted[1] - 1}; the run is at step {step} of {num_steps}", error_output())
    try:
        return _wait(folder, request, num_ranks, deadline)
    finally:
        TraceRequest.withdraw(folder)


def _too_late(first: int, end: int, step: int, num_steps: int) -> DataError:
    return DataError(
        f"--steps {first}:{end}: the run is at step {step} already",
        next_step="choose steps that it takes in two seconds or more"
        + (f", before {num_steps}" if step + 1 < num_steps else "; it is at its last step")
        + "; or train with --set log.trace=10:13",
    )


def _wait(folder: Path, request: TraceRequest, num_ranks: int, deadline: float) -> list[RankSpans]:
    """Return the spans of all ranks, or of those that have written theirs when the others have left."""
    from paceline.observe.rank_activity import read_operations
    from paceline.observe.step_trace import read_spans

    give_up, leave = time.monotonic() + deadline, math.inf
    while True:
        ranks = [rank for rank in read_spans(folder) if rank.key == request.key]
        if len(ranks) == num_ranks:
            return ranks
        missing = {*range(num_ranks)} - {rank.rank for rank in ranks}
        waiting = [one for one in read_operations(folder) if one.rank in missing and one.alive is not False]
        now = time.monotonic()
        leave = math.inf if waiting else min(leave, now + _LEAVING_SECONDS)
        if now >= leave:
            if ranks:
                return ranks
            raise DataError(
                f"the run has ended before step {request.end - 1} was recorded",
                next_step="paceline runs shows how it has ended",
            )
        if now >= give_up:
            raise _late_ranks(waiting, deadline)
        time.sleep(_LOOK_SECONDS)


def _late_ranks(waiting: Sequence[RankOperation], deadline: float) -> DeadlineError:
    from paceline.report.number_format import format_duration

    doing = [
        f"rank {one.rank}: {one.text}, for {format_duration(time.time() - one.since)}" for one in waiting
    ]
    return DeadlineError(
        f"{format_count(len(waiting), 'rank')} did not write spans within {deadline:g} s;"
        f" {'; '.join(doing[:8])}",
        next_step="raise --deadline if the steps are yet to come; a rank that stays in one operation hangs",
    )


def _as_json(ranks: Sequence[RankSpans], output: Path, summary: TraceSummary) -> dict[str, Any]:
    uncertain = [clock.uncertainty for clock in summary.alignments]
    return {
        "file": str(output),
        "steps": [ranks[0].first, max(rank.end for rank in ranks)],
        "ranks": [rank.rank for rank in ranks],
        "spans": summary.num_spans,
        "dropped": summary.num_dropped,
        "bytes": summary.num_bytes,
        "clock_offset_seconds": [clock.offset for clock in summary.alignments],
        "clock_uncertainty_seconds": [value if math.isfinite(value) else None for value in uncertain],
    }


def _print_summary(
    ranks: Sequence[RankSpans],
    recorded: Sequence[RankSpans],
    output: Path,
    summary: TraceSummary,
    wanted: tuple[int, int] | None,
) -> None:
    from paceline.report.number_format import format_bytes, format_duration

    first, end = recorded[0].first, max(rank.end for rank in recorded)
    print_plain(
        f"{output}: {format_count(summary.num_spans, 'span')} of {format_count(len(recorded), 'rank')}, steps"
        f" {first} to {end - 1}, {format_bytes(summary.num_bytes)}"
    )
    if wanted is not None and end < wanted[1]:
        print_plain(f"the run has ended after step {end - 1}")
    for rank in ranks:
        if rank.error:
            print_plain(f"rank {rank.rank} is missing: {rank.error}")
    if len(ranks) < ranks[0].num_ranks:
        print_plain(f"{ranks[0].num_ranks - len(ranks)} of {ranks[0].num_ranks} ranks have written nothing")
    if summary.num_dropped:
        print_plain(f"dropped: {format_count(summary.num_dropped, 'span')} beyond the limits")
    uncertainty = max(clock.uncertainty for clock in summary.alignments)
    if uncertainty == 0:
        print_plain("clocks: all ranks have the clock of one host")
    elif math.isfinite(uncertainty):
        print_plain(
            f"clocks: aligned to within {format_duration(uncertainty)} by the collectives of all ranks"
        )
    else:
        print_plain(
            "clocks: as the hosts have them; the steps have no collective of all ranks to align them by"
        )
    print_plain("open it in Perfetto, or at chrome://tracing")
