"""`paceline bench`: measure the communication of a job.

The ranks import torch and the benchmarks inside the functions that run them, so that the help stays light.
"""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from paceline.cli import common_options
from paceline.cli.common_options import NodeArgs
from paceline.cli.console import output, print_plain
from paceline.errors import StrategyError

if TYPE_CHECKING:
    from paceline.job.cluster import Cluster
    from paceline.recipe.recipe import Recipe

Routes = Annotated[
    str, typer.Option("--routes", help="Routes to measure, separated by commas. Default: all.")
]
Codecs = Annotated[
    str, typer.Option("--codecs", help="Codecs to measure, separated by commas. Default: a selection.")
]
Sizes = Annotated[
    str, typer.Option("--sizes", help="Sizes of the float32 tensors in bytes, separated by commas.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Page = Annotated[Path | None, typer.Option("--page", help="Write an HTML page with a plot to this file.")]
TaskRecipe = Annotated[
    Path | None,
    typer.Option("--recipe", help="Compare codecs on this task instead: bytes, loss over seeds, steps."),
]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Runs of each codec, with --recipe.")]
InLab = Annotated[
    bool,
    typer.Option(
        "--lab", help="With --recipe: run the steps in the lab, at 1000, 100 and 10 Mbit/s, on two hosts."
    ),
]
Deadline = Annotated[
    float,
    typer.Option("--deadline", min=1, help="Seconds after which a rank that does not answer is an error."),
]


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
    """Measure latency and bandwidth between every pair of ranks, and of an all-reduce (CPU, Gloo)."""
    nodes_of_job = NodeArgs(processes, nodes, node_rank, rendezvous, token_file, insecure)
    run_link(nodes_of_job, out, deadline)


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
    in_lab: InLab = False,
    deadline: Deadline = 120.0,
) -> None:
    """Measure the all-reduce with every route and codec (CPU); with --recipe, compare codecs on a task."""
    nodes_of_job = NodeArgs(processes, nodes, node_rank, rendezvous, token_file, insecure)
    run_comm(
        nodes_of_job,
        CommArgs(
            selection=parse_selection(routes, codecs, sizes),
            recipe=recipe,
            settings=settings,
            seeds=seeds,
            page=page,
            deadline=deadline,
            as_json=as_json,
            in_lab=in_lab,
        ),
    )


class CommSelection(NamedTuple):
    """The routes, codecs and sizes to measure; an empty list stands for the default."""

    routes: list[str]
    codecs: list[str]
    sizes: list[str]


@dataclass(frozen=True)
class CommArgs:
    """The arguments of `paceline bench comm`, apart from where its processes run."""

    selection: CommSelection
    recipe: Path | None
    settings: list[str] | None
    seeds: int
    page: Path | None
    deadline: float
    as_json: bool
    in_lab: bool


def parse_selection(*texts: str) -> CommSelection:
    """Split routes, codecs and sizes at their commas."""
    return CommSelection(*([word for word in text.split(",") if word] for text in texts))


def run_link(nodes: NodeArgs, out: Path | None, deadline: float) -> None:
    """Start the ranks, or be one of them and measure the links."""
    cluster = nodes.worker()
    if cluster is not None:
        _measure_links(cluster, out, deadline)
        return
    _launch_ranks(nodes, "a link connects two ranks, and this job has one", deadline)


def run_comm(nodes: NodeArgs, args: CommArgs) -> None:
    """Start the ranks, or be one of them and measure the all-reduce or compare codecs on a task."""
    cluster = nodes.worker()
    if args.in_lab:
        _report_in_lab(nodes, args)
    elif cluster is None:
        _launch_ranks(nodes, "an all-reduce needs two ranks, and this job has one", args.deadline)
    elif args.recipe is not None:
        recipe = common_options.read_recipe(args.recipe, args.settings, None)
        _report_task(cluster, recipe, args.selection.codecs, args.seeds, args.as_json)
    else:
        _measure_comm(cluster, args)


def _launch_ranks(nodes: NodeArgs, why_two: str, deadline: float) -> None:
    """Run this command in every process of this node, and exit with its exit code."""
    from paceline.cli.relaunch import relaunch

    nodes = nodes.on_engine()
    # The fewest ranks with a link: two on one node, else one on each.
    count = nodes.processes or (1 if nodes.nodes > 1 else 2)
    if count * nodes.nodes < 2:
        raise StrategyError(why_two, next_step="-n 2, or --nodes 2")
    # One thread for each rank, or threads would take the cores that the transfers need.
    sys.exit(relaunch(nodes.placement(count), 1, stuck_seconds=deadline).exit_code)


def _report_in_lab(nodes: NodeArgs, args: CommArgs) -> None:
    """Compare codecs on a task on two hosts of the lab, at three bandwidths."""
    from paceline.studies.codec_lab import compare_codecs_in_lab, render_lab_table

    if args.recipe is None or nodes.nodes > 1:
        raise StrategyError(
            "--lab runs the steps of a task on hosts of this machine",
            next_step="name the task with --recipe, and leave out --nodes",
        )
    command = ["paceline", "bench", "comm", "--json", "--recipe", str(args.recipe.resolve())]
    command += [
        "-n",
        str(nodes.processes or 2),
        "--seeds",
        str(args.seeds),
        "--deadline",
        f"{args.deadline:g}",
    ]
    if args.selection.codecs:
        command += ["--codecs", ",".join(args.selection.codecs)]
    command += [word for setting in args.settings or () for word in ("--set", setting)]
    found = compare_codecs_in_lab(command, 2, (lambda text: None) if args.as_json else print_plain)
    if args.as_json:
        print_plain(json.dumps({f"{bits:.0f}": rows for bits, rows in found.items()}, indent=1))
    for line in () if args.as_json else render_lab_table(found):
        print_plain(line)


def _measure_comm(cluster: Cluster, args: CommArgs) -> None:
    from paceline.launch.worker_guard import guard

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

        routes, codecs, sizes = args.selection
        if not all(size.isdecimal() and int(size) >= 4 for size in sizes):
            raise StrategyError(
                "--sizes expects sizes in bytes, 4 or more", next_step="for example --sizes 1024,1048576"
            )
        cluster = cluster.connect("cpu", args.deadline)
        rows = measure_comm(
            cluster,
            Net(args.deadline),
            routes or default_routes(),
            codecs or CODECS,
            [int(size) for size in sizes] or SIZES,
        )
        if cluster.global_rank == 0:
            as_json = [json.dumps([row.record() for row in rows], indent=1)]
            for line in as_json if args.as_json else render_comm_table(rows):
                print_plain(line)
            if args.page is not None:
                html = render_comm_page(rows, f"All-reduce of {cluster.world_size} ranks")
                args.page.write_text(html, "utf-8")
        cluster.disconnect()


def _report_task(cluster: Cluster, recipe: Recipe, codecs: list[str], seeds: int, as_json: bool) -> None:
    from paceline.launch.worker_guard import guard

    with guard(cluster):
        from paceline.session.start_rank import connected
        from paceline.studies.codec_report import CODECS, render_codec_table, report_codecs

        console = output()

        def show(text: str) -> None:
            if cluster.global_rank == 0:
                print_plain(text, console)

        with connected(recipe, cluster) as (member, _):
            several = range(recipe.seed, recipe.seed + seeds)
            log = (lambda text: None) if as_json else show
            rows = report_codecs(recipe, member, codecs or CODECS, several, log=log)
        lines = (
            [json.dumps([row.record() for row in rows], indent=1)] if as_json else [*render_codec_table(rows)]
        )
        for line in lines:
            show(line)


def _measure_links(cluster: Cluster, out: Path | None, deadline: float) -> None:
    from paceline.launch.worker_guard import guard

    with guard(cluster):
        from paceline.comm.link_benchmark import measure_links, render_link_profile
        from paceline.comm.net import Net
        from paceline.job.mesh import Mesh

        cluster = cluster.connect("cpu", deadline)
        world = Mesh.build(cluster, {"replica": cluster.world_size}).world
        profile = measure_links(Net(deadline), world, socket.gethostname())
        if cluster.global_rank == 0:
            for line in render_link_profile(profile):
                print_plain(line)
            if out is not None:
                profile.save(out)
                print_plain(f"link profile: {out}")
        cluster.disconnect()
