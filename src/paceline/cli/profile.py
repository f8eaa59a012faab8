"""`paceline profile`: where the time of a running job goes, by operation and by Python function."""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common_options import AsJson
from paceline.cli.console import error_output, output, print_json, print_plain
from paceline.errors import DataError, DeadlineError, format_count

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.report.run_profile import ProfileRequest, RankProfile
    from paceline.report.run_reader import RecordedRun

_LOOK_SECONDS = 0.2
_AHEAD_SECONDS = 2.5  # ranks look once a second
_USUAL_STEPS = 20
_MIN_SAMPLES = 100
_NUM_OPERATIONS, _NUM_FUNCTIONS = 15, 8
_MAX_COLUMNS = 8  # of ranks
_NUMBER_WIDTH, _MIN_NAME_WIDTH = 8, 20


def profile(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    steps: Annotated[int, typer.Option("--steps", min=1, max=10_000, help="Steps to profile.")] = 10,
    rank: Annotated[str, typer.Option("--rank", help="Global rank to profile, or all.")] = "all",
    flame_graph: Annotated[
        Path | None,
        typer.Option(
            "--output", help="SVG file of the flame graph. Default: profile/flame.svg.", show_default=False
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=1.0,
            help="Seconds to wait for the ranks. Default: 60, and ten times what the steps usually take.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Profile some steps of a running job: a table of operations, and a flame graph of Python functions."""
    from paceline.report.run_files import resolve_run_folder
    from paceline.report.run_profile import FLAME_GRAPH, FOLDER, read_rank_profiles, render_flame_graph
    from paceline.report.run_reader import read_run

    folder = resolve_run_folder(run)
    recorded = read_run(folder)
    ranks = _chosen_ranks(rank, recorded)
    if recorded.status == "running":
        profiles = _request_profiles(recorded, steps, ranks, timeout)
    else:
        newest = read_rank_profiles(folder)
        profiles = [found for found in newest if not ranks or found.rank in ranks]
        if not profiles:
            raise _no_process_error(recorded)
        print_plain(f"'{folder}' is not running; this is its newest profile", error_output())
    path = flame_graph or folder / FOLDER / FLAME_GRAPH
    _write(path, render_flame_graph(profiles, f"{folder.resolve().name}, {_steps_of(profiles)}"))
    if as_json:
        print_json(_as_json(folder, profiles, path))
    else:
        _print_profile(profiles, path)


def _write(path: Path, text: str) -> None:
    """Write the flame graph.

    Raises:
        DataError: it cannot be written.
    """
    from paceline.observe.file_writing import create_draft

    try:
        with create_draft(path) as file:  # never through a link, as the folder can be that of another user
            file.write(text.encode())
    except OSError as error:
        raise DataError(
            f"cannot write the flame graph: {error.strerror or error}",
            where=str(path),
            next_step="name another file: --output FILE",
        ) from error


def _chosen_ranks(text: str, recorded: RecordedRun) -> tuple[int, ...]:
    """Return the ranks that the user names; empty: all.

    Raises:
        DataError: there is no such rank.
    """
    if text == "all":
        return ()
    if not text.isdecimal() or (recorded.ranks and int(text) >= recorded.ranks):
        raise DataError(
            f"--rank {text}: the run has {format_count(recorded.ranks, 'rank')}",
            next_step=f"choose one from 0 to {max(0, recorded.ranks - 1)}, or all",
        )
    return (int(text),)


def _no_process_error(recorded: RecordedRun) -> DataError:
    if recorded.status == "new":
        return DataError(
            f"'{recorded.folder}' has not begun to train",
            next_step="wait until `paceline top` shows its first step",
        )
    return DataError(
        f"'{recorded.folder}' is not running ({recorded.status}), and it has no profile",
        next_step="profile a job that runs, or let the next one do it: --set runtime.profile=10:20",
    )


def _request_profiles(
    recorded: RecordedRun, steps: int, ranks: tuple[int, ...], timeout: float | None
) -> list[RankProfile]:
    """Request the profiles of a running job, and wait for them.

    Raises:
        DataError: another request is waiting, or the job has ended.
        DeadlineError: a rank has not answered.
    """
    from paceline.observe.process_info import process_start_ticks
    from paceline.report.run_profile import ProfileRequest, read_request, remove_request, write_request
    from paceline.report.run_reader import is_run_alive, to_float

    waiting = read_request(recorded.folder)
    if waiting is not None and is_run_alive(waiting.process):
        raise DataError(
            f"process {waiting.process.get('pid')} is profiling '{recorded.folder}'",
            next_step="wait until it has ended",
        )
    usual = sorted(to_float(step["seconds"]) for step in recorded.steps[-_USUAL_STEPS:])
    step_seconds = usual[len(usual) // 2] if usual else 0.0
    pid = os.getpid()
    request = ProfileRequest(
        secrets.token_hex(8),
        recorded.done + (math.ceil(_AHEAD_SECONDS / step_seconds) if step_seconds > 0 else 0),
        steps,
        ranks,
        {"host": socket.gethostname(), "pid": pid, "process_start": process_start_ticks(pid)},
    )
    limit = timeout or 60.0 + 10 * steps * step_seconds
    write_request(recorded.folder, request)
    try:
        return _await_profiles(recorded, request, limit)
    finally:
        remove_request(recorded.folder, request)


def _await_profiles(recorded: RecordedRun, request: ProfileRequest, limit: float) -> list[RankProfile]:
    from paceline.report.run_profile import read_rank_profiles
    from paceline.report.run_reader import is_run_alive

    wanted = set(request.ranks or range(recorded.ranks))
    expires = time.monotonic() + limit
    while True:
        # Looked at before the answers, which a job that ends writes before.
        alive = is_run_alive(recorded.start)
        found = [one for one in read_rank_profiles(recorded.folder) if one.request_id == request.id]
        missing = sorted(wanted - {one.rank for one in found})
        if not missing:
            return found
        names = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
        if alive is False:
            raise DataError(
                f"'{recorded.folder}' has ended before {names} wrote a profile",
                next_step="let the next job do it: --set runtime.profile=10:20",
            )
        if time.monotonic() >= expires:
            where = f" on host {recorded.start.get('host')}" if alive is None else ""
            raise DeadlineError(
                f"{names} of the run{where} did not answer within {limit:g} s",
                next_step=_late_step(recorded, alive, bool(found)),
            )
        time.sleep(_LOOK_SECONDS)


def _late_step(recorded: RecordedRun, alive: bool | None, has_others: bool) -> str:
    if alive is None and not has_others:
        return (
            "the run may have ended, or its host may not share this folder: call this command there, or"
            " raise --timeout if a step takes longer"
        )
    others = "; --rank N profiles one that answers" if has_others else ""
    return (
        "raise --timeout if a step takes longer; `paceline top` shows whether steps go on, and py-spy dump"
        f" --pid PID where a rank hangs{others}"
    )


def _steps_of(profiles: Sequence[RankProfile]) -> str:
    first, end = min(one.first_step for one in profiles), max(one.end_step for one in profiles)
    return f"steps {first} to {end - 1}" if end - 1 > first else f"step {first}"


def _as_json(folder: Path, profiles: Sequence[RankProfile], path: Path) -> dict[str, Any]:
    from paceline.report.run_profile import sum_functions, sum_operations

    def tables(some: Sequence[RankProfile]) -> dict[str, Any]:
        functions = sum_functions(some)
        return {
            "operations": [operation._asdict() for operation in sum_operations(some)],
            "functions": [{"name": name, "self_seconds": seconds} for name, seconds in functions],
        }

    ranks = []
    for one in profiles:
        names = ("rank", "first_step", "end_step", "seconds", "num_samples")
        ranks.append({**{name: getattr(one, name) for name in names}, **tables([one])})
    return {"run": str(folder), "flame_graph": str(path), "ranks": ranks, **tables(profiles)}


def _print_profile(profiles: Sequence[RankProfile], path: Path) -> None:
    from paceline.report.number_format import format_duration, format_percent
    from paceline.report.run_profile import sum_functions

    console = output()
    seconds = sum(one.seconds for one in profiles) / len(profiles)
    ranks = format_count(len(profiles), "rank")
    print_plain(f"{_steps_of(profiles)} of {ranks}, {format_duration(seconds)}")
    console.print(_operation_table(profiles, console.width))
    functions = sum_functions(profiles)
    total = sum(own for _, own in functions)
    print_plain("Python functions, without those that they call:")
    for name, own in functions[:_NUM_FUNCTIONS]:
        print_plain(f"  {format_percent(own / total):>6}  {format_duration(own):>8}  {name}")
    num_samples = min(one.num_samples for one in profiles)
    if num_samples < _MIN_SAMPLES:
        print_plain(
            f"warning: only {format_count(num_samples, 'sample')} of Python functions; raise --steps",
            error_output(),
        )
    print_plain(f"flame graph: {path}")


def _operation_table(profiles: Sequence[RankProfile], width: int) -> Table:
    """Return the table of the largest operations, summed over ranks and of each rank.

    Args:
        width: of the terminal; a narrow one cuts the names of operations, and never the numbers.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from paceline.observe.terminal_text import escape_controls
    from paceline.report.number_format import format_duration, format_percent
    from paceline.report.run_profile import sum_operations

    operations = sum_operations(profiles)
    cpu = sum(row.self_cpu_seconds for row in operations)
    cuda = sum(row.self_cuda_seconds for row in operations)
    shown = profiles if 1 < len(profiles) <= _MAX_COLUMNS else ()
    by_rank = [{row.name: row.self_cpu_seconds for row in one.operations} for one in shown]
    heads = ("self CPU", "share", *(("CUDA", "share") if cuda else ()), "calls")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    heads = (*heads, *(f"rank {one.rank}" for one in shown))
    name_width = max(_MIN_NAME_WIDTH, width - (_NUMBER_WIDTH + 2) * len(heads) - 2)
    table.add_column("operation", overflow="ellipsis", no_wrap=True, max_width=name_width)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True, min_width=_NUMBER_WIDTH)
    for row in operations[:_NUM_OPERATIONS]:
        on_gpu = format_duration(row.self_cuda_seconds), format_percent(row.self_cuda_seconds / (cuda or 1.0))
        table.add_row(
            Text(escape_controls(row.name)),
            format_duration(row.self_cpu_seconds),
            format_percent(row.self_cpu_seconds / (cpu or 1.0)),
            *(on_gpu if cuda else ()),
            f"{row.calls:,}",
            *(format_duration(seconds.get(row.name, 0.0)) for seconds in by_rank),
        )
    return table
