"""`paceline bench machine`: what this machine is, how fast it is, and which slow paths are in use."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import error_output, output, print_json, print_plain
from paceline.errors import DataError, PacelineError

if TYPE_CHECKING:
    from paceline.tuning.machine_benchmark import MachineNumber

_DEADLINE_SECONDS = 20.0
_WORKER_OPTION = "--collectives-to"


def machine(
    reports: Annotated[
        list[Path] | None,
        typer.Argument(help="Two files of --json to compare. Default: measure.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder whose disk is measured. Default: runs/, or this folder.", show_default=False
        ),
    ] = None,
    collectives_to: Annotated[Path | None, typer.Option(_WORKER_OPTION, hidden=True)] = None,
) -> None:
    """Measure this machine in less than a minute, name slow paths, or compare two machines."""
    from paceline.report.run_files import RUNS

    if collectives_to is not None:
        _run_worker(collectives_to)
    elif reports:
        _compare(reports, as_json=as_json)
    else:
        _measure(folder or (RUNS if RUNS.is_dir() else Path()), as_json=as_json)


def _measure(folder: Path, *, as_json: bool) -> None:
    if not folder.is_dir():
        raise DataError(f"the folder '{folder}' does not exist", next_step="choose another --folder")
    from paceline.tuning.machine_benchmark import measure_machine, render_report

    console = error_output()
    report = measure_machine(folder, _launch_collectives, lambda text: print_plain(text, console))
    if as_json:
        print_json(report.record())
        return
    for part in render_report(report):
        if isinstance(part, str):
            print_plain(part)
        else:
            output().print(part)


def _compare(paths: list[Path], *, as_json: bool) -> None:
    from paceline.tuning.machine_benchmark import (
        compare_reports,
        differing_facts,
        load_report,
        render_comparison,
    )

    if len(paths) != 2:
        raise DataError(
            f"{len(paths)} file to compare, expected two"
            if len(paths) == 1
            else "expected two files to compare",
            next_step="paceline bench machine --json > FILE writes one",
        )
    first, second = map(load_report, paths)
    if as_json:
        print_json({"times_as_fast": compare_reports(first, second), "facts": differing_facts(first, second)})
        return
    for part in render_comparison(first, second):
        output().print(part)


def _launch_collectives() -> Mapping[str, MachineNumber]:
    """Run two processes of this command, and return what the first one has measured.

    Raises:
        RuntimeError: they failed, or did not end in time.
    """
    from paceline.launch.job_spec import LaunchJob
    from paceline.launch.launcher import launch
    from paceline.launch.shutdown import ShutdownTimeouts
    from paceline.tuning.machine_benchmark import MachineNumber

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        path = Path(folder) / "collectives.json"
        command = (sys.executable, "-m", "paceline", "bench", "machine", _WORKER_OPTION, str(path))
        # One thread for each rank, or threads would take the cores that the transfers need.
        job = LaunchJob(command, 2, threads=1, timeouts=ShutdownTimeouts(stuck_seconds=_DEADLINE_SECONDS))
        try:
            outcome = launch(job)
        except PacelineError as error:
            raise RuntimeError(str(error)) from error
        if outcome.exit_code or not path.is_file():
            raise RuntimeError(f"the two processes failed with exit code {outcome.exit_code}")
        numbers = json.loads(path.read_text("utf-8"))
    return {name: MachineNumber(**number) for name, number in numbers.items()}


def _run_worker(path: Path) -> None:
    """Measure as one of the processes; the first writes the numbers."""
    from paceline.job.cluster import Cluster
    from paceline.launch.worker_guard import guard

    cluster = Cluster.of_worker()
    if cluster is None:
        raise DataError(
            f"{_WORKER_OPTION} is for the processes that this command starts", next_step="leave it out"
        )
    with guard(cluster):
        from paceline.tuning.machine_benchmark import measure_collectives

        cluster = cluster.connect("cpu", _DEADLINE_SECONDS)
        numbers = measure_collectives(cluster, _DEADLINE_SECONDS)
        if cluster.global_rank == 0:
            path.write_text(json.dumps({name: n._asdict() for name, n in numbers.items()}), "utf-8")
        cluster.disconnect()
