"""Start this very command once for each process. A worker recognises itself by its place in the job."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from paceline.cli.common_options import JobPlacement
from paceline.job.cluster import Cluster
from paceline.launch.job_spec import LaunchJob
from paceline.launch.launcher import launch
from paceline.launch.outcome import LaunchOutcome


def worker_cluster() -> Cluster | None:
    """This process's place if a launcher (ours or torchrun) started it; None if a user did."""
    cluster = Cluster.from_env()
    return cluster if cluster.launched else None


def relaunch(
    placement: JobPlacement,
    threads: int,
    *more: str,
    stuck_seconds: float = LaunchJob.stuck_seconds,
    grace_seconds: float | None = None,
    log_dir: Path | None = None,
    prefixed: bool = False,
    servers: int = 0,
) -> LaunchOutcome:
    """Run this command's own arguments, and `more`, in every process of this node.

    Args:
        stuck_seconds: how long a process may be stopped by a signal.
        grace_seconds: to save and leave, once a signal has come; None: the command saves nothing.
        log_dir: keeps the output of each rank but the first.
        prefixed: shows it too, each line with its rank in front.
        servers: so many first ranks, whose failure alone ends the job; see `LaunchJob`.
    """
    command = (sys.executable, "-m", "paceline", *sys.argv[1:], *more)
    job = build_job(command, placement, threads, log_dir, prefixed=prefixed)
    job = replace(job, stuck_seconds=stuck_seconds, servers=servers)
    if grace_seconds is not None:
        job = replace(job, grace_seconds=grace_seconds, announces=True)
    return launch(job)


def build_job(
    command: tuple[str, ...],
    placement: JobPlacement,
    threads: int = 0,
    log_dir: Path | None = None,
    *,
    prefixed: bool = False,
) -> LaunchJob:
    """A node's share of a job."""
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
    )
