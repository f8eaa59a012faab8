"""`paceline schedule`: look at the order in which the stages of a pipeline work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import output

_Stages = Annotated[int, typer.Option("--stages", min=1, help="Stages of the pipeline, one on each rank.")]
_Micro = Annotated[int, typer.Option("--micro", min=1, help="Micro-batches of a step on each rank.")]
_Rechunk = Annotated[
    str,
    typer.Option("--rechunk", help="By stage, in how many parts it runs each micro-batch, as in 1,1,2,4."),
]
_Svg = Annotated[Path | None, typer.Option("--svg", help="Write a picture to this file.")]
_Csv = Annotated[Path | None, typer.Option("--csv", help="Write its rows, which schedule=FILE.csv reads.")]


def show(
    name: Annotated[str, typer.Argument(help="gpipe, 1f1b, interleaved:V, zero-bubble or FILE.csv.")],
    stages: _Stages = 4,
    micro: _Micro = 8,
    rechunk: _Rechunk = "",
    picture: _Svg = None,
    rows: _Csv = None,
) -> None:
    """Prove a schedule, and print it with its bubble and the micro-batches that each stage has in flight.

    A forward counts 1, a backward 2, each half of a split one 1; F is a forward, B a backward, W the
    gradients of weights that a B has put off. Letters behind a number are chunks after the first, and
    numbers behind a dot parts of a micro-batch.
    """
    from paceline.parallel.pipeline.strategy_schedule import make_schedule
    from paceline.pipeline_schedule.schedule_formats import (
        describe_timeline,
        render_svg,
        render_text,
        write_schedule_csv,
    )
    from paceline.pipeline_schedule.schedule_table import simulate_schedule
    from paceline.recipe.registry.word_spec import ScheduleSpec, find_spec
    from paceline.recipe.strategy import Strategy

    strategy = Strategy(pipeline=stages, schedule=name, rechunk=rechunk)
    spec = find_spec(ScheduleSpec, strategy.schedule.partition(":")[0])
    proof = simulate_schedule(make_schedule(strategy)(stages, micro), micro)
    console = output()
    title = f"{name}: {stages} stages, {micro} micro-batches"
    summary = spec.summary if spec is not None else ""
    for line in (f"{title} ({summary})", *render_text(proof), *describe_timeline(proof)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if picture is not None:
        picture.write_text(render_svg(proof, title), encoding="utf-8")
    if rows is not None:
        write_schedule_csv(proof, rows)
