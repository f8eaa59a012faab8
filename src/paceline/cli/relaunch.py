"""Run this command again in every process of a job.

The user's command becomes the launcher; a worker runs the same arguments and recognises itself by the rank in
its environment.
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.cli.common_options import JobPlacement
from paceline.launch.job_spec import LaunchJob
from paceline.launch.launcher import launch
from paceline.launch.outcome import LaunchOutcome
from paceline.launch.shutdown import ShutdownTimeouts


def relaunch(
    placement: JobPlacement,
    threads: int,
    *more: str,
    stuck_seconds: float = ShutdownTimeouts.stuck_seconds,
    grace_seconds: float | None = None,
    log_dir: Path | None = None,
    prefixed: bool = False,
    servers: int = 0,
    max_replacements: int = 0,
) -> LaunchOutcome:
    """Run the arguments of this command, followed by `more`, in every process of this node.

    Args:
        stuck_seconds: how long a process may be stopped by a signal.
        grace_seconds: time to save and exit after a signal; None: the command saves nothing.
        log_dir: folder for the output of every rank but the first.
        prefixed: print that output as well, each line with its rank in front.
        servers: number of server ranks, which come first; see `LaunchJob`.
        max_replacements: how many lost workers may be replaced; see `LaunchJob`.
    """
    timeouts = ShutdownTimeouts(stuck_seconds=stuck_seconds)
    if grace_seconds is not None:
        timeouts = ShutdownTimeouts(stuck_seconds=stuck_seconds, grace_seconds=grace_seconds)
    job = build_job(
        # At the end, where options override those of the user.
        (sys.executable, "-m", "paceline", *sys.argv[1:], *more),
        placement,
        threads,
        log_dir,
        prefixed=prefixed,
        timeouts=timeouts,
        announces=grace_seconds is not None,
        servers=servers,
        max_replacements=max_replacements,
    )
    return launch(job)


def build_job(
    command: tuple[str, ...],
    placement: JobPlacement,
    threads: int = 0,
    log_dir: Path | None = None,
    *,
    prefixed: bool = False,
    timeouts: ShutdownTimeouts | None = None,
    announces: bool = False,
    servers: int = 0,
    max_replacements: int = 0,
) -> LaunchJob:
    """Return the processes of this node as a value that `launch` takes."""
    return LaunchJob(
        command=command,
        num_processes=placement.processes,
        nodes=placement.nodes,
        node_rank=placement.node_rank,
        rendezvous=placement.rendezvous or "",
        token=placement.token,
        tls=placement.tls,
        threads=threads,
        log_dir=log_dir,
        output="prefixed" if prefixed else "files",
        timeouts=timeouts or ShutdownTimeouts(),
        announces=announces,
        servers=servers,
        max_replacements=max_replacements,
    )
