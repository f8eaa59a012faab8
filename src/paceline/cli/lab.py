"""`paceline lab`: a cluster on this machine, for one command; and a look into it from elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import output
from paceline.errors import LabError
from paceline.lab import FaultPlan, Lab, Links, clean
from paceline.lab.namespaces import entry, members
from paceline.lab.state import Record, records


def run(
    context: typer.Context,
    hosts: Annotated[str, typer.Option("--hosts", help="How many hosts, or their names: a,b,c.")] = "2",
    rate: Annotated[str, typer.Option("--rate", help="Of every link, both ways: 100mbit. Default: no limit.")] = "",
    up: Annotated[str, typer.Option("--up", help="From the host, where it differs from --rate.")] = "",
    down: Annotated[str, typer.Option("--down", help="To the host, where it differs from --rate.")] = "",
    latency: Annotated[str, typer.Option("--latency", help="Of every frame that leaves a host: 2ms.")] = "",
    jitter: Annotated[str, typer.Option("--jitter", help="The latency's largest deviation: 200us.")] = "",
    loss: Annotated[str, typer.Option("--loss", help="Share of frames that are lost: 0.1%.")] = "",
    racks: Annotated[
        list[str] | None, typer.Option("--rack", help="A switch of its own: a=h0,h1. May be repeated.")
    ] = None,
    uplink: Annotated[str, typer.Option("--uplink", help="Rate between a rack and the core.")] = "",
    cores: Annotated[float, typer.Option("--cores", min=0, help="Of each host. 0: an even part.")] = 0.0,
    disk: Annotated[str, typer.Option("--disk", help="Size of each host's own disk; {disk} in COMMAND.")] = "",
    faults: Annotated[
        list[str] | None, typer.Option("--fault", help='What goes wrong: "kill h2 step=3". May be repeated.')
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of faults, jitter and loss.")] = 0,
    events: Annotated[Path | None, typer.Option("--events", help="Write what the faults did here.")] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", min=0, help="Seconds until the hosts are told to stop.")
    ] = None,
) -> None:
    """Run COMMAND (after --) on a cluster of hosts on this machine: `paceline` jobs spread their -n over them."""
    links = Links(rate, up, down, latency, jitter, loss)
    plan = FaultPlan.parse(faults or (), seed)
    named = int(hosts) if hosts.isdigit() else hosts.split(",")
    groups = dict(_rack(text) for text in racks) if racks else None
    with Lab(
        named, links, racks=groups, uplinks=Links(uplink), cores=cores, disk=disk, seed=seed
    ) as lab:
        command = [word.replace("{disk}", str(lab.disk)) if "{disk}" in word else word for word in context.args]
        found = lab.run(
            command, faults=plan, say=sys.stdout.write, deadline_seconds=deadline, event_log=events
        )
    sys.stdout.write(found.summary)
    sys.exit(found.exit_code)


def _rack(text: str) -> tuple[str, list[str]]:
    name, _, hosts = text.partition("=")
    return name, hosts.split(",")


def shell(
    context: typer.Context,
    host: Annotated[str, typer.Argument(help="Which host of the lab.", show_default=False)],
    lab: Annotated[str, typer.Option("--lab", help="Which lab, see `lab ps`. Default: the newest.")] = "",
) -> None:
    """Open a shell in a host of a running lab, or run the command after -- there."""
    found = _running(lab)
    if host not in found.first:
        raise LabError(f"{found.name} has no host '{host}'", next_step=f"one of: {', '.join(found.first)}")
    argv = context.args or ["sh", "-i"]
    command = entry(found.name, found.first[host].pid, found.kinds, argv)
    os.execv(command[0], command)


def _running(name: str) -> Record:
    alive = [record for record in records() if record.owner.alive and record.first and name in ("", record.name)]
    if not alive:
        raise LabError(
            f"the lab '{name}' is not running" if name else "no lab is running",
            next_step="start one: paceline lab run --hosts 2 -- sleep 600",
        )
    return alive[-1]


def ps() -> None:
    """List the labs of this user, their hosts and how many processes run there."""
    console = output()
    found = list(records())
    for record in found:
        state = f"process {record.owner.pid}" if record.owner.alive else "its process is gone: paceline lab clean"
        console.print(f"{record.name}  {state}  {record.command}", markup=False, highlight=False, soft_wrap=True)
        for host, address in record.addresses.items():
            first = record.first[host]
            running = len(members(first.pid)) if first.alive else 0
            console.print(f"  {host:<12}{address:<14}{running} processes", markup=False, highlight=False)
    if not found:
        console.print("no labs")


def remove(
    running: Annotated[bool, typer.Option("--running", help="Also end labs that are in use.")] = False,
) -> None:
    """Remove what earlier labs have left: processes, control groups, files."""
    found = clean(running=running)
    console = output()
    console.print(
        f"removed {len(found.labs)} labs, {len(found.processes)} processes, {len(found.groups)} control groups",
        highlight=False,
    )
    for name in found.running:
        console.print(f"{name} is in use: paceline lab clean --running ends it", highlight=False)
