"""`paceline run`: start a user's own script on many processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script, or -m MODULE.", show_default=False)],
    processes: options.Processes = None,
    nodes: options.Nodes = 1,
    node_rank: options.NodeRank = 0,
    rendezvous: options.Rendezvous = None,
    token_file: options.TokenFile = "",
    insecure: options.Insecure = False,
    logs: Annotated[Path | None, typer.Option("--logs", help="Keep the output of each rank here.")] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Threads a process; 0: share the cores.")
    ] = 0,
) -> None:
    """Run SCRIPT with its arguments on every process, as torchrun would."""
    from paceline.cli.start import job_of
    from paceline.launch import launch, script_command

    token = options.read_token(token_file, insecure, nodes)
    placement = options.Placement(processes or 1, nodes, node_rank, rendezvous, token)
    job = job_of(script_command(script, *context.args), placement, threads, logs, prefixed=True)
    sys.exit(launch(job).exit_code)
