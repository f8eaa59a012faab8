"""`paceline bench`: what it takes. What it does is loaded when it runs, so that its help costs little."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options

Routes = Annotated[str, typer.Option("--routes", help="Words of routes, by comma; default: all.")]
Codecs = Annotated[str, typer.Option("--codecs", help="Words of codecs, by comma; default: some.")]
Sizes = Annotated[str, typer.Option("--sizes", help="Bytes of float32 tensors, by comma.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Page = Annotated[Path | None, typer.Option("--page", help="Write a page with a plot to this file.")]
OfTask = Annotated[
    Path | None, typer.Option("--recipe", help="Compare codecs on a task: bytes, losses over seeds, steps.")
]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Runs of each codec, with --recipe.")]
Deadline = Annotated[float, typer.Option("--deadline", min=1, help="Seconds that any wait may take.")]


def link(
    processes: options.Processes = None,
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    rendezvous: options.Rendezvous = None,
    token_file: options.TokenFile = "",
    insecure: options.Insecure = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the link profile to this file.")] = None,
    deadline: Deadline = 120.0,
) -> None:
    """Measure latency and bandwidth of every pair of ranks, and of the all-reduce of all (CPU, Gloo)."""
    from paceline.cli.bench_job import Nodes, run_link

    run_link(Nodes(processes, nodes, node_rank, rendezvous, token_file, insecure), out, deadline)


def comm(
    processes: options.Processes = None,
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    rendezvous: options.Rendezvous = None,
    token_file: options.TokenFile = "",
    insecure: options.Insecure = False,
    routes: Routes = "",
    codecs: Codecs = "",
    sizes: Sizes = "",
    as_json: AsJson = False,
    page: Page = None,
    recipe: OfTask = None,
    settings: options.Settings = None,
    seeds: Seeds = 5,
    deadline: Deadline = 120.0,
) -> None:
    """Measure the all-reduce by every route and codec (CPU); with --recipe what codecs do to a task."""
    from paceline.cli.bench_job import Nodes, asked_of, run_comm

    where = Nodes(processes, nodes, node_rank, rendezvous, token_file, insecure)
    told = (asked_of(routes, codecs, sizes), recipe, settings, seeds, page, deadline)
    run_comm(where, *told, as_json=as_json)
