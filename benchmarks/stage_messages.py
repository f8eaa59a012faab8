"""Stages of one host: their messages in memory that they share, beside Gloo.

A message and its answer, halved; then steps of a pipeline. Processes of one thread. Both ways take turns, in
blocks; a number is the median of the blocks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from benchmarks.loops import paceline_side
from benchmarks.measure import Side
from benchmarks.pair import measure_pair
from benchmarks.report import Options, Report, Table, comparison_table, present, series_data
from benchmarks.subjects import deep_gpt
from paceline.comm import Net
from paceline.comm.routes import HostMessenger, connect_single_host_group
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.parallel.pipeline import HostMemoryTransport, NetTransport, StageTransport
from paceline.recipe import Strategy
from paceline.testing import run_ranks

_SIZES = (1 << 8, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_MOST_BYTES = 1 << 26  # of a block
_MICRO_BATCHES = 8


def block(wire: StageTransport, rank: int, x: torch.Tensor, count: int) -> float:
    """Seconds of one message, of so many and their answers."""
    began = time.perf_counter()
    for _ in range(count):
        wire.await_messages({1 - rank: 1})
        if rank == 0:
            wire.send(1, [x])
        found, _ = wire.receive(1 - rank)
        if rank == 1:
            wire.send(0, found)
        wire.flush()
    return (time.perf_counter() - began) / count / 2


def seconds(cluster: Cluster, sizes: tuple[int, ...], repeats: int, count: int) -> Mapping[str, list[float]]:
    """By way and size."""
    torch.set_num_threads(1)
    group, net = Mesh.build(cluster, {"pipeline": 2}).axes["pipeline"], Net(60.0)
    links = connect_single_host_group(group, net)
    assert links is not None
    memory = HostMemoryTransport(HostMessenger(net, group, links))
    wires: dict[str, StageTransport] = {
        "Gloo": NetTransport(group, net, torch.device("cpu")),
        "memory": memory,
    }
    found: dict[str, list[float]] = {f"{name} {size}": [] for size in sizes for name in wires}
    for size in sizes:
        x = torch.ones(size // 4)
        for turn in range(repeats + 1):
            for name, wire in wires.items():
                net.barrier(group)
                taken = block(wire, group.rank, x, max(2, min(count, _MOST_BYTES // size)))
                if turn:
                    found[f"{name} {size}"].append(taken)
    memory.close()
    return found


def step_sides(options: Options, words: str, cluster: Cluster) -> Sequence[Side]:
    """The GPT in stages, with either."""
    subject = deep_gpt(quick=options.quick, precision=options.precision).with_shards(_MICRO_BATCHES)
    return [
        paceline_side(name, subject.changed(strategy=Strategy.parse(f"{words} route={route}")), cluster, 1)
        for name, route in (("Gloo", "native"), ("memory", "auto"))
    ]


def measure(options: Options) -> Report:
    """All sizes, and steps."""
    sizes, repeats, count = (_SIZES[:2], 2, 3) if options.quick else (_SIZES, 11, 200)
    found = run_ranks(seconds, 2, sizes, repeats, count)[0]
    rows = []
    for size in sizes:
        gloo, memory = ([1e3 * x for x in found[f"{name} {size}"]] for name in ("Gloo", "memory"))
        ratios = sorted(a / b for a, b in zip(gloo, memory, strict=True))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        middle = statistics.median(gloo), statistics.median(memory), statistics.median(ratios)
        rows.append([f"{size:,}", f"{middle[0]:.3f}", f"{middle[1]:.3f}", f"{middle[2]:.2f}", spread])
    columns = ("bytes", "ms, Gloo", "ms, memory", "times as fast", "in single blocks")
    tables = [Table(f"one way, median of {repeats} blocks", columns, rows)]
    data = {}
    for stages in (2,) if options.quick else (2, 4):
        words = f"replicas=1 pipeline={stages} schedule=1f1b"
        sides = partial(step_sides, options, words)
        series = measure_pair(sides, repeats=repeats, steps=1, warmup=2, num_ranks=stages)
        tables.append(comparison_table(f"a step of the byte-gpt, {words}", series, "Gloo"))
        data[words] = series_data(series)
    question = "Messages between stages of one host, by Gloo and in memory."
    return Report(question, tables, {"seconds": found, "cases": data})


if __name__ == "__main__":
    present(measure, __doc__ or "")
