"""`paceline bench`: measure what the planner has to know."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from paceline.cli import options
from paceline.cli.console import output
from paceline.cli.start import launch_again, worker_cluster
from paceline.cluster import Cluster
from paceline.errors import StrategyError
from paceline.launch import guard

if TYPE_CHECKING:
    from paceline.recipe import Recipe

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
    cluster = worker_cluster()
    if cluster is not None:
        _work(cluster, out, deadline)
        return
    key = token_file, insecure
    _start(processes, nodes, node_rank, rendezvous, key, "a link has two ends", deadline)


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
    cluster = worker_cluster()
    if cluster is None:
        key = token_file, insecure
        _start(processes, nodes, node_rank, rendezvous, key, "ranks sum with each other", deadline)
    elif recipe is not None:
        _report_task(cluster, options.read_recipe(recipe, settings, None), _words(codecs), seeds, as_json)
    else:
        _measure_comm(cluster, _Asked(_words(routes), _words(codecs), _words(sizes)), as_json, page, deadline)


def _start(
    processes: int | None,
    nodes: int,
    node_rank: int,
    rendezvous: str | None,
    key: tuple[str, bool],
    why_two: str,
    deadline: float,
) -> None:
    """Run this command in every process of this node, and leave with its exit code."""
    count = processes or (1 if nodes > 1 else 2)
    if count * nodes < 2:
        raise StrategyError(why_two, next_step="-n 2, or --nodes 2")
    token = options.read_token(*key, nodes)
    placement = options.Placement(count, nodes, node_rank, rendezvous, token)
    sys.exit(launch_again(placement, 1, stuck_seconds=deadline).exit_code)


class _Asked(NamedTuple):
    """What is measured; empty: the default."""

    routes: list[str]
    codecs: list[str]
    sizes: list[str]


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _measure_comm(cluster: Cluster, asked: _Asked, as_json: bool, page: Path | None, deadline: float) -> None:
    with guard(cluster):
        from paceline.comm import Net
        from paceline.training.comm_benchmark import CODECS, SIZES, default_routes, measure_comm, render
        from paceline.training.comm_page import render_page

        if not all(size.isdecimal() and int(size) >= 4 for size in asked.sizes):
            raise StrategyError("--sizes takes bytes, 4 or more", next_step="as in --sizes 1024,1048576")
        cluster.connect("cpu", deadline)
        rows = measure_comm(
            cluster,
            Net(deadline),
            asked.routes or default_routes(),
            asked.codecs or CODECS,
            [int(size) for size in asked.sizes] or SIZES,
        )
        if cluster.global_rank == 0:
            console = output()
            lines = [json.dumps([row.record() for row in rows], indent=1)] if as_json else [*render(rows)]
            for line in lines:
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            if page is not None:
                page.write_text(render_page(rows, f"All-reduce of {cluster.world_size} ranks"), "utf-8")
        cluster.disconnect()


def _report_task(cluster: Cluster, recipe: Recipe, codecs: list[str], seeds: int, as_json: bool) -> None:
    with guard(cluster):
        from paceline.training.codec_report import CODECS, render, report_codecs
        from paceline.training.joining import connected

        console = output()

        def show(text: str) -> None:
            if cluster.global_rank == 0:
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        with connected(recipe, cluster) as (found, _):
            several = range(recipe.seed, recipe.seed + seeds)
            say = (lambda text: None) if as_json else show
            rows = report_codecs(recipe, found, codecs or CODECS, several, say=say)
        lines = [json.dumps([row.record() for row in rows], indent=1)] if as_json else [*render(rows)]
        for line in lines:
            show(line)


def _work(cluster: Cluster, out: Path | None, deadline: float) -> None:
    with guard(cluster):
        from paceline.comm import Net
        from paceline.comm.link_benchmark import measure_links, render
        from paceline.mesh import Mesh

        cluster = cluster.connect("cpu", deadline)
        world = Mesh.build(cluster, {"replica": cluster.world_size}).world
        profile = measure_links(Net(deadline), world, socket.gethostname())
        if cluster.global_rank == 0:
            console = output()
            for line in render(profile):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            if out is not None:
                profile.save(out)
                console.print(f"link profile: {out}", markup=False, highlight=False, soft_wrap=True)
        cluster.disconnect()
