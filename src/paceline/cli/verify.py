"""`paceline verify`: start the processes of a verification, or be one of them.

The exit code is 0 if the strategy agrees with the single-process oracle and 1 if it does not. Rank 0 leaves a
certificate in a file, which the launcher prints. What it runs is imported inside functions.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from paceline.cli import common_options
from paceline.cli.common_options import NodeArgs
from paceline.cli.console import print_json, print_plain
from paceline.errors import RecipeError, format_count

if TYPE_CHECKING:
    from paceline.checkpoint.checkpoint_certificate import CheckpointCertificate
    from paceline.job.cluster import Cluster
    from paceline.recipe.recipe import Recipe
    from paceline.recipe.tables import RuntimeRecipe

_STEPS = 20
_MANIFEST_FILE = "manifest.json"  # `paceline.checkpoint.manifest`, which imports torch


def verify(
    recipe: Annotated[
        Path,
        typer.Argument(
            help="The recipe; a run folder, which then stores its certificate, as its checkpoints do; or a"
            " checkpoint, whose tensors are compared with its certificate.",
        ),
    ],
    processes: common_options.Processes = None,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of steps to compare.")] = _STEPS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="Write the certificate to this file.")
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Also check code that both sides share: the loss on single samples."),
    ] = False,
    plant: Annotated[
        str | None, typer.Option("--plant", help="Plant a known mistake, to see that it is found.")
    ] = None,
    loop: Annotated[
        str | None,
        typer.Option(
            "--loop", help='Verify your own training loop "file.py:function", which takes a `loop`.'
        ),
    ] = None,
    nodes: common_options.Nodes = 1,
    node_rank: common_options.NodeRank = 0,
    rendezvous: common_options.Rendezvous = None,
    token_file: common_options.TokenFile = "",
    insecure: common_options.Insecure = False,
    trust: common_options.Trust = False,
) -> None:
    """Run a strategy next to a single-process oracle and compare every tensor of every step."""
    run_verify(
        VerifyArgs(
            recipe=recipe,
            strategy=strategy,
            settings=settings,
            steps=steps,
            as_json=as_json,
            certificate=certificate,
            strict=strict,
            plant=plant,
            loop=loop,
            nodes=NodeArgs(processes, nodes, node_rank, rendezvous, token_file, insecure),
            trust=trust,
        )
    )


@dataclass(frozen=True)
class VerifyArgs:
    """The arguments of `paceline verify`, as the user gave them."""

    recipe: Path
    strategy: str | None
    settings: list[str] | None
    steps: int
    as_json: bool
    certificate: Path | None
    strict: bool
    plant: str | None
    loop: str | None
    nodes: NodeArgs
    trust: bool

    @property
    def is_unchanged_run(self) -> bool:
        """Return whether a run folder is verified exactly as it was trained."""
        return not (self.settings or self.strategy or self.plant or self.certificate or self.loop)


def run_verify(args: VerifyArgs) -> None:
    """Verify as one rank, or launch the processes of this node; exits with the exit code of the job."""
    from paceline.cli.resume import require_own_run
    from paceline.report.html_page import write_report
    from paceline.report.run_files import CERTIFICATE, RECIPE, resolve_run_folder
    from paceline.report.run_reader import read_run

    if (args.recipe / _MANIFEST_FILE).is_file():
        sys.exit(_show_checkpoint(args))
    run = resolve_run_folder(args.recipe) if args.recipe.is_dir() else None
    path = args.recipe if run is None else run / RECIPE
    recipe = common_options.read_recipe(path, args.settings, args.strategy)
    cluster = args.nodes.worker(recipe.security.tls)
    if cluster is not None:
        _verify_and_exit(cluster, recipe, path, args)
    node_args = args.nodes.on_engine()
    nodes, processes = node_args.nodes, node_args.processes
    if run is not None and processes is None and args.strategy is None:
        processes = read_run(run).ranks // nodes or None
    count = common_options.processes_for(recipe, processes, nodes)
    if run is not None:
        require_own_run(run, args.trust)
    placement = node_args.placement(count, recipe.security.tls)
    # a certificate of a changed recipe says nothing about the run, so it does not go into its folder
    stored = run / CERTIFICATE if run is not None and args.is_unchanged_run else args.certificate
    code = _launch(placement, recipe.runtime, stored, args.as_json)
    if run is not None and args.is_unchanged_run and node_args.node_rank == 0:
        try:
            write_report(run)
        except OSError as error:
            print_plain(f"cannot write the report: {error}")
    sys.exit(code)


def _verify_and_exit(cluster: Cluster, recipe: Recipe, path: Path, args: VerifyArgs) -> NoReturn:
    """Verify as one rank; rank 0 writes the certificate for the launcher, or prints it."""
    certificate = _verify_rank(cluster, recipe, path, args)
    if cluster.global_rank == 0 and args.certificate is not None:
        certificate["checkpoints"] = _certify_checkpoints(recipe, args, certificate)
        args.certificate.write_text(json.dumps(certificate, indent=1) + "\n", encoding="utf-8")
        sys.exit(0)
    sys.exit(_show(certificate, args.as_json) if cluster.global_rank == 0 else 0)


def _certify_checkpoints(recipe: Recipe, args: VerifyArgs, certificate: Mapping[str, Any]) -> list[str]:
    """Write the result into the checkpoints of the run whose certificate it is; returns their names."""
    from paceline.checkpoint.checkpoint_certificate import certify_checkpoints
    from paceline.errors import CheckpointError
    from paceline.report.run_files import CERTIFICATE
    from paceline.session.checkpointing import checkpoint_files

    run = args.recipe
    if (
        args.certificate is None
        or not run.is_dir()
        or args.certificate.resolve() != (run / CERTIFICATE).resolve()
    ):
        return []
    try:
        return certify_checkpoints(checkpoint_files(recipe, run), certificate)
    except (CheckpointError, OSError) as error:
        print_plain(f"warning: not all checkpoints have the certificate: {error}")
        return []


def _show_checkpoint(args: VerifyArgs) -> int:
    """Print the certificate of a checkpoint, and what differs from it; returns the exit code.

    The exit code is 0 if all tensors are those of the certificate and it has a verification that passed.
    """
    from paceline.checkpoint.checkpoint_certificate import find_mismatches
    from paceline.checkpoint.storage import StorageFolder

    is_plain = args.is_unchanged_run and args.steps == _STEPS and not args.strict
    if not is_plain or args.nodes.processes is not None:
        raise RecipeError(
            f"'{args.recipe}' is a checkpoint: it is compared with its certificate, and nothing is run",
            next_step="name the recipe or the run to verify a strategy, or leave out all options but --json",
        )
    folder = args.recipe.resolve()
    certificate, mismatches = find_mismatches(StorageFolder(str(folder.parent)), folder.name)
    record = certificate.verification
    is_ok = not mismatches and record is not None and record.ok
    if args.as_json:
        print_json({**certificate.model_dump(), "mismatches": mismatches, "ok": is_ok})
        return 0 if is_ok else 1
    for line in _certificate_lines(folder.name, certificate):
        print_plain(line)
    for line in mismatches or ["tensors: all are those of the certificate"]:
        print_plain(line)
    return 0 if is_ok else 1


def _certificate_lines(name: str, certificate: CheckpointCertificate) -> list[str]:
    """Render the certificate of a checkpoint: what it is of, and what was verified."""
    record, versions = certificate.verification, certificate.versions
    lines = [
        f"{name}: step {certificate.step} of run {certificate.run},"
        f" '{certificate.strategy}' on {format_count(certificate.world_size, 'process')}",
        "versions: " + ", ".join(f"{key} {version}" for key, version in versions.items()),
        f"recipe sha256: {certificate.recipe_sha256}",
        f"state sha256: {certificate.state_sha256}",
    ]
    if certificate.task_sha256 is not None:
        lines.insert(3, f"task sha256: {certificate.task_sha256}")
    if record is None:
        return [
            *lines,
            "not verified: `paceline verify RUN` verifies this recipe and certifies its checkpoints",
        ]
    how = f"'{record.strategy}' on {format_count(record.processes, 'process')}, Paceline {record.paceline}"
    return [*lines, f"verification of {how}:", *record.conclusion.splitlines()]


def _launch(
    placement: common_options.JobPlacement, runtime: RuntimeRecipe, stored: Path | None, as_json: bool
) -> int:
    """Start the workers and print the certificate that they leave; returns the exit code."""
    from paceline.cli.relaunch import relaunch
    from paceline.report.run_files import CERTIFICATE

    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = stored or Path(folder) / CERTIFICATE
        before = path.stat().st_mtime_ns if path.exists() else None
        outcome = relaunch(
            placement, runtime.threads, "--certificate", str(path), stuck_seconds=runtime.deadline_seconds
        )
        # an old certificate in the same place must not pass for the result of this run
        if outcome.exit_code or not path.exists() or path.stat().st_mtime_ns == before:
            return outcome.exit_code
        return _show(json.loads(path.read_text(encoding="utf-8")), as_json)


def _verify_rank(cluster: Cluster, recipe: Recipe, path: Path, args: VerifyArgs) -> dict[str, Any]:
    from paceline.launch.worker_guard import guard

    plant = args.plant
    with guard(cluster):
        from paceline.tasks.task_registry import find_build
        from paceline.testing.planted_faults import PLANTED_FAULTS
        from paceline.verification.verification_report import certificate
        from paceline.verification.verify_on_rank import verify as verify_here

        if plant is not None and plant not in PLANTED_FAULTS:
            raise RecipeError(
                f"there is no planted fault '{plant}'", next_step=f"one of: {', '.join(PLANTED_FAULTS)}"
            )
        if (
            plant is not None
            and PLANTED_FAULTS[plant].of_clients
            and not recipe.strategy.sync_spec.trains_clients
        ):
            raise RecipeError(
                f"'{plant}' is a fault of sync=federated, and the strategy is {recipe.strategy}",
                next_step='add --strategy "sync=federated:1"',
            )
        if plant is not None and PLANTED_FAULTS[plant].of_norms and recipe.optimizer.spec.elementwise:
            raise RecipeError(
                f"'{plant}' is a fault of optimizers that take norms of tensors, and this recipe names"
                f" {recipe.optimizer.name}",
                next_step='set optimizer.name = "lamb" or "lars", and a strategy with shard or tensor',
            )
        from paceline.checkpoint.checkpoint_certificate import code_identity, task_file_sha256
        from paceline.recipe.recipe import to_toml

        identity = code_identity(
            to_toml(recipe.replace(run_dir=None)),
            task_file_sha256(recipe.task, common_options.task_directory(path)),
        )
        report = verify_here(
            recipe,
            cluster=cluster,
            components=PLANTED_FAULTS[plant].components(cluster.world_size) if plant is not None else None,
            loop=None if args.loop is None else find_build(args.loop, Path.cwd(), makes="None"),
            base_dir=common_options.task_directory(path),
            steps=args.steps,
            strict=args.strict,
        )
        return certificate(report) | identity


def _show(certificate: Mapping[str, Any], as_json: bool) -> int:
    """Print a certificate; returns the exit code."""
    if as_json:
        print_json(certificate)
    else:
        for line in (*table_lines(certificate), certificate["conclusion"]):
            print_plain(line)
        if certificate.get("checkpoints"):
            print_plain(f"in the certificates of: {', '.join(certificate['checkpoints'])}")
    return 0 if certificate["ok"] else 1


def table_lines(certificate: Mapping[str, Any]) -> list[str]:
    """Render one line for each tensor: its class, its largest error over all ranks and steps, the bound."""
    rows = [("quantity", "tensor", "class", "largest error", "bound", "")]
    rows += [
        (
            row["quantity"],
            row["tensor"],
            row["class"],
            f"{row['error']:.2e}",
            f"{row['bound']:.2e}",
            "ok" if row["ok"] else f"DIVERGES on rank {row['rank']} in step {row['step']}",
        )
        for row in certificate["tensors"]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
