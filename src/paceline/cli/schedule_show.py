"""`paceline schedule show`: print the order in which the stages of a pipeline work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import print_plain
from paceline.errors import format_count

_Stages = Annotated[int, typer.Option("--stages", min=1, help="Number of pipeline stages, one on each rank.")]
_Micro = Annotated[int, typer.Option("--micro", min=1, help="Micro-batches per step on each rank.")]
_Rechunk = Annotated[
    str,
    typer.Option("--rechunk", help="Parts into which each stage divides a micro-batch, for example 1,1,2,4."),
]
_Svg = Annotated[Path | None, typer.Option("--svg", help="Write an SVG picture to this file.")]
_Csv = Annotated[
    Path | None, typer.Option("--csv", help="Write a table to this file, for schedule=FILE.csv.")
]


def show(
    name: Annotated[str, typer.Argument(help="gpipe, 1f1b, interleaved:V, zero-bubble or FILE.csv.")],
    stages: _Stages = 4,
    micro: _Micro = 8,
    rechunk: _Rechunk = "",
    picture: _Svg = None,
    rows: _Csv = None,
) -> None:
    """Check a pipeline schedule, and print it with its bubble and the micro-batches in flight.

    A forward takes 1 unit of time, a backward 2, and each half of a split backward 1. F is a forward, B a
    backward, and W the weight gradients that a B has postponed. A letter after a number is a chunk after the
    first one; a number after a dot is a part of a micro-batch.
    """
    from paceline.parallel.pipeline.strategy_schedule import make_schedule
    from paceline.pipeline_schedule.schedule_formats import (
        describe_timeline,
        render_svg,
        render_text,
        write_schedule_csv,
    )
    from paceline.pipeline_schedule.schedule_table import simulate_schedule
    from paceline.recipe.strategy import Strategy

    strategy = Strategy(pipeline=stages, schedule=name, rechunk=rechunk)
    proof = simulate_schedule(make_schedule(strategy)(stages, micro), micro)
    title = f"{name}: {format_count(stages, 'stage')}, {format_count(micro, 'micro-batch')}"
    for line in (
        f"{title} ({strategy.schedule_spec.summary})",
        *render_text(proof),
        *describe_timeline(proof),
    ):
        print_plain(line)
    if picture is not None:
        picture.write_text(render_svg(proof, title), encoding="utf-8")
    if rows is not None:
        write_schedule_csv(proof, rows)
