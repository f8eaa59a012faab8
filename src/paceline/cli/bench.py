"""`paceline bench`: what it takes. What it does is loaded when it runs, so that its help costs little.

`paceline bench`: measure what the planner has to know.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from paceline.cli import common_options
from paceline.cli.console import output
from paceline.cli.relaunch import relaunch, worker_cluster
from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.launch.worker_guard import guard

if TYPE_CHECKING:
    from paceline.recipe.recipe import Recipe

Routes = Annotated[str, typer.Option("--routes", help="Words of routes, by comma; default: all.")]
Codecs = Annotated[str, typer.Option("--codecs", help="Words of codecs, by comma; default: some.")]
Sizes = Annotated[str, typer.Option("--sizes", help="Bytes of float32 tensors, by comma.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Page = Annotated[Path | None, typer.Option("--page", help="Write a page with a plot to this file.")]
TaskRecipe = Annotated[
    Path | None, typer.Option("--recipe", help="Compare codecs on a task: bytes, losses over seeds, steps.")
]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Runs of each codec, with --recipe.")]
Deadline = Annotated[float, typer.Option("--deadline", min=1, help="Seconds that any wait may take.")]


def link(
    processes: common_options.Processes = None,
    nodes: common_options.Nodes = 1,
    node_rank: common_options.NodeRank = 0,
    rendezvous: common_options.Rendezvous = None,
    token_file: common_options.TokenFile = "",
    insecure: common_options.Insecure = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the link profile to this file.")] = None,
    deadline: Deadline = 120.0,
) -> None:
    """Measure latency and bandwidth of every pair of ranks, and of the all-reduce of all (CPU, Gloo)."""

    run_link(NodeArgs(processes, nodes, node_rank, rendezvous, token_file, insecure), out, deadline)


def comm(
    processes: common_options.Processes = None,
    nodes: common_options.Nodes = 1,
    node_rank: common_options.NodeRank = 0,
    rendezvous: common_options.Rendezvous = None,
    token_file: common_options.TokenFile = "",
    insecure: common_options.Insecure = False,
    routes: Routes = "",
    codecs: Codecs = "",
    sizes: Sizes = "",
    as_json: AsJson = False,
    page: Page = None,
    recipe: TaskRecipe = None,
    settings: common_options.Settings = None,
    seeds: Seeds = 5,
    deadline: Deadline = 120.0,
) -> None:
    """Measure the all-reduce by every route and codec (CPU); with --recipe what codecs do to a task."""

    where = NodeArgs(processes, nodes, node_rank, rendezvous, token_file, insecure)
    told = (parse_selection(routes, codecs, sizes), recipe, settings, seeds, page, deadline)
    run_comm(where, *told, as_json=as_json)


class NodeArgs(NamedTuple):
    """Where the processes are, in the words of the command."""

    processes: int | None
    nodes: int
    node_rank: int
    rendezvous: str | None
    token_file: str
    insecure: bool


class CommSelection(NamedTuple):
    """What is measured; empty: the default."""

    routes: list[str]
    codecs: list[str]
    sizes: list[str]


def parse_selection(*texts: str) -> CommSelection:
    """Routes, codecs and sizes, each by comma."""
    return CommSelection(*([word for word in text.split(",") if word] for text in texts))


def run_link(where: NodeArgs, out: Path | None, deadline: float) -> None:
    """See `paceline bench link --help`."""
    cluster = worker_cluster()
    if cluster is not None:
        _measure_links(cluster, out, deadline)
        return
    _launch_ranks(where, "a link has two ends", deadline)


def run_comm(
    where: NodeArgs,
    asked: CommSelection,
    recipe: Path | None,
    settings: list[str] | None,
    seeds: int,
    page: Path | None,
    deadline: float,
    *,
    as_json: bool,
) -> None:
    """See `paceline bench comm --help`."""
    cluster = worker_cluster()
    if cluster is None:
        _launch_ranks(where, "ranks sum with each other", deadline)
    elif recipe is not None:
        _report_task(
            cluster, common_options.read_recipe(recipe, settings, None), asked.codecs, seeds, as_json
        )
    else:
        _measure_comm(cluster, asked, as_json, page, deadline)


def _launch_ranks(where: NodeArgs, why_two: str, deadline: float) -> None:
    """Run this command in every process of this node, and leave with its exit code."""
    count = where.processes or (1 if where.nodes > 1 else 2)
    if count * where.nodes < 2:
        raise StrategyError(why_two, next_step="-n 2, or --nodes 2")
    token = common_options.read_token(where.token_file, where.insecure, where.nodes)
    placement = common_options.JobPlacement(count, where.nodes, where.node_rank, where.rendezvous, token)
    sys.exit(relaunch(placement, 1, stuck_seconds=deadline).exit_code)


def _measure_comm(
    cluster: Cluster, asked: CommSelection, as_json: bool, page: Path | None, deadline: float
) -> None:
    with guard(cluster):
        from paceline.comm.net import Net
        from paceline.tuning.comm_benchmark import (
            CODECS,
            SIZES,
            default_routes,
            measure_comm,
            render_comm_page,
            render_comm_table,
        )

        if not all(size.isdecimal() and int(size) >= 4 for size in asked.sizes):
            raise StrategyError("--sizes takes bytes, 4 or more", next_step="as in --sizes 1024,1048576")
        cluster = cluster.connect("cpu", deadline)
        rows = measure_comm(
            cluster,
            Net(deadline),
            asked.routes or default_routes(),
            asked.codecs or CODECS,
            [int(size) for size in asked.sizes] or SIZES,
        )
        if cluster.global_rank == 0:
            console = output()
            lines = (
                [json.dumps([row.record() for row in rows], indent=1)]
                if as_json
                else [*render_comm_table(rows)]
            )
            for line in lines:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            if page is not None:
                page.write_text(render_comm_page(rows, f"All-reduce of {cluster.world_size} ranks"), "utf-8")
        cluster.disconnect()


def _report_task(cluster: Cluster, recipe: Recipe, codecs: list[str], seeds: int, as_json: bool) -> None:
    with guard(cluster):
        from paceline.session.joining import connected
        from paceline.studies.codec_report import CODECS, render_codec_table, report_codecs

        console = output()

        def show(text: str) -> None:
            if cluster.global_rank == 0:
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        with connected(recipe, cluster) as (found, _):
            several = range(recipe.seed, recipe.seed + seeds)
            say = (lambda text: None) if as_json else show
            rows = report_codecs(recipe, found, codecs or CODECS, several, say=say)
        lines = (
            [json.dumps([row.record() for row in rows], indent=1)] if as_json else [*render_codec_table(rows)]
        )
        for line in lines:
            show(line)


def _measure_links(cluster: Cluster, out: Path | None, deadline: float) -> None:
    with guard(cluster):
        from paceline.comm.link_benchmark import measure_links, render_link_profile
        from paceline.comm.net import Net
        from paceline.job.mesh import Mesh

        cluster = cluster.connect("cpu", deadline)
        world = Mesh.build(cluster, {"replica": cluster.world_size}).world
        profile = measure_links(Net(deadline), world, socket.gethostname())
        if cluster.global_rank == 0:
            console = output()
            for line in render_link_profile(profile):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            if out is not None:
                profile.save(out)
                console.print(f"link profile: {out}", markup=False, highlight=False, soft_wrap=True)
        cluster.disconnect()
