"""`paceline lab`: run a command on a virtual cluster, and inspect or remove such clusters."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import print_plain
from paceline.errors import LabError, format_count

if TYPE_CHECKING:
    from paceline.lab.fault_plan import FaultPlan
    from paceline.lab.lab_registry import LabRecord
    from paceline.lab.virtual_cluster import Lab

Hosts = Annotated[str, typer.Option("--hosts", help="Number of hosts, or their names: a,b,c.")]
Rate = Annotated[
    str, typer.Option("--rate", help="Rate of every link in both directions: 100mbit. Default: no limit.")
]
Up = Annotated[str, typer.Option("--up", help="Rate from the host, if it differs from --rate.")]
Down = Annotated[str, typer.Option("--down", help="Rate to the host, if it differs from --rate.")]
Latency = Annotated[str, typer.Option("--latency", help="Latency of every frame that leaves a host: 2ms.")]
Jitter = Annotated[str, typer.Option("--jitter", help="Largest deviation from the latency: 200us.")]
Loss = Annotated[str, typer.Option("--loss", help="Share of frames that get lost: 0.1%.")]
Racks = Annotated[
    list[str] | None, typer.Option("--rack", help="Hosts with their own switch: a=h0,h1. Repeatable.")
]
Uplink = Annotated[str, typer.Option("--uplink", help="Rate between a rack and the core switch.")]
Cores = Annotated[
    float, typer.Option("--cores", min=0, help="CPU cores of each host. 0: divide them equally.")
]
Disk = Annotated[str, typer.Option("--disk", help="Size of a disk for each host, {disk} in COMMAND: 64mb.")]
Faults = Annotated[
    list[str] | None, typer.Option("--fault", help='A fault to inject: "kill h2 step=3". Repeatable.')
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of faults, jitter and loss.")]
Events = Annotated[
    Path | None, typer.Option("--events", help="Write what the faults did to this file, as JSON.")
]
Deadline = Annotated[
    float | None, typer.Option("--deadline", min=0, help="Seconds after which the hosts are stopped.")
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
    """Run COMMAND (after --) on a virtual cluster; `paceline` jobs spread their processes over its hosts."""
    from paceline.lab.fault_plan import FaultPlan
    from paceline.lab.topology import Links
    from paceline.lab.virtual_cluster import Lab

    links, plan = Links(rate, up, down, latency, jitter, loss), FaultPlan.parse(faults or (), seed)
    lab = Lab(
        int(hosts) if hosts.isdigit() else hosts.split(","),
        links,
        racks=_racks(racks),
        uplinks=Links(uplink),
        cores=cores,
        disk=disk,
        seed=seed,
    )
    sys.exit(_run(lab, context.args, plan, events, deadline))


def _run(lab: Lab, words: Sequence[str], plan: FaultPlan, events: Path | None, deadline: float | None) -> int:
    with lab:
        command = [word.replace("{disk}", str(lab.disk)) if "{disk}" in word else word for word in words]
        result = lab.run(
            command, faults=plan, on_line=sys.stdout.write, deadline_seconds=deadline, event_log=events
        )
    sys.stdout.write(result.summary)
    return result.exit_code


def _racks(texts: list[str] | None) -> dict[str, list[str]] | None:
    if not texts:
        return None
    racks = (text.partition("=") for text in texts)
    return {name: hosts.split(",") for name, _, hosts in racks}


def shell(
    context: typer.Context,
    host: Annotated[str, typer.Argument(help="Name of the host.", show_default=False)],
    lab: Annotated[
        str, typer.Option("--lab", help="Name of the lab, see `lab ps`. Default: the newest.")
    ] = "",
) -> None:
    """Open a shell on a host of a running lab, or run the command after -- there."""
    from paceline.lab.namespaces import enter_command

    record = _running_lab(lab)
    if host not in record.first:
        raise LabError(f"{record.name} has no host '{host}'", next_step=f"one of: {', '.join(record.first)}")
    argv = context.args or ["sh", "-i"]
    command = enter_command(record.name, record.first[host].pid, record.kinds, argv)
    # In place of this process, so that the shell gets the terminal and its signals.
    os.execv(command[0], command)


def _running_lab(name: str) -> LabRecord:
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
    """List your labs, their hosts and the number of processes on each host."""
    from paceline.lab.lab_registry import read_lab_records
    from paceline.lab.namespaces import host_pids

    records = list(read_lab_records())
    for record in records:
        ended = "its process has ended: remove it with `paceline lab clean`"
        state = f"process {record.owner.pid}" if record.owner.alive else ended
        print_plain(f"{record.name}  {state}  {record.command}")
        for host, address in record.addresses.items():
            first = record.first[host]
            running = len(host_pids(first.pid)) if first.alive else 0
            print_plain(f"  {host:<12}{address:<14}{format_count(running, 'process')}")
    if not records:
        print_plain("no labs")


def remove(
    running: Annotated[bool, typer.Option("--running", help="Also stop labs that are in use.")] = False,
) -> None:
    """Remove what earlier labs left behind: processes, control groups, files."""
    from paceline.lab.lab_registry import clean

    removed = clean(running=running)
    print_plain(
        f"removed {format_count(len(removed.labs), 'lab')},"
        f" {format_count(len(removed.processes), 'process')},"
        f" {format_count(len(removed.groups), 'control group')}"
    )
    for name in removed.running:
        print_plain(f"{name} is in use; stop it with `paceline lab clean --running`")
