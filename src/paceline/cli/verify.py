"""`paceline verify`: is this strategy right? Exit code 0 if it is, 1 if it is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli import options
from paceline.cli.console import output
from paceline.cli.start import start, worker_cluster
from paceline.cluster import Cluster
from paceline.errors import RecipeError
from paceline.launch import guard
from paceline.recipe import Recipe

if TYPE_CHECKING:
    from paceline.verification import Report


def verify(
    recipe: options.RecipeArgument,
    processes: options.Processes = None,
    strategy: options.StrategyOption = None,
    settings: options.Settings = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compare.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
    plant: Annotated[
        str | None, typer.Option("--plant", help="Plant a known mistake, to see that it is found.")
    ] = None,
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    rendezvous: options.Rendezvous = None,
    token: options.Token = "",
) -> None:
    """Run the strategy and the single-process oracle side by side, and compare every tensor of every step."""
    resolved = options.read_recipe(recipe, settings, strategy)
    cluster = worker_cluster()
    if cluster is not None:
        _work(cluster, resolved, options.task_directory(recipe), steps, as_json, plant)
    count = options.processes_for(resolved, processes, nodes)
    start(options.Placement(count, nodes, node_rank, rendezvous, token), resolved.runtime.threads)


def _work(
    cluster: Cluster, recipe: Recipe, base_dir: Path, steps: int, as_json: bool, plant: str | None
) -> None:
    with guard(cluster):
        from paceline.testing.faults import FAULTS
        from paceline.verification import verify as verify_here

        if plant is not None and plant not in FAULTS:
            raise RecipeError(f"no fault is called '{plant}'", next_step=f"one of: {', '.join(FAULTS)}")
        pieces = FAULTS[plant].pieces(cluster.world_size) if plant is not None else None
        report = verify_here(recipe, steps=steps, base_dir=base_dir, cluster=cluster, pieces=pieces)
    if cluster.global_rank == 0:
        show(report, output(), as_json)
    sys.exit(0 if report.ok else 1)


def show(report: Report, console: Console, as_json: bool) -> None:
    """Print a report."""
    from paceline.verification.certificate import certificate, conclusion

    if as_json:
        console.print_json(json.dumps(certificate(report)))
        return
    table = Table(title=f"{report.strategy} on {report.world} processes, {report.steps} steps against the oracle")
    for column in ("quantity", "tensor", "class"):
        table.add_column(column, no_wrap=True)
    for column in ("largest error", "bound", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in certificate(report)["tensors"]:
        table.add_row(
            row["quantity"], row["tensor"], row["class"], f"{row['error']:.2e}", f"{row['bound']:.2e}",
            "ok" if row["ok"] else "DIVERGES",
        )  # fmt: skip
    console.print(table)
    for line in conclusion(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
