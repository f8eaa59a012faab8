"""What it is worth to keep freed memory on the heap, for Paceline and for DDP.

A process cannot go back to the allocator's default, so pairs of processes with and without it take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks.libraries import announce, ddp
from benchmarks.loops import HandLoop, paceline_side
from benchmarks.measure import Series, Side, chain
from benchmarks.pair import measure_pair
from benchmarks.report import Options, Report, Table, blocks, present, rate_table, series_data
from benchmarks.subjects import Subject, byte_gpt, mlp
from paceline.job.cluster import Cluster


def build_subject(name: str, options: Options) -> Subject:
    """The job, with one micro-batch a rank."""
    if name == "byte-gpt":
        return byte_gpt(quick=options.quick, precision=options.precision).with_shards(2)
    return mlp((64, 64) if options.quick else (2048, 2048, 1024), batch_size=32, shards=2)


def build_sides(name: str, options: Options, keep_memory: bool, cluster: Cluster) -> Sequence[Side]:
    """Paceline and DDP, named after the heap that they run on."""
    announce(cluster)
    subject = build_subject(name, options)
    heap = "freed memory kept" if keep_memory else "default heap"
    by_hand = HandLoop(subject, ddp(subject), cluster.global_rank, cluster.world_size).side()
    return [
        paceline_side(f"Paceline, {heap}", subject, cluster, 1),
        replace(by_hand, name=f"DDP, {heap}"),
    ]


def run(name: str, options: Options) -> list[Series]:
    """Measure one job on both heaps."""
    rounds: dict[bool, list[list[Series]]] = {False: [], True: []}
    for _ in range(1 if options.quick else 3):
        for keep_memory, found in rounds.items():
            build = partial(build_sides, name, options, keep_memory)
            found.append(measure_pair(build, repeats=3, steps=6, warmup=3, keep_memory=keep_memory))
    return [*chain(rounds[False]), *chain(rounds[True])]


def measure(options: Options) -> Report:
    """Measure both jobs."""
    tables: list[Table] = []
    data = {}
    for name in ("byte-gpt", "MLP of 8.4 M parameters"):
        found = run(name, options)
        samples = build_subject(name, options).recipe.batch.size
        title = f"{name}, 2 processes ({blocks(found)}, in 3 pairs of processes)"
        tables.append(rate_table(title, found, samples, "samples"))
        data[name] = series_data(found)
    return Report("What it is worth to keep freed memory on the heap.", tables, {"jobs": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
