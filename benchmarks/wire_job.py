"""One rank of `benchmarks.wire`: a session for each codec, and DDP with its hooks, in turns on one link.

Started in every host of a lab by `paceline run`. Rank 0 prints one line: the series of all sides, the bytes
that a rank sends in a step, what coding costs for each MB, and which sides could not run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.allocator import keep_freed_memory
from benchmarks.libraries import announce, ddp
from benchmarks.loops import HandLoop, Wrapping, bare, paceline_side
from benchmarks.measure import Series, Side, merge_ranks, take_turns
from benchmarks.pair import slowest
from benchmarks.subjects import Subject, byte_gpt, mlp
from paceline.comm import Net
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup
from paceline.recipe import Strategy
from paceline.tuning.codec_choice import coding_seconds
from paceline.tuning.comm_benchmark import AllReduceTiming, measure_all_reduce_of

MARK = "wire: "
COMPUTE = "no communication"
SUBJECTS: dict[str, Callable[[str, int], Subject]] = {
    "mlp": lambda _, shards: mlp((2048, 2048, 1024), batch_size=32, shards=shards),  # 8.4 million parameters
    "gpt": lambda precision, shards: byte_gpt(precision=precision).with_shards(shards),
    "quick": lambda _, shards: mlp((64,), batch_size=8, shards=shards),
}
"""By name, of a number format, in so many micro-batches."""
PROBE_BYTES = 1 << 19
BUCKET_BYTES = 1 << 20  # as `runtime.bucket_latency` chooses on such links; DDP has its own of 1 MiB and 25


def fp16_hook(wrapping: Wrapping) -> Wrapping:
    """DDP that sends float16."""
    cast(Any, wrapping.model).register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapping


def power_sgd_hook(wrapping: Wrapping) -> Wrapping:
    """DDP that sends products of rank 2."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    cast(Any, wrapping.model).register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapping


HOOKS: dict[str, Callable[[Wrapping], Wrapping]] = {
    "DDP": lambda wrapping: wrapping,
    "DDP, fp16 hook": fp16_hook,
    "DDP, PowerSGD hook": power_sgd_hook,
}


def codec_side(codec: str, subject: Subject, cluster: Cluster) -> Side:
    """A session with a codec; Gloo carries it."""
    strategy = Strategy(replicas=cluster.world_size, route="native", codec=codec)
    runtime = subject.recipe.runtime.replace(bucket_bytes=BUCKET_BYTES)
    return paceline_side(codec, subject.changed(strategy=strategy, runtime=runtime), cluster, 1)


def hook_side(name: str, subject: Subject, cluster: Cluster) -> Side:
    """DDP with a hook, in the hand-written loop."""
    wrapping = HOOKS[name](ddp(subject))
    side = HandLoop(subject, wrapping, cluster.global_rank, cluster.world_size).side()
    return Side(name, side.step, side.begin)


def built(makers: dict[str, Callable[[], Side]]) -> tuple[list[Side], dict[str, str]]:
    """The sides that can take a step here, on all ranks; why not, of the others."""
    sides, failed = [], {}
    for name, make in makers.items():
        why = ""
        try:
            side = make()
            for _ in range(3 if name in HOOKS else 1):  # the hooks begin late
                side.step()
        except (RuntimeError, ValueError, TypeError) as error:  # a side that crashes is a finding
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        if slowest(float(bool(why))):
            failed[name] = why or "it failed on another rank"
        else:
            sides.append(side)
    return sides, failed


def main(name: str, shards: int, codecs: str, hooks: str, repeats: int, precision: str) -> None:
    """Measure all sides."""
    cluster = Cluster.from_env()
    keep_freed_memory()
    cluster = cluster.connect("cpu", 200.0)
    announce(cluster)
    subject, words = SUBJECTS[name](precision, shards), codecs.split(";")
    alone = HandLoop(subject, bare(subject), cluster.global_rank, cluster.world_size).side()
    makers = {COMPUTE: lambda: Side(COMPUTE, alone.step, alone.begin)}
    makers |= {word: partial(codec_side, word, subject, cluster) for word in words}
    makers |= {name: partial(hook_side, name, subject, cluster) for name in hooks.split(";") if name}
    sides, failed = built(makers)
    mine = take_turns(
        sides, repeats=repeats, steps=1, warmup=1, ready=dist.barrier, budget_seconds=60.0, slowest=slowest
    )
    ranks: list[list[Series]] = [[] for _ in range(cluster.world_size)]
    dist.all_gather_object(ranks, mine)
    group, net = Mesh.build(cluster, {"replica": cluster.world_size}).replica, Net(200.0)
    rows = {word: _row(cluster, group, net, word) for word in words}
    if cluster.global_rank == 0:
        found = {
            "series": [asdict(series) for series in merge_ranks(ranks)],
            "failed": failed,
            "parameters": subject.num_parameters,
            "sent_per_byte": {word: row.sent_bytes / PROBE_BYTES for word, row in rows.items()},
            "coding_ms_per_mb": {
                word: 1e9 * coding_seconds(row, rows["fp32"]) / PROBE_BYTES for word, row in rows.items()
            },
        }
        print(MARK + json.dumps(found), flush=True)
    dist.barrier()


def _row(cluster: Cluster, group: RankGroup, net: Net, codec: str) -> AllReduceTiming:
    found = measure_all_reduce_of(cluster, group, net, Strategy(route="native", codec=codec), PROBE_BYTES)
    assert found is not None
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6])
