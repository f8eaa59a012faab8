"""`paceline verify`: what it takes. What it does is loaded when it runs, so that its help costs little."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options


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
    from paceline.cli.verify_job import Asked, run_verify

    nodes_of = (nodes, node_rank, rendezvous, token_file, insecure)
    told = (steps, as_json, certificate, strict, plant, loop)
    run_verify(Asked(recipe, processes, strategy, settings, *told, *nodes_of, trust))
