"""Real processes with one thread each, connected by Gloo over the loopback, in which sides take turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.allocator import keep_freed_memory
from benchmarks.measure import Series, Side, merge_ranks, take_turns
from paceline.job.cluster import Cluster
from paceline.testing import run_ranks

BuildSides = Callable[[Cluster], Sequence[Side]]

DEADLINE_SECONDS = 300.0
BUDGET_SECONDS = 100.0
"""For all blocks of one measurement; on two free cores none takes half of it."""


def measure_pair(
    build: BuildSides,
    *,
    repeats: int,
    steps: int,
    warmup: int,
    keep_memory: bool = True,
    num_ranks: int = 2,
) -> list[Series]:
    """Measure sides in a pair of processes, or in another number of them.

    Args:
        build: called on both ranks; a function of a module, or a partial of one.
        repeats, steps, warmup: see `take_turns`.
        keep_memory: see `benchmarks.allocator`.
    Returns:
        A series a side: the slower rank's seconds, the processor seconds of both, the mean of the losses.
    """
    ranks = run_ranks(
        partial(_measure_rank, build, repeats, steps, warmup, keep_memory),
        num_ranks,
        deadline=DEADLINE_SECONDS,
    )
    return merge_ranks(ranks)


def slowest(seconds: float) -> float:
    """The largest over all ranks; collective."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _measure_rank(
    build: BuildSides, repeats: int, steps: int, warmup: int, keep_memory: bool, cluster: Cluster
) -> list[Series]:
    if keep_memory:
        keep_freed_memory()
    torch.set_num_threads(1)
    sides = list(build(cluster))
    found = take_turns(
        sides,
        repeats=repeats,
        steps=steps,
        warmup=warmup,
        ready=dist.barrier if cluster.world_size > 1 else lambda: None,
        budget_seconds=BUDGET_SECONDS,
        slowest=slowest if cluster.world_size > 1 else lambda seconds: seconds,
    )
    sides.clear()
    gc.collect()  # wrapped models must be gone before their process group
    return found
