"""What a worker that is slow for a while costs, under every rule that knows one.

Four workers read samples that take a fixed time, so that they do not share the processor's speed: what is
measured is who waits for whom. One of them takes three times as long in a stretch of the run, and recovers. A
server is a process beside the four. All that is said of the stretch is of rounds that lie in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any, NamedTuple

import torch

from benchmarks.report import Options, Report, Table, present
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session, make_task

_WORKERS, _BATCH, _SECONDS = 4, 64, 0.004  # the last to read a sample
STRATEGIES = {
    "every-step": "replicas=4",
    "shares by speed": "replicas=4 balance=speed",
    "backup:1": "replicas=4 servers=1 sync=backup:1",
    "bounded:2": "replicas=4 servers=1 sync=bounded:2",
    "server-async": "replicas=4 servers=1 sync=server-async",
    "bounded:2 takes over": "replicas=4 servers=1 sync=every-step@straggler,bounded:2",
    "hogwild:4": "replicas=4 sync=hogwild:4",
    "gossip:4": "replicas=4 sync=gossip:4",
    "hogwild:4 by speed": "replicas=4 sync=hogwild:4 balance=speed",
    "gossip:4 by speed": "replicas=4 sync=gossip:4 balance=speed",
}
_BOUND = ("by speed", "backup:1", "bounded:2", "server-async")  # how their names end
_MORE_SAMPLES = 1.5


class Course(NamedTuple):
    """What happens to the last worker.

    Args:
        steps: of the run.
        begin, end: seconds after the first step begins, between which it is slow.
        factor: how many times as long it takes for a sample then.
    """

    steps: int
    begin: float
    end: float
    factor: float


class Round(NamedTuple):
    """A round, as a rank saw it.

    Args:
        ended: seconds after the run began.
        waited: of its seconds, those in communication.
    """

    ended: float
    seconds: float
    waited: float
    items: float
    loss: float
    sync: str


class Reading:
    """Samples that take their time."""

    def __init__(self, data: Any, seconds: Callable[[], float]) -> None:
        self._data, self._seconds = data, seconds

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds())
        return self._data[index]


def train(strategy: str, course: Course, seed: int, cluster: Cluster) -> list[Round]:
    """The rounds of a run, on this rank."""
    torch.set_num_threads(1)
    recipe = Recipe(
        task="digits",
        options={"model": "mlp", "hidden": [64]},
        steps=course.steps,
        seed=seed,
        batch={"size": _BATCH, "shards": 16},
        optimizer={"name": "sgd", "lr": 0.05},
        strategy=Strategy.parse(strategy),
        health={"straggler_factor": 1.5} if "straggler" in strategy else {},
    )
    task, began = make_task(recipe), [0.0]
    last = cluster.global_rank == cluster.world_size - 1

    def seconds() -> float:
        slow = last and course.begin <= time.monotonic() - began[0] < course.end
        return _SECONDS * (course.factor if slow else 1.0)

    session = build_test_session(cluster, recipe, lambda: replace(task, data=Reading(task.data, seconds)))
    session.sum(0.0)  # all are here
    began[0] = time.monotonic()
    found = []
    for stats in session.rounds():
        ended, waited = time.monotonic() - began[0], stats.phases["communication"]
        found.append(Round(ended, stats.seconds, waited, stats.num_items, stats.loss, session.strategy.sync))
    session.close()
    return found


class Measured(NamedTuple):
    """A run.

    Args:
        clean, slow: applied samples a second before the stretch, and in it.
        idle: of a worker that is not slow, the share of the stretch in which it waited.
        final: mean loss of the last tenth.
        rounds: of rank 0.
    """

    clean: float
    slow: float
    idle: float
    final: float
    rounds: list[Round]


def measure_one(strategy: str, course: Course, seed: int) -> Measured:
    """Train once."""
    run = partial(train, strategy, course, seed)
    found = run_ranks(run, _WORKERS + Strategy.parse(strategy).servers, deadline=300.0)
    first, fast = found[0], found[-2]

    def inside(rounds: Sequence[Round]) -> list[Round]:
        return [one for one in rounds if one.ended - one.seconds >= course.begin and one.ended <= course.end]

    clean = [one for one in first[1:] if one.ended <= course.begin]
    slow, waited = inside(first), inside(fast)
    return Measured(
        _rate(clean),
        _rate(slow),
        sum(one.waited for one in waited) / max(1e-9, sum(one.seconds for one in waited)),
        _last_loss(first, sum(one.items for one in first) / 10),
        first,
    )


def _rate(rounds: Sequence[Round]) -> float:
    return sum(one.items for one in rounds) / max(1e-9, sum(one.seconds for one in rounds))


def _last_loss(rounds: Sequence[Round], items: float) -> float:
    """Mean over the last so many samples, in whole rounds."""
    taken: list[Round] = []
    for one in reversed(rounds):
        taken.append(one)
        if sum(one.items for one in taken) >= items:
            break
    return sum(one.loss * one.items for one in taken) / sum(one.items for one in taken)


def samples_to(loss: float, rounds: Sequence[Round], items: float) -> float:
    """Samples after which the mean loss of the last so many is as low; infinite: it never is."""
    for count in range(1, len(rounds) + 1):
        done = sum(one.items for one in rounds[:count])
        if done >= items and _last_loss(rounds[:count], items) <= loss:
            return done
    return float("inf")


def measure(options: Options) -> Report:
    """Run all strategies, one after another."""
    course = Course(60, 1.5, 5.0, 3.0) if options.quick else Course(240, 4.0, 16.0, 3.0)
    seeds = (1,) if options.quick else (1, 2)
    longer = course._replace(steps=round(course.steps * _MORE_SAMPLES))
    data = {
        name: [measure_one(strategy, longer if name == "server-async" else course, seed) for seed in seeds]
        for name, strategy in STRATEGIES.items()
    }
    ten = course._replace(factor=10.0, steps=2 * course.steps)  # a run pauses 20 times, and all wait there
    data["backup:1, 10 times"] = [measure_one(STRATEGIES["backup:1"], ten, seed) for seed in seeds]
    tables = [_of_the_stretch(data, course), _to_the_loss(data["every-step"], data["server-async"], course)]
    return Report("What a slow worker costs.", tables, {name: [*found] for name, found in data.items()})


def _of_the_stretch(data: dict[str, list[Measured]], course: Course) -> Table:
    base, rows = mean([one.slow for one in data["every-step"]]), []
    for name, found in data.items():
        slow, clean = mean([one.slow for one in found]), mean([one.clean for one in found])
        bound = ("yes" if slow >= 1.5 * base else "no") if name.endswith(_BOUND) else ""
        rows.append(
            (
                name,
                " ".join(f"{one.clean:.0f}" for one in found),
                " ".join(f"{one.slow:.0f}" for one in found),
                f"{slow / base:.2f}",
                bound,
                f"{clean / max(1e-9, slow):.2f}",
                " ".join(f"{100 * one.idle:.0f}" for one in found),
                " ".join(f"{one.final:.3f}" for one in found),
            )
        )
    columns = (
        "rule",
        "samples/s before",
        "in the stretch",
        "beside every-step",
        ">= 1.5",
        "step, beside before",
        "idle %",
        "loss at the end",
    )
    title = (
        f"{_WORKERS} workers, {course.steps} steps of {_BATCH} samples of {_SECONDS * 1e3:g} ms,"
        f" the last takes {course.factor:g} times as long from second {course.begin:g} to {course.end:g}"
    )
    remarks = (
        "Samples are those that were applied, by seed: backup:1 leaves out what comes last.",
        f"Where the last is 10 times as slow the run has {2 * course.steps} steps; it pauses 20 times.",
        "Idle is what a worker that is not slow waits in the stretch.",
        *(f"{name}, seed 1: {_rules(found[0].rounds)}." for name, found in data.items() if "takes" in name),
    )
    return Table(title, columns, rows, remarks)


def _rules(rounds: Sequence[Round]) -> str:
    """One after another, and how long after the beginning each has ended."""
    last = [one for one, then in pairwise(rounds) if one.sync != then.sync] + [rounds[-1]]
    return ", ".join(f"{one.sync} until second {one.ended:.1f}" for one in last)


def _to_the_loss(right: Sequence[Measured], found: Sequence[Measured], course: Course) -> Table:
    rows, whole = [], course.steps * _BATCH
    for seed, (every, asynchronous) in enumerate(zip(right, found, strict=True), start=1):
        needed = samples_to(every.final, asynchronous.rounds, whole / 10)
        rows.append((f"{seed}", f"{every.final:.3f}", f"{whole}", f"{needed:.0f}", f"{needed / whole:.2f}"))
    columns = ("seed", "loss of every-step at its end", "its samples", "those of server-async", "times")
    return Table("Samples until server-async has every-step's loss (a tenth of the run)", columns, rows)


if __name__ == "__main__":
    present(measure, __doc__ or "")
