"""A step of a synchronous server beside one of replicas, and what a message costs over each channel.

A step of a server sends parameters down and gradients up; one of replicas is an all_reduce.

The model is one matrix, of which a sample reads all, so a step is little else than sending it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.channel_trip import measure_trips
from benchmarks.report import Options, Report, Table, present
from paceline.data import TrainingFeed
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.task import Loss, Task
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session

WORKERS = (1, 2, 4)
MEGABYTES = (10, 100)
_WAYS = {
    "sync=server": "servers=1 sync=server",
    "over grpc": "servers=1 sync=server channel=grpc",
    "two servers": "servers=2 sync=server",
    "replicas, native": "route=native",
    "replicas, memory": "route=auto",
}


def task_of(megabytes: int) -> Task:
    """One matrix of so many bytes, and samples for it."""
    side = 1000
    model = nn.Linear(side, megabytes * 1_000_000 // 4 // side, bias=False)

    def loss(module: nn.Module, batch: torch.Tensor) -> Loss:
        return Loss(module(batch).square().sum(), len(batch))

    return Task(model, torch.randn(64, side), loss)


class OneRound(TrainingFeed):
    """No pause, at which all parameters go to all workers once more."""

    def next_pause(self, step: int) -> int:
        """At the end."""
        return self.num_steps


def step_seconds(way: str, megabytes: int, steps: int, cluster: Cluster) -> float:
    """The mean of all steps."""
    torch.set_num_threads(1)
    workers = cluster.world_size - Strategy.parse(way).servers
    recipe = Recipe(
        task="own",
        steps=steps,
        batch={"size": workers, "shards": workers},
        optimizer={"name": "sgd", "lr": 1e-6},
        strategy=Strategy.parse(f"replicas={workers} {way}"),
    )
    session = build_test_session(cluster, recipe, partial(task_of, megabytes))
    session.parts.feed = OneRound(session.feed.work, session.feed.loader, steps)
    seconds = sum(stats.seconds for stats in session.rounds())
    session.close()
    return seconds / steps


def measure(options: Options) -> Report:
    """All sizes, workers and ways, one after another."""
    steps = 3 if options.quick else 12
    rows, data = [], {}
    for megabytes in MEGABYTES[: 1 if options.quick else None]:
        for workers in WORKERS[: 2 if options.quick else None]:
            found = {}
            for name, way in _WAYS.items():
                ranks = workers + Strategy.parse(way).servers
                each = run_ranks(partial(step_seconds, way, megabytes, steps), ranks, deadline=300.0)
                found[name] = max(each)
            data[f"{megabytes} MB, {workers} workers"] = found
            milliseconds = [f"{1e3 * seconds:.0f}" for seconds in found.values()]
            ratio = found["sync=server"] / found["replicas, native"]
            rows.append((f"{megabytes} MB", str(workers), *milliseconds, f"{ratio:.2f}"))
    columns = ("parameters", "workers", *(f"{name}: ms" for name in _WAYS), "server / native")
    remarks = (
        "A server sends all parameters to every worker and takes all gradients: 2 W n bytes through one;"
        " an all_reduce sends 2 (W - 1) / W n bytes of every rank. One worker has nobody to reduce with.",
    )
    title = f"Mean of {steps} steps, with forward, backward and the update in them; the slowest rank"
    trips, seconds = measure_trips(quick=options.quick)
    question = "A server's round trip beside an all_reduce, and a message over sockets beside one over gRPC."
    return Report(question, [Table(title, columns, rows, remarks), trips], {**data, "trips": seconds})


if __name__ == "__main__":
    present(measure, __doc__ or "")
