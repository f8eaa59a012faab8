"""One rank of `benchmarks.scatters`: two sessions of ZeRO-1 that differ in how many buckets travel at a time.

Started in every host of a lab by `paceline run`. Rank 0 prints one line: the series of both sides, the most
bytes that each had in use in a step, and what a step allocates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.allocator import keep_freed_memory
from benchmarks.loops import paceline_side
from benchmarks.measure import Series, Side, merge_ranks, take_turns
from benchmarks.pair import slowest
from benchmarks.subjects import Subject, byte_gpt, mlp
from paceline.job.cluster import Cluster
from paceline.parallel import gradient_reduction
from paceline.recipe import Strategy

MARK = "scatters: "
TWO, ALL = "two at a time", "all at a time"
LARGE_BYTES = 1 << 16  # numbers and tallies are smaller


def subject_of(name: str, precision: str, ranks: int) -> Subject:
    """What is trained, with one micro-batch a rank."""
    if name == "gpt":
        return byte_gpt(precision=precision).with_shards(ranks)
    return mlp((2048, 2048, 1024) if name == "mlp" else (256,), batch_size=32, shards=ranks)


@contextmanager
def without_turns(holds: bool) -> Iterator[None]:
    """Sessions that are built meanwhile let all buckets travel at a time, in memory of the path."""
    kept = gradient_reduction._scatter_order
    if holds:
        gradient_reduction._scatter_order = lambda context: None
    try:
        yield
    finally:
        gradient_reduction._scatter_order = kept


def side_of(name: str, subject: Subject, cluster: Cluster) -> Side:
    """A session of ZeRO-1 whose messages Gloo carries."""
    strategy = Strategy(replicas=1, shard=cluster.world_size, zero=1, route="native")
    runtime = subject.recipe.runtime.replace(bucket_bytes=1 << 20)
    with without_turns(name == ALL):
        return paceline_side(name, subject.changed(strategy=strategy, runtime=runtime), cluster, 1)


def memory_of(side: Side) -> dict[str, int]:
    """Of one step: the most bytes in use beside what was before it, and how many large blocks it took."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        side.step()
    assert record.profiler is not None
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return {"most": most, "blocks": sum(event.nbytes() >= LARGE_BYTES for event in events)}


def main(name: str, repeats: int, precision: str) -> None:
    """Measure both sides."""
    cluster = Cluster.from_env()
    keep_freed_memory()
    cluster = cluster.connect("cpu", 120.0)
    subject = subject_of(name, precision, cluster.world_size)
    sides = [side_of(word, subject, cluster) for word in (TWO, ALL)]
    mine = take_turns(
        sides, repeats=repeats, steps=1, warmup=2, ready=dist.barrier, budget_seconds=60.0, slowest=slowest
    )
    ranks: list[list[Series]] = [[] for _ in range(cluster.world_size)]
    dist.all_gather_object(ranks, mine)
    memory = {side.name: memory_of(side) for side in sides}
    if cluster.global_rank == 0:
        found: dict[str, Any] = {
            "series": [asdict(series) for series in merge_ranks(ranks)],
            "memory": memory,
            "parameters": subject.num_parameters,
        }
        print(MARK + json.dumps(found), flush=True)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
