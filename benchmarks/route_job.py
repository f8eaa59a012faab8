"""One rank of `benchmarks.route`: a session for each route in the same processes, which take turns.

Started in every host of a lab by `paceline run`. Rank 0 prints one line: the series of all sides, and the
bytes that its host sent over its link in a step, by the kernel's count.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.allocator import keep_freed_memory
from benchmarks.loops import paceline_side
from benchmarks.measure import Series, Side, merge_ranks, take_turns
from benchmarks.pair import slowest
from benchmarks.subjects import Subject, byte_gpt, mlp
from paceline.job.cluster import Cluster
from paceline.recipe import Strategy

ROUTES = ("native", "hierarchical")
SMALL_BUCKETS = 1 << 20
MARK = "series: "
SUBJECTS: dict[str, Callable[[str], Subject]] = {
    "mlp": lambda _: mlp((1024, 512), batch_size=64, shards=4),
    "gpt": lambda precision: byte_gpt(precision=precision),
    "quick": lambda _: mlp((64,), batch_size=8, shards=4),
}


def host_bytes() -> int:
    """Bytes that this host has sent over its link."""
    rows = [line.split() for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()]
    return next(int(row[9]) for row in rows if row[0] == "eth0:")


@dataclass
class Counted:
    """A side whose steps count the bytes of the host's link."""

    side: Side
    sent: list[int] = field(default_factory=list)

    def step(self) -> float:
        """One step."""
        before = host_bytes()
        loss = self.side.step()
        self.sent.append(host_bytes() - before)
        return loss


def side_of(name: str, route: str, subject: Subject, bucket_bytes: int, cluster: Cluster) -> Side:
    """A session of one route."""
    changed = subject.changed(
        strategy=Strategy(replicas=cluster.world_size, route=route),
        runtime=subject.recipe.runtime.replace(bucket_bytes=bucket_bytes),
    )
    return paceline_side(name, changed, cluster, 1)


def main(subject_name: str, repeats: int, steps: int, precision: str) -> None:
    """Measure both routes."""
    cluster = Cluster.from_env()
    keep_freed_memory()
    cluster = cluster.connect("cpu", 120.0)
    subject = SUBJECTS[subject_name](precision)
    sides = [
        Counted(side_of(name, route, subject, bucket_bytes, cluster))
        for route in ROUTES
        for name, bucket_bytes in {
            route: subject.recipe.runtime.bucket_bytes,
            f"{route}, 1 MiB buckets": SMALL_BUCKETS,
        }.items()
    ]
    turns = [Side(counted.side.name, counted.step, counted.side.begin) for counted in sides]
    mine = take_turns(
        turns,
        repeats=repeats,
        steps=steps,
        warmup=2,
        ready=dist.barrier,
        budget_seconds=100.0,
        slowest=slowest,
    )
    ranks: list[list[Series]] = [[] for _ in range(cluster.world_size)]
    dist.all_gather_object(ranks, mine)
    if cluster.global_rank == 0:
        found = {
            "series": [asdict(series) for series in merge_ranks(ranks)],
            "sent": {counted.side.name: statistics.median(counted.sent) for counted in sides},
            "parameters": subject.num_parameters,
        }
        print(MARK + json.dumps(found), flush=True)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
