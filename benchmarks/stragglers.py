"""What a worker that is three times slower than three others costs, under every rule that knows one.

Samples take a fixed time to read, so that four workers do not share the processor's speed: what is measured
is who waits for whom. A server is a process beside the four.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.report import Options, Report, Table, present
from paceline.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import make_task, session_of

_WORKERS, _FACTOR = 4, 3.0
_SECONDS = 0.002  # to read a sample
_STRATEGIES = {
    "every-step": "replicas=4",
    "shares by speed": "replicas=4 balance=speed",
    "sync=server": "replicas=4 servers=1 sync=server",
    "backup:1": "replicas=4 servers=1 sync=backup:1",
    "bounded:2": "replicas=4 servers=1 sync=bounded:2",
    "server-async": "replicas=4 servers=1 sync=server-async",
    "backup:1 takes over": "replicas=4 servers=1 sync=every-step@straggler,backup:1",
    "bounded:2 takes over": "replicas=4 servers=1 sync=every-step@straggler,bounded:2",
    "hogwild:4": "replicas=4 sync=hogwild:4",
    "gossip:4": "replicas=4 sync=gossip:4",
}


class Reading:
    """Samples that take their time."""

    def __init__(self, data: Any, seconds: float) -> None:
        self._data, self._seconds = data, seconds

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return self._data[index]


def throughput(strategy: str, steps: int, factor: float, seed: int, cluster: Cluster) -> tuple[float, float]:
    """Applied samples a second after the first round, and the loss of the last one."""
    torch.set_num_threads(1)
    recipe = Recipe(
        task="digits",
        options={"model": "mlp", "hidden": [64]},
        steps=steps,
        seed=seed,
        batch={"size": 64, "shards": 16},
        optimizer={"name": "sgd", "lr": 0.05},
        strategy=Strategy.parse(strategy),
        health={"straggler_factor": 1.5} if "straggler" in strategy else {},
    )
    task = make_task(recipe)
    slow = cluster.global_rank == cluster.world_size - 1
    data = Reading(task.data, _SECONDS * (factor if slow else 1.0))
    session = session_of(cluster, recipe, lambda: replace(task, data=data))
    found = [(stats.num_items, stats.seconds, stats.loss) for stats in session.rounds()]
    session.close()
    rest = found[1:]
    return sum(items for items, _, _ in rest) / sum(seconds for _, seconds, _ in rest), found[-1][2]


def _both(strategy: str, steps: int, seeds: Sequence[int], factor: float) -> list[tuple[float, float, float]]:
    """For every seed: samples a second with four equal workers, with a slow one, and the loss with it."""
    ranks = _WORKERS + Strategy.parse(strategy).servers
    rows = []
    for seed in seeds:
        clean, _ = run_ranks(partial(throughput, strategy, steps, 1.0, seed), ranks, deadline=300.0)[0]
        slow, loss = run_ranks(partial(throughput, strategy, steps, factor, seed), ranks, deadline=300.0)[0]
        rows.append((clean, slow, loss))
    return rows


def measure(options: Options) -> Report:
    """Run all strategies, one after another."""
    steps, seeds = (20, (1,)) if options.quick else (100, (1, 2, 3))
    data = {name: _both(strategy, steps, seeds, _FACTOR) for name, strategy in _STRATEGIES.items()}
    data["backup:1, 10 times"] = _both(_STRATEGIES["backup:1"], steps, seeds, 10.0)
    base = _mean([slow for _, slow, _ in data["every-step"]])
    rows = [
        (
            name,
            f"{_mean([clean for clean, _, _ in found]):.0f}",
            " ".join(f"{slow:.0f}" for _, slow, _ in found),
            f"{_mean([slow for _, slow, _ in found]) / base:.2f}",
            " ".join(f"{loss:.3f}" for _, _, loss in found),
        )
        for name, found in data.items()
    ]
    columns = ("rule", "samples/s, none slow", "one slow, by seed", "beside every-step", "loss at the end")
    title = (
        f"{_WORKERS} workers of one thread, {steps} steps of 64 samples; one reads {_FACTOR:g} times slower"
    )
    remarks = (
        "Samples are those that were applied: backup:1 drops what comes last.",
        "What takes over does so once the slow one is named; the steps before that are counted.",
    )
    return Report("What a slow worker costs.", [Table(title, columns, rows, remarks)], data)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    present(measure, __doc__ or "")
