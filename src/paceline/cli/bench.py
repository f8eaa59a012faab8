"""`paceline bench`: measure what the planner has to know."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import output
from paceline.cli.start import launch_again, worker_cluster
from paceline.cluster import Cluster
from paceline.errors import StrategyError
from paceline.launch import guard


def link(
    processes: options.Processes = None,
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    rendezvous: options.Rendezvous = None,
    token_file: options.TokenFile = "",
    insecure: options.Insecure = False,
    out: Annotated[Path | None, typer.Option("--out", help="Write the link profile to this file.")] = None,
    deadline: Annotated[
        float, typer.Option("--deadline", min=1, help="Seconds that any wait may take.")
    ] = 120.0,
) -> None:
    """Measure latency and bandwidth of every pair of ranks, and of the all-reduce of all (CPU, Gloo)."""
    cluster = worker_cluster()
    if cluster is not None:
        _work(cluster, out, deadline)
        return
    count = processes or (1 if nodes > 1 else 2)
    if count * nodes < 2:
        raise StrategyError("a link has two ends", next_step="-n 2, or --nodes 2")
    token = options.read_token(token_file, insecure, nodes)
    placement = options.Placement(count, nodes, node_rank, rendezvous, token)
    sys.exit(launch_again(placement, 1, stuck_seconds=deadline).exit_code)


def _work(cluster: Cluster, out: Path | None, deadline: float) -> None:
    with guard(cluster):
        from paceline.comm import Net
        from paceline.comm.link_benchmark import measure_links, render
        from paceline.mesh import Mesh

        cluster.connect("cpu", deadline)
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
