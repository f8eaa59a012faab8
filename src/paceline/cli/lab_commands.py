"""`paceline lab`: a cluster on this machine, for one command; and a look into it from elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import output
from paceline.errors import LabError

if TYPE_CHECKING:  # loaded by the commands, so that the others answer sooner
    from paceline.lab.fault_plan import FaultPlan
    from paceline.lab.lab_registry import LabRecord
    from paceline.lab.virtual_cluster import Lab

Hosts = Annotated[str, typer.Option("--hosts", help="How many hosts, or their names: a,b,c.")]
Rate = Annotated[str, typer.Option("--rate", help="Of every link, both ways: 100mbit. Default: no limit.")]
Up = Annotated[str, typer.Option("--up", help="Rate from the host, where it differs from --rate.")]
Down = Annotated[str, typer.Option("--down", help="Rate to the host, where it differs from --rate.")]
Latency = Annotated[str, typer.Option("--latency", help="Of every frame that leaves a host: 2ms.")]
Jitter = Annotated[str, typer.Option("--jitter", help="The latency's largest deviation: 200us.")]
Loss = Annotated[str, typer.Option("--loss", help="Share of frames that are lost: 0.1%.")]
Racks = Annotated[list[str] | None, typer.Option("--rack", help="A switch of its own: a=h0,h1. Repeat it.")]
Uplink = Annotated[str, typer.Option("--uplink", help="Rate between a rack and the core.")]
Cores = Annotated[float, typer.Option("--cores", min=0, help="Of each host. 0: an even part.")]
Disk = Annotated[str, typer.Option("--disk", help="Size of each host's own disk, {disk} in COMMAND: 64mb.")]
Faults = Annotated[
    list[str] | None, typer.Option("--fault", help='What goes wrong: "kill h2 step=3". May be repeated.')
]
Seed = Annotated[int, typer.Option("--seed", help="Of faults, jitter and loss.")]
Events = Annotated[Path | None, typer.Option("--events", help="Write what the faults did here, as JSON.")]
Deadline = Annotated[
    float | None, typer.Option("--deadline", min=0, help="Seconds until the hosts are told to stop.")
]


def run(
    context: typer.Context,
    hosts: Hosts = "2",
    rate: Rate = "",
    up: Up = "",
    down: Down = "",
    latency: Latency = "",
    jitter: Jitter = "",
    loss: Loss = "",
    racks: Racks = None,
    uplink: Uplink = "",
    cores: Cores = 0.0,
    disk: Disk = "",
    faults: Faults = None,
    seed: Seed = 0,
    events: Events = None,
    deadline: Deadline = None,
) -> None:
    """Run COMMAND (after --) on a cluster on this machine; `paceline` jobs spread their -n over the hosts."""
    from paceline.lab.fault_plan import FaultPlan
    from paceline.lab.topology import Links
    from paceline.lab.virtual_cluster import Lab

    links, plan = Links(rate, up, down, latency, jitter, loss), FaultPlan.parse(faults or (), seed)
    groups, far = _racks(racks), Links(uplink)
    lab = Lab(_hosts(hosts), links, racks=groups, uplinks=far, cores=cores, disk=disk, seed=seed)
    sys.exit(_run(lab, context.args, plan, events, deadline))


def _run(lab: Lab, words: Sequence[str], plan: FaultPlan, events: Path | None, deadline: float | None) -> int:
    with lab:
        command = [word.replace("{disk}", str(lab.disk)) if "{disk}" in word else word for word in words]
        found = lab.run(
            command, faults=plan, say=sys.stdout.write, deadline_seconds=deadline, event_log=events
        )
    sys.stdout.write(found.summary)
    return found.exit_code


def _hosts(text: str) -> int | list[str]:
    return int(text) if text.isdigit() else text.split(",")


def _racks(texts: list[str] | None) -> dict[str, list[str]] | None:
    return {text.partition("=")[0]: text.partition("=")[2].split(",") for text in texts} if texts else None


def shell(
    context: typer.Context,
    host: Annotated[str, typer.Argument(help="Which host of the lab.", show_default=False)],
    lab: Annotated[str, typer.Option("--lab", help="Which lab, see `lab ps`. Default: the newest.")] = "",
) -> None:
    """Open a shell in a host of a running lab, or run the command after -- there."""
    from paceline.lab.namespaces import enter_command

    found = _running(lab)
    if host not in found.first:
        raise LabError(f"{found.name} has no host '{host}'", next_step=f"one of: {', '.join(found.first)}")
    argv = context.args or ["sh", "-i"]
    command = enter_command(found.name, found.first[host].pid, found.kinds, argv)
    os.execv(command[0], command)


def _running(name: str) -> LabRecord:
    from paceline.lab.lab_registry import read_lab_records

    alive = [
        record
        for record in read_lab_records()
        if record.owner.alive and record.first and name in ("", record.name)
    ]
    if not alive:
        raise LabError(
            f"the lab '{name}' is not running" if name else "no lab is running",
            next_step="start one: paceline lab run --hosts 2 -- sleep 600",
        )
    return alive[-1]


def ps() -> None:
    """List the labs of this user, their hosts and how many processes run there."""
    from paceline.lab.lab_registry import read_lab_records
    from paceline.lab.namespaces import host_pids

    console = output()
    found = list(read_lab_records())
    for record in found:
        state = (
            f"process {record.owner.pid}" if record.owner.alive else "its process is gone: paceline lab clean"
        )
        console.print(
            f"{record.name}  {state}  {record.command}", markup=False, highlight=False, soft_wrap=True
        )
        for host, address in record.addresses.items():
            first = record.first[host]
            running = len(host_pids(first.pid)) if first.alive else 0
            console.print(f"  {host:<12}{address:<14}{running} processes", markup=False, highlight=False)
    if not found:
        console.print("no labs")


def remove(
    running: Annotated[bool, typer.Option("--running", help="Also end labs that are in use.")] = False,
) -> None:
    """Remove what earlier labs have left: processes, control groups, files."""
    from paceline.lab.lab_registry import clean

    found = clean(running=running)
    console = output()
    console.print(
        f"removed {len(found.labs)} labs, {len(found.processes)} processes, "
        f"{len(found.groups)} control groups",
        highlight=False,
    )
    for name in found.running:
        console.print(f"{name} is in use: paceline lab clean --running ends it", highlight=False)
