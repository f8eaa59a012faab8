"""`paceline verify`: is this strategy right? Exit code 0 if it is, 1 if it is not."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from paceline.cli import options
from paceline.cli.console import output
from paceline.cli.resume import refuse_strangers
from paceline.cli.start import launch_again, worker_cluster
from paceline.cluster import Cluster
from paceline.errors import RecipeError
from paceline.launch import guard
from paceline.report import checked_run, read_run, write_report
from paceline.report.folder import CERTIFICATE, RECIPE

if TYPE_CHECKING:
    from paceline.recipe import Recipe
    from paceline.recipe.model import RuntimeRecipe


def verify(
    recipe: Annotated[
        Path, typer.Argument(help="The recipe, or a run folder, which then gets its certificate.")
    ],
    processes: options.Processes = None,
    strategy: options.StrategyOption = None,
    settings: options.Settings = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compare.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="Write the certificate to this file.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Look also at what both sides share: the loss on single samples.")
    ] = False,
    plant: Annotated[
        str | None, typer.Option("--plant", help="Plant a known mistake, to see that it is found.")
    ] = None,
    loop: Annotated[
        str | None, typer.Option("--loop", help='Your own loop to verify, "file.py:function" of one `loop`.')
    ] = None,
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    rendezvous: options.Rendezvous = None,
    token_file: options.TokenFile = "",
    insecure: options.Insecure = False,
    trust: options.Trust = False,
) -> None:
    """Run the strategy and the single-process oracle side by side, and compare every tensor of every step."""
    run = checked_run(recipe) if recipe.is_dir() else None
    path = recipe if run is None else run / RECIPE
    resolved = options.read_recipe(path, settings, strategy)
    cluster = worker_cluster()
    if cluster is not None:
        base = options.task_directory(path)
        found = _work(cluster, resolved, plant, loop, base_dir=base, steps=steps, strict=strict)
        if cluster.global_rank == 0 and certificate is not None:
            certificate.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            sys.exit(0)
        sys.exit(_show(found, as_json) if cluster.global_rank == 0 else 0)
    if run is not None and processes is None and strategy is None:
        processes = read_run(run).ranks // nodes or None
    count = options.processes_for(resolved, processes, nodes)
    if run is not None:
        refuse_strangers(run, trust)
    token = options.read_token(token_file, insecure, nodes)
    placement = options.Placement(count, nodes, node_rank, rendezvous, token, resolved.security.tls)
    as_it_was = run is not None and not (settings or strategy or plant or certificate or loop)
    kept = run / CERTIFICATE if run is not None and as_it_was else certificate
    code = _launch(placement, resolved.runtime, kept, as_json)
    if run is not None and as_it_was and node_rank == 0:
        try:
            write_report(run)
        except OSError as error:
            output().print(f"the report cannot be written: {error}", markup=False, highlight=False)
    sys.exit(code)


def _launch(placement: options.Placement, runtime: RuntimeRecipe, kept: Path | None, as_json: bool) -> int:
    """Start the workers, which leave a certificate, and show it; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = kept or Path(folder) / CERTIFICATE
        before = path.stat().st_mtime_ns if path.exists() else None
        outcome = launch_again(
            placement, runtime.threads, "--certificate", str(path), stuck_seconds=runtime.deadline_seconds
        )
        if outcome.exit_code or not path.exists() or path.stat().st_mtime_ns == before:
            return outcome.exit_code
        return _show(json.loads(path.read_text(encoding="utf-8")), as_json)


def _work(
    cluster: Cluster, recipe: Recipe, plant: str | None, loop: str | None, **more: Any
) -> dict[str, Any]:
    """One rank; `more` is for `paceline.verification.verify` as it is."""
    with guard(cluster):
        from paceline.tasks.registry import find_build
        from paceline.testing.faults import FAULTS
        from paceline.verification import verify as verify_here
        from paceline.verification.certificate import certificate

        if plant is not None and plant not in FAULTS:
            raise RecipeError(f"no fault is called '{plant}'", next_step=f"one of: {', '.join(FAULTS)}")
        pieces = FAULTS[plant].pieces(cluster.world_size) if plant is not None else None
        own = None if loop is None else find_build(loop, Path.cwd(), makes="None")
        return certificate(verify_here(recipe, cluster=cluster, pieces=pieces, loop=own, **more))


def _show(found: Mapping[str, Any], as_json: bool) -> int:
    """Print a certificate; returns the exit code."""
    console = output()
    if as_json:
        console.print_json(json.dumps(found))
    else:
        for line in table_lines(found):
            _plain(console, line)
        _plain(console, found["conclusion"])
    return 0 if found["ok"] else 1


def table_lines(found: Mapping[str, Any]) -> list[str]:
    """One line a tensor: its class, its largest error over all ranks and steps, and the bound."""
    rows = [("quantity", "tensor", "class", "largest error", "bound", "")]
    rows += [
        (r["quantity"], r["tensor"], r["class"], f"{r['error']:.2e}", f"{r['bound']:.2e}", _verdict(r))
        for r in found["tensors"]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _verdict(row: Mapping[str, Any]) -> str:
    return "ok" if row["ok"] else f"DIVERGES on rank {row['rank']} in step {row['step']}"


def _plain(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
