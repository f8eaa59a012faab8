"""`paceline verify`: what it takes. What it does is loaded when it runs, so that its help costs little.

`paceline verify`: start the processes, or be one of them. Exit code 0 if it is right, 1 if it is not.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from paceline.cli import common_options
from paceline.cli.console import output
from paceline.cli.relaunch import relaunch, worker_cluster
from paceline.cli.resume import require_own_run
from paceline.errors import RecipeError
from paceline.job.cluster import Cluster
from paceline.launch.worker_guard import guard
from paceline.report.html_page import write_report
from paceline.report.run_files import CERTIFICATE, RECIPE, resolve_run_folder
from paceline.report.run_reader import read_run

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.recipe.recipe import Recipe, RuntimeRecipe


def verify(
    recipe: Annotated[
        Path, typer.Argument(help="The recipe, or a run folder, which then gets its certificate.")
    ],
    processes: common_options.Processes = None,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
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
    nodes: common_options.Nodes = 1,
    node_rank: common_options.NodeRank = 0,
    rendezvous: common_options.Rendezvous = None,
    token_file: common_options.TokenFile = "",
    insecure: common_options.Insecure = False,
    trust: common_options.Trust = False,
) -> None:
    """Run the strategy and the single-process oracle side by side, and compare every tensor of every step."""

    nodes_of = (nodes, node_rank, rendezvous, token_file, insecure)
    told = (steps, as_json, certificate, strict, plant, loop)
    run_verify(VerifyArgs(recipe, processes, strategy, settings, *told, *nodes_of, trust))


class VerifyArgs(NamedTuple):
    """The words of the command; see `paceline verify --help`."""

    recipe: Path
    processes: int | None
    strategy: str | None
    settings: list[str] | None
    steps: int
    as_json: bool
    certificate: Path | None
    strict: bool
    plant: str | None
    loop: str | None
    nodes: int
    node_rank: int
    rendezvous: str | None
    token_file: str
    insecure: bool
    trust: bool

    @property
    def is_unchanged_run(self) -> bool:
        """Whether a run folder is verified as it was trained."""
        return not (self.settings or self.strategy or self.plant or self.certificate or self.loop)


def run_verify(asked: VerifyArgs) -> None:
    """Run the strategy and the single-process oracle side by side, and compare every tensor of every step."""
    run = resolve_run_folder(asked.recipe) if asked.recipe.is_dir() else None
    path = asked.recipe if run is None else run / RECIPE
    resolved = common_options.read_recipe(path, asked.settings, asked.strategy)
    cluster = worker_cluster()
    if cluster is not None:
        _verify_and_exit(cluster, resolved, path, asked)
    processes = asked.processes
    if run is not None and processes is None and asked.strategy is None:
        processes = read_run(run).ranks // asked.nodes or None
    count = common_options.processes_for(resolved, processes, asked.nodes)
    if run is not None:
        require_own_run(run, asked.trust)
    token = common_options.read_token(asked.token_file, asked.insecure, asked.nodes)
    nodes_of = (asked.nodes, asked.node_rank, asked.rendezvous, token)
    placement = common_options.JobPlacement(count, *nodes_of, resolved.security.tls)
    kept = run / CERTIFICATE if run is not None and asked.is_unchanged_run else asked.certificate
    code = _launch(placement, resolved.runtime, kept, asked.as_json)
    if run is not None and asked.is_unchanged_run and asked.node_rank == 0:
        try:
            write_report(run)
        except OSError as error:
            output().print(f"the report cannot be written: {error}", markup=False, highlight=False)
    sys.exit(code)


def _verify_and_exit(cluster: Cluster, recipe: Recipe, path: Path, asked: VerifyArgs) -> NoReturn:
    """One rank, to its end."""
    base = common_options.task_directory(path)
    more: dict[str, Any] = {"base_dir": base, "steps": asked.steps, "strict": asked.strict}
    found = _verify_rank(cluster, recipe, asked.plant, asked.loop, **more)
    if cluster.global_rank == 0 and asked.certificate is not None:
        asked.certificate.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        sys.exit(0)
    sys.exit(_show(found, asked.as_json) if cluster.global_rank == 0 else 0)


def _launch(
    placement: common_options.JobPlacement, runtime: RuntimeRecipe, kept: Path | None, as_json: bool
) -> int:
    """Start the workers, which leave a certificate, and show it; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = kept or Path(folder) / CERTIFICATE
        before = path.stat().st_mtime_ns if path.exists() else None
        outcome = relaunch(
            placement, runtime.threads, "--certificate", str(path), stuck_seconds=runtime.deadline_seconds
        )
        if outcome.exit_code or not path.exists() or path.stat().st_mtime_ns == before:
            return outcome.exit_code
        return _show(json.loads(path.read_text(encoding="utf-8")), as_json)


def _verify_rank(
    cluster: Cluster, recipe: Recipe, plant: str | None, loop: str | None, **more: Any
) -> dict[str, Any]:
    """One rank; `more` is for `paceline.verification.verify` as it is."""
    with guard(cluster):
        from paceline.tasks.task_registry import find_build
        from paceline.testing.planted_faults import PLANTED_FAULTS
        from paceline.verification.verification_report import certificate
        from paceline.verification.verify_on_rank import verify as verify_here

        if plant is not None and plant not in PLANTED_FAULTS:
            raise RecipeError(
                f"no fault is called '{plant}'", next_step=f"one of: {', '.join(PLANTED_FAULTS)}"
            )
        pieces = PLANTED_FAULTS[plant].pieces(cluster.world_size) if plant is not None else None
        own = None if loop is None else find_build(loop, Path.cwd(), makes="None")
        return certificate(verify_here(recipe, cluster=cluster, pieces=pieces, loop=own, **more))


def _show(found: Mapping[str, Any], as_json: bool) -> int:
    """Print a certificate; returns the exit code."""
    console = output()
    if as_json:
        console.print_json(json.dumps(found))
    else:
        for line in table_lines(found):
            _print_line(console, line)
        _print_line(console, found["conclusion"])
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


def _print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
