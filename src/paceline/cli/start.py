"""Start this very command once for each process. A worker recognises itself by its place in the job."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from paceline.cli.options import Placement
from paceline.cluster import Cluster
from paceline.launch import Job, Outcome, launch


def worker_cluster() -> Cluster | None:
    """This process's place if a launcher (ours or torchrun) started it; None if a user did."""
    cluster = Cluster.from_env()
    return cluster if cluster.launched else None


def launch_again(
    placement: Placement,
    threads: int,
    *more: str,
    stuck_seconds: float = Job.stuck_seconds,
    grace_seconds: float | None = None,
    log_dir: Path | None = None,
    prefixed: bool = False,
    servers: int = 0,
) -> Outcome:
    """Run this command's own arguments, and `more`, in every process of this node.

    Args:
        stuck_seconds: how long a process may be stopped by a signal.
        grace_seconds: to save and leave, once a signal has come; None: the command saves nothing.
        log_dir: keeps the output of each rank but the first.
        prefixed: shows it too, each line with its rank in front.
        servers: so many first ranks, whose failure alone ends the job; see `Job`.
    """
    command = (sys.executable, "-m", "paceline", *sys.argv[1:], *more)
    job = job_of(command, placement, threads, log_dir, prefixed=prefixed)
    job = replace(job, stuck_seconds=stuck_seconds, servers=servers)
    if grace_seconds is not None:
        job = replace(job, grace_seconds=grace_seconds, announces=True)
    return launch(job)


def job_of(
    command: tuple[str, ...],
    placement: Placement,
    threads: int = 0,
    log_dir: Path | None = None,
    *,
    prefixed: bool = False,
) -> Job:
    """A node's share of a job."""
    return Job(
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
