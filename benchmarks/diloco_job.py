"""One rank of `benchmarks.diloco`: a round of Streaming DiLoCo after some steps of every-step, on one link.

Started in every host of a lab by `paceline run`. Rank 0 prints one line: of both the seconds, the share of
them in which ranks communicated or waited for each other, the bytes that its host sent over its link by the
kernel's count, and the losses.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from benchmarks.allocator import keep_freed_memory
from benchmarks.route_job import host_bytes
from benchmarks.subjects import Subject, byte_gpt
from paceline.job.cluster import Cluster
from paceline.recipe import Strategy
from paceline.session.build import build_session

MARK = "diloco: "
_PAUSES = 20  # of a run


@dataclass(frozen=True)
class Stretch:
    """Steps of one side, on this rank.

    Args:
        waited: of its seconds, those in communication.
        sent: bytes of this host.
        loss: of its last round.
    """

    name: str
    steps: int
    seconds: float
    waited: float
    sent: int
    loss: float


def run(name: str, subject: Subject, steps: int, cluster: Cluster) -> Stretch:
    """Train so many steps, after the session has met once."""
    session = build_session(subject.recipe, subject.fresh(), cluster, torch.device("cpu"))
    session.sum(0.0)
    before, began, waited, loss = host_bytes(), time.perf_counter(), 0.0, 0.0
    for stats in session.rounds():
        waited, loss = waited + stats.phases["communication"], float(stats.loss)
        if session.state.step >= steps:
            break
    seconds, sent = time.perf_counter() - began, host_bytes() - before
    session.close()
    return Stretch(name, session.state.step, seconds, waited, sent, loss)


def main(quick: bool, precision: str, interval: int) -> None:
    """Both sides."""
    cluster = Cluster.from_env()
    keep_freed_memory()
    cluster = cluster.connect("cpu", 300.0)
    hosts = cluster.world_size
    subject = byte_gpt(quick=quick, precision=precision, wide=not quick)
    batch = subject.recipe.batch.replace(size=hosts, shards=hosts)
    every = subject.changed(batch=batch, strategy=Strategy(replicas=hosts, route="native"))
    streamed = subject.changed(
        batch=batch,
        steps=2 * interval * _PAUSES,  # it pauses after two intervals: the longest round that such a run has
        strategy=Strategy.parse(f"replicas={hosts} sync=diloco:{interval} codec=int4"),
        outer=subject.recipe.outer.replace(fragments=4, delay_steps=interval // 8, mixing=0.5),
    )
    found = [run("every-step", every, 6, cluster), run("diloco", streamed, 2 * interval, cluster)]
    ranks: list[list[Stretch]] = [[] for _ in range(hosts)]
    dist.all_gather_object(ranks, found)
    if cluster.global_rank == 0:
        sides = [[asdict(stretch) for stretch in side] for side in zip(*ranks, strict=True)]
        print(MARK + json.dumps({"parameters": subject.num_parameters, "sides": sides}), flush=True)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1] == "quick", sys.argv[2], int(sys.argv[3]))
