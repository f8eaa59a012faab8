"""`paceline bench`: measure what the planner has to know."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.cli import options
from paceline.cli.console import output
from paceline.cli.start import launch_again, worker_cluster
from paceline.cluster import Cluster
from paceline.errors import StrategyError
from paceline.launch import guard

if TYPE_CHECKING:
    from paceline.recipe import Recipe


class Nodes(NamedTuple):
    """Where the processes are, in the words of the command."""

    processes: int | None
    nodes: int
    node_rank: int
    rendezvous: str | None
    token_file: str
    insecure: bool


class Asked(NamedTuple):
    """What is measured; empty: the default."""

    routes: list[str]
    codecs: list[str]
    sizes: list[str]


def asked_of(*texts: str) -> Asked:
    """Routes, codecs and sizes, each by comma."""
    return Asked(*([word for word in text.split(",") if word] for text in texts))


def run_link(where: Nodes, out: Path | None, deadline: float) -> None:
    """See `paceline bench link --help`."""
    cluster = worker_cluster()
    if cluster is not None:
        _work(cluster, out, deadline)
        return
    _start(where, "a link has two ends", deadline)


def run_comm(
    where: Nodes,
    asked: Asked,
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
        _start(where, "ranks sum with each other", deadline)
    elif recipe is not None:
        _report_task(cluster, options.read_recipe(recipe, settings, None), asked.codecs, seeds, as_json)
    else:
        _measure_comm(cluster, asked, as_json, page, deadline)


def _start(where: Nodes, why_two: str, deadline: float) -> None:
    """Run this command in every process of this node, and leave with its exit code."""
    count = where.processes or (1 if where.nodes > 1 else 2)
    if count * where.nodes < 2:
        raise StrategyError(why_two, next_step="-n 2, or --nodes 2")
    token = options.read_token(where.token_file, where.insecure, where.nodes)
    placement = options.Placement(count, where.nodes, where.node_rank, where.rendezvous, token)
    sys.exit(launch_again(placement, 1, stuck_seconds=deadline).exit_code)


def _measure_comm(cluster: Cluster, asked: Asked, as_json: bool, page: Path | None, deadline: float) -> None:
    with guard(cluster):
        from paceline.comm import Net
        from paceline.training.comm_benchmark import CODECS, SIZES, default_routes, measure_comm, render
        from paceline.training.comm_page import render_page

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
