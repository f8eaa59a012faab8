"""`paceline verify`: start the processes, or be one of them. Exit code 0 if it is right, 1 if it is not."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

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
    from rich.console import Console

    from paceline.recipe import Recipe
    from paceline.recipe.model import RuntimeRecipe


class Asked(NamedTuple):
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
    def as_it_was(self) -> bool:
        """Whether a run folder is verified as it was trained."""
        return not (self.settings or self.strategy or self.plant or self.certificate or self.loop)


def run_verify(asked: Asked) -> None:
    """Run the strategy and the single-process oracle side by side, and compare every tensor of every step."""
    run = checked_run(asked.recipe) if asked.recipe.is_dir() else None
    path = asked.recipe if run is None else run / RECIPE
    resolved = options.read_recipe(path, asked.settings, asked.strategy)
    cluster = worker_cluster()
    if cluster is not None:
        _be_one(cluster, resolved, path, asked)
    processes = asked.processes
    if run is not None and processes is None and asked.strategy is None:
        processes = read_run(run).ranks // asked.nodes or None
    count = options.processes_for(resolved, processes, asked.nodes)
    if run is not None:
        refuse_strangers(run, asked.trust)
    token = options.read_token(asked.token_file, asked.insecure, asked.nodes)
    nodes_of = (asked.nodes, asked.node_rank, asked.rendezvous, token)
    placement = options.Placement(count, *nodes_of, resolved.security.tls)
    kept = run / CERTIFICATE if run is not None and asked.as_it_was else asked.certificate
    code = _launch(placement, resolved.runtime, kept, asked.as_json)
    if run is not None and asked.as_it_was and asked.node_rank == 0:
        try:
            write_report(run)
        except OSError as error:
            output().print(f"the report cannot be written: {error}", markup=False, highlight=False)
    sys.exit(code)


def _be_one(cluster: Cluster, recipe: Recipe, path: Path, asked: Asked) -> NoReturn:
    """One rank, to its end."""
    base = options.task_directory(path)
    more: dict[str, Any] = {"base_dir": base, "steps": asked.steps, "strict": asked.strict}
    found = _work(cluster, recipe, asked.plant, asked.loop, **more)
    if cluster.global_rank == 0 and asked.certificate is not None:
        asked.certificate.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        sys.exit(0)
    sys.exit(_show(found, asked.as_json) if cluster.global_rank == 0 else 0)


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
