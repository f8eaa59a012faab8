"""`paceline run`: run a user's own script on many processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import common_options
from paceline.errors import RecipeError


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script, or -m MODULE.", show_default=False)],
    processes: common_options.Processes = None,
    nodes: common_options.Nodes = 1,
    node_rank: common_options.NodeRank = 0,
    rendezvous: common_options.Rendezvous = None,
    token_file: common_options.TokenFile = "",
    insecure: common_options.Insecure = False,
    logs: Annotated[
        Path | None, typer.Option("--logs", help="Write the output of every rank to this folder.")
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="Threads of each process. 0: divide the cores among them.")
    ] = 0,
) -> None:
    """Run SCRIPT with its arguments on every process, as torchrun does."""
    from paceline.cli.relaunch import build_job
    from paceline.job.cluster import current_place
    from paceline.launch.job_spec import script_command
    from paceline.launch.launcher import launch

    args = common_options.NodeArgs(
        processes=processes,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        token_file=token_file,
        insecure=insecure,
    )
    launcher = args.on_engine()
    place = current_place()
    if place is not None and launcher.nodes == 1:
        raise RecipeError(
            f"this is task {place.global_rank} of {place.world_size} of {place.command}, which has started"
            " the ranks already",
            where=f"the variables of {place.engine}: {place.settings}",
            next_step=f"{place.command} python {script}, which paceline.train and own_loop understand; or one"
            " task on each node, and -n or --nodes",
        )
    command = script_command(script, *context.args)
    job = build_job(command, launcher.placement(processes or 1), threads, logs, prefixed=True)
    sys.exit(launch(job).exit_code)
