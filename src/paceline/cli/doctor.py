"""`paceline doctor`: check this host and others before a job; `train` makes the cheap checks itself."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import common_options
from paceline.cli.console import error_output, print_json, print_plain
from paceline.errors import RecipeError

if TYPE_CHECKING:
    from paceline.launch.host_checks import HostCheck, PlannedJob
    from paceline.recipe.recipe import Recipe

_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5"


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe of the job, a TOML file.", show_default=False)
    ] = None,
    processes: common_options.Processes = None,
    strategy: common_options.StrategyOption = None,
    settings: common_options.Settings = None,
    nodes: common_options.Nodes = 1,
    node_rank: common_options.NodeRank = 0,
    rendezvous: common_options.Rendezvous = None,
    hosts: Annotated[str, typer.Option("--hosts", help="Other hosts of the job, with commas.")] = "",
    ssh: Annotated[
        str, typer.Option("--ssh", help="Command that runs another one on a host, whose name comes next.")
    ] = _SSH,
    facts: Annotated[bool, typer.Option("--facts", hidden=True)] = False,
    as_json: common_options.AsJson = False,
) -> None:
    """Check within 15 seconds what would end a job on this host and others, and say what to do."""
    from paceline.job.cluster import process_environment
    from paceline.launch.host_checks import check_host, check_other_hosts, local_facts

    if facts:
        print_json(local_facts())
        return
    loaded = None if recipe is None else common_options.read_recipe(recipe, settings, strategy)
    job = _planned_job(loaded, processes, nodes, node_rank, rendezvous)
    names = [name for name in hosts.split(",") if name]
    checks = check_host(job, process_environment()) + check_other_hosts(names, shlex.split(ssh))
    checks += _check_links(loaded, names)
    if as_json:
        print_json([vars(check) for check in checks])
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print_plain(f"{check.severity:8} {check.name.ljust(width)}  {check.found}")
            if check.next_step:
                print_plain(f"{'':8} {'':{width}}  next: {check.next_step}")
    raise typer.Exit(any(check.severity == "error" for check in checks))


def warn_of_host(recipe: Recipe, processes: int, nodes: int) -> None:
    """Print what the cheap checks find at the start of a job; nothing if all is well."""
    from paceline.job.cluster import process_environment
    from paceline.launch.host_checks import PlannedJob, check_cheaply

    job = PlannedJob(processes, processes * nodes, _folder_of(recipe))
    problems = [check for check in check_cheaply(job, process_environment()) if check.severity == "error"]
    for check in problems:
        print_plain(f"warning: {check.name}: {check.found}. Next: {check.next_step}", error_output())


def _planned_job(
    recipe: Recipe | None, processes: int | None, nodes: int, node_rank: int, rendezvous: str | None
) -> PlannedJob:
    from paceline.launch.host_checks import PlannedJob

    host, _, port = (rendezvous or "").rpartition(":")
    if rendezvous and not (host and port.isdecimal()):
        raise RecipeError(f"--rendezvous {rendezvous}: expected HOST:PORT", next_step="10.0.0.1:29500")
    address = (host.strip("[]"), int(port)) if rendezvous else ("", 0)
    if recipe is None:
        count = processes or 1
        return PlannedJob(count, count * nodes, Path(), rendezvous=address, serves=node_rank == 0)
    count = common_options.processes_for(recipe, processes, nodes)
    return PlannedJob(
        count,
        count * nodes,
        _folder_of(recipe),
        recipe.runtime.threads,
        recipe.precision.compute,
        recipe.runtime.device,
        address,
        serves=node_rank == 0,
    )


def _folder_of(recipe: Recipe) -> Path:
    """Return the existing folder on whose disk the run will be."""
    folder = Path(recipe.run_dir or "runs").absolute()
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def _check_links(recipe: Recipe | None, hosts: Sequence[str]) -> list[HostCheck]:
    """Return checks of links that are much slower than in the profile of the recipe."""
    from paceline.launch.host_checks import check_link_profile, measure_round_trips

    if recipe is None or recipe.runtime.link_profile is None or not hosts:
        return []
    from paceline.comm.link_profile import LinkProfile

    profile, here = LinkProfile.load(Path(recipe.runtime.link_profile)), socket.gethostname()
    latencies = {
        profile.hosts[pair.target]: pair.line.alpha_seconds
        for pair in profile.pairs
        if profile.hosts[pair.source] == here
    }
    known = [host for host in hosts if host in latencies]
    return list(check_link_profile(latencies, measure_round_trips(known)))
