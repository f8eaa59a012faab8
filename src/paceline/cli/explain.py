"""`paceline explain`: what all ranks of a running job do, and which of them the others wait for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.common_options import AsJson
from paceline.cli.console import print_json, print_plain
from paceline.errors import DataError

if TYPE_CHECKING:
    from paceline.launch.hang_explainer import RankSituation

_SAMPLE_SECONDS = 1.0


def explain(
    run: Annotated[Path, typer.Argument(help="Run folder.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Compare what all ranks of a running job do, and say which rank the others wait for, and where."""
    from paceline.launch.hang_explainer import explain_hang
    from paceline.launch.hang_monitor import describe_ranks, measure_cpu_seconds, ranks_that_left
    from paceline.observe.rank_activity import read_operations
    from paceline.report.run_files import resolve_run_folder

    folder = resolve_run_folder(run)
    before = read_operations(folder)
    if not any(one.alive is not False for one in before):
        raise DataError(
            f"no rank of '{folder}' trains now",
            next_step="ask while it runs; paceline runs shows how it has ended",
        )
    cpu_seconds, began = measure_cpu_seconds(before), time.monotonic()
    time.sleep(_SAMPLE_SECONDS)
    operations = read_operations(folder) or before
    moved = {one.rank: one.number for one in operations} != {one.rank: one.number for one in before}
    situations = describe_ranks(operations, cpu_seconds, time.monotonic() - began)
    explanation = explain_hang(situations, ranks_that_left(operations))
    if as_json:
        ranks = [{**vars(one), "calls": {g: vars(c) for g, c in one.calls.items()}} for one in situations]
        result = None if moved else vars(explanation)
        print_json({"run": str(folder), "moves": moved, "explanation": result, "ranks": ranks})
        return
    for one in situations:
        print_plain(_line_of(one))
    if moved:
        print_plain("the job moves: ranks have entered other operations within the last second")
    else:
        seconds = min(one.seconds for one in situations)
        print_plain(f"nothing has moved for {seconds:.1f} s: {explanation.text}")


def _line_of(one: RankSituation) -> str:
    words = "" if one.process == "running" else f" [{one.process}]"
    call = f" (call {one.call} of group '{one.group}', {one.num_bytes:,} bytes)" if one.call else ""
    where = f", at {one.position}" if one.position else ""
    return f"rank {one.rank}{words}: step {one.step}, {one.operation}{call} for {one.seconds:.1f} s{where}"
