"""`paceline run`: start a user's own script on many processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import common_options


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script, or -m MODULE.", show_default=False)],
    processes: common_options.Processes = None,
    nodes: common_options.Nodes = 1,
    node_rank: common_options.NodeRank = 0,
    rendezvous: common_options.Rendezvous = None,
    token_file: common_options.TokenFile = "",
    insecure: common_options.Insecure = False,
    logs: Annotated[Path | None, typer.Option("--logs", help="Keep the output of each rank here.")] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Threads a process; 0: share the cores.")
    ] = 0,
) -> None:
    """Run SCRIPT with its arguments on every process, as torchrun would."""
    from paceline.cli.relaunch import build_job
    from paceline.launch.job_spec import script_command
    from paceline.launch.launcher import launch

    token = common_options.read_token(token_file, insecure, nodes)
    placement = common_options.JobPlacement(processes or 1, nodes, node_rank, rendezvous, token)
    job = build_job(script_command(script, *context.args), placement, threads, logs, prefixed=True)
    sys.exit(launch(job).exit_code)
