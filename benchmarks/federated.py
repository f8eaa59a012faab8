"""Rounds of 10 of 100 clients with 15 digits each, MLP 64-64-10, one epoch of batch 10, one thread.

Beside a bare loop and the simulators that are installed (pfl, Flower); memory with 10,000 clients; and two
processes against one, where a client takes 20 ms or more.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.federated_peers import PEERS, ClientBatches, flower_simulation
from benchmarks.measure import Series, Side, take_turns
from benchmarks.pair import measure_pair
from benchmarks.report import Options, Report, Table, blocks, present, series_data
from paceline.federated.cohorts import ClientOrder, build_order_of_clients
from paceline.job.cluster import Cluster
from paceline.models import MLP
from paceline.observe.process_info import proportional_memory_bytes
from paceline.recipe import Recipe
from paceline.session import build_session
from paceline.task import Loss, Task
from paceline.tasks.digits import build as build_digits

_CLIENTS, _COHORT, _SAMPLES, _RATE = 100, 10, 15, 0.1
_BARE = "bare loop"


def recipe_of(vectorize: int = 0, **federated: Any) -> Recipe:
    """A run that never ends before the measurement does."""
    table = {"clients": _CLIENTS, "cohort": _COHORT, "batch": 10, "vectorize": vectorize} | federated
    return Recipe(
        task="own",
        steps=1_000_000,
        strategy={"sync": "federated:1"},
        federated=table,
        optimizer={"name": "sgd", "lr": _RATE},
    )


def task_of(hidden: Sequence[int] = (64,), samples: int = _CLIENTS * _SAMPLES) -> Task:
    """Digits, as many as there are clients with 15 samples each."""
    data = build_digits().data
    rows = torch.arange(samples) % len(data)
    torch.manual_seed(7)
    tensors = [tensor[rows] for tensor in data.tensors]
    return Task(MLP(64, tuple(hidden), 10), TensorDataset(*tensors), sum_of_losses)


def sum_of_losses(model: nn.Module, batch: Any) -> Loss:
    """The loss of the other sides, which compute no accuracy."""
    x, y = batch
    return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(x))


def session_side(name: str, vectorize: int, cluster: Cluster, task: Task, **federated: Any) -> Side:
    """The session that `paceline train` runs."""
    session = build_session(recipe_of(vectorize, **federated), task, cluster, torch.device("cpu"))
    rounds = session.rounds()
    return Side(name, lambda: next(rounds).loss)


class BareLoop:
    """FedAvg as a loop over clients with `load_state_dict` and a `torch.optim.SGD` for each."""

    def __init__(self, order: ClientOrder, task: Task) -> None:
        self._batches, self._model = ClientBatches(order, task), copy.deepcopy(task.model)

    def round(self) -> float:
        """One round; the mean loss of the samples that were read."""
        start = {name: t.clone() for name, t in self._model.state_dict().items()}
        total, weights = {name: torch.zeros_like(t) for name, t in start.items()}, 0.0
        loss, count = 0.0, 0
        for batches in self._batches.next_round():
            self._model.load_state_dict(start)
            optimizer = torch.optim.SGD(self._model.parameters(), lr=_RATE)
            size = sum(len(x) for x, _ in batches)
            for x, y in batches:
                optimizer.zero_grad()
                mean = F.cross_entropy(self._model(x), y)
                mean.backward()
                optimizer.step()
                loss, count = loss + mean.item() * len(x), count + len(x)
            for name, value in self._model.state_dict().items():
                total[name] += size * (value - start[name])
            weights += size
        self._model.load_state_dict({name: start[name] + total[name] / weights for name in start})
        return loss / count


class HandWritten:
    """The same with gradients from `torch.autograd.grad` and an update in place."""

    def __init__(self, order: ClientOrder, task: Task) -> None:
        self._batches, self._model = ClientBatches(order, task), copy.deepcopy(task.model)
        self._parameters: list[Tensor] = [*self._model.parameters()]

    def round(self) -> float:
        """One round; the mean loss of the samples that were read."""
        parameters = self._parameters
        start = [p.detach().clone() for p in parameters]
        total, weights = [torch.zeros_like(p) for p in start], 0.0
        loss, count = 0.0, 0
        for batches in self._batches.next_round():
            with torch.no_grad():
                torch._foreach_copy_(parameters, start)
            size = sum(len(x) for x, _ in batches)
            for x, y in batches:
                mean = F.cross_entropy(self._model(x), y)
                gradients = torch.autograd.grad(mean, parameters)
                with torch.no_grad():
                    torch._foreach_add_(parameters, gradients, alpha=-_RATE)
                loss, count = loss + mean.item() * len(x), count + len(x)
            with torch.no_grad():
                torch._foreach_add_(total, torch._foreach_sub(parameters, start), alpha=size)
            weights += size
        with torch.no_grad():
            torch._foreach_copy_(parameters, torch._foreach_add(start, total, alpha=1 / weights))
        return loss / count


def rounds_of_small_clients(options: Options) -> tuple[Table, list[Series]]:
    """All sides by turns in this process, on the same clients and samples."""
    torch.set_num_threads(1)
    order, single = build_order_of_clients(recipe_of(), task_of()), Cluster.single()
    sides = [
        Side(_BARE, BareLoop(order, task_of()).round),
        Side("hand-written client", HandWritten(order, task_of()).round),
        session_side("Paceline", 0, single, task_of()),
        session_side("Paceline, vectorize = 10", 10, single, task_of()),
    ]
    for name, (package, build) in PEERS.items():
        if importlib.util.find_spec(package) is not None:
            sides.append(Side(name, build(order, task_of(), _RATE)))
    found = take_turns(sides, repeats=3 if options.quick else 15, steps=5 if options.quick else 40, warmup=5)
    bare = min(found[0].cpu_seconds)
    rows = [
        (
            series.name,
            f"{1 / sorted(series.cpu_seconds)[len(series.cpu_seconds) // 2]:.1f}",
            f"{1 / min(series.cpu_seconds):.1f}",
            f"{bare / min(series.cpu_seconds):.2f}",
            f"{series.losses[0]:.4f} > {series.losses[-1]:.4f}",
        )
        for series in found
    ]
    columns = ("side", "rounds / CPU s", "of the best block", "of the bare loop", "first > last loss")
    return Table(f"100 clients, 10 a round ({blocks(found)})", columns, rows), found


def memory_with_many_clients(options: Options) -> Table:
    """Resident bytes after 20 and after 200 rounds, in a process of its own."""
    rounds = (5, 20) if options.quick else (20, 200)
    command = [sys.executable, "-m", "benchmarks.federated", "--memory", *map(str, rounds)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.split()
    early, late = (int(word) for word in printed[-2:])
    row = (f"{early / 1e6:.1f}", f"{late / 1e6:.1f}", f"{100 * (late / early - 1):.2f} %")
    columns = (f"MB after {rounds[0]} rounds", f"MB after {rounds[1]}", "growth")
    return Table("10,000 clients of 15 samples, 10 a round", columns, [row])


def print_memory(early: int, late: int) -> None:
    """Print the resident bytes of this process after so many rounds."""
    torch.set_num_threads(1)
    side = session_side("", 0, Cluster.single(), task_of(samples=150_000), clients=10_000)
    for number in itertools.count(1):
        side.step()
        if number in (early, late):
            print(int(proportional_memory_bytes()))
        if number == late:
            return


def print_flower_rounds(number: int) -> None:
    """Print the seconds of a round of Flower's simulation with Ray; the first five count as its start."""
    order = build_order_of_clients(recipe_of(), task_of())
    began = flower_simulation(order, task_of(), _RATE, number)
    print((began[-1] - began[5]) / (len(began) - 6))


def flower_with_ray(options: Options) -> Table:
    """Rounds per second of wall time of Flower's simulation, and of ours on one process; starts excluded."""
    number = 10 if options.quick else 40
    command = [sys.executable, "-m", "benchmarks.federated", "--flower", str(number)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.split()
    peer = float(printed[-1])
    torch.set_num_threads(1)
    side = session_side("", 0, Cluster.single(), task_of())
    for _ in range(5):
        side.step()
    start = time.perf_counter()
    for _ in range(number):
        side.step()
    own = (time.perf_counter() - start) / number
    row = (f"{1 / peer:.1f}", f"{1 / own:.1f}", f"{peer / own:.1f}")
    columns = ("Flower's simulation, rounds / s", "Paceline, one process", "ratio")
    return Table("Flower with Ray on two cores, the same clients and model", columns, [row])


class ConvNet(nn.Sequential):
    """Two convolutions on images of 8 x 8, whose weights fit into the cache of a core."""

    def __init__(self, width: int) -> None:
        head = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10)]
        body = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        super().__init__(nn.Unflatten(1, (1, 8, 8)), *body, nn.ReLU(), *head)


_LARGE = ("convolutions of width 96", "MLP 64-1024-1024-10")


def build_large(options: Options, kind: str, cluster: Cluster) -> Sequence[Side]:
    """Clients of a larger model, of which each takes 20 ms or more."""
    torch.set_num_threads(1)
    task = task_of((1024, 1024), 100 * 40)
    if kind != _LARGE[1]:
        task = replace(task, model=ConvNet(96))
    return [session_side("rounds", 0, cluster, task, batch=10)]


def two_processes(options: Options) -> Table:
    """One and two processes with the same rounds, by turns."""
    turns, steps = (1, 1) if options.quick else (3, 4)
    rows = []
    for kind in _LARGE:
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for ranks in (1, 2) * turns:
            build = partial(build_large, options, kind)
            found = measure_pair(build, repeats=3, steps=steps, warmup=2, num_ranks=ranks)[0]
            seconds[ranks].append(found.median_seconds)
        one, two = (statistics.median(seconds[ranks]) for ranks in (1, 2))
        cells = (f"{1e3 * one / _COHORT:.1f}", f"{1e3 * one:.0f}", f"{1e3 * two:.0f}", f"{one / two:.2f}")
        rows.append((kind, *cells))
    columns = ("model", "ms a client", "ms a round, one process", "two processes", "speed-up")
    return Table("Clients of 40 samples, 10 a round, batches of 10", columns, rows)


def measure(options: Options) -> Report:
    """All three."""
    installed = [f"{name} {version(name)}" for name in ("pfl", "flwr") if importlib.util.find_spec(name)]
    missing = [name for name, (package, _) in PEERS.items() if importlib.util.find_spec(package) is None]
    question = f"Federated rounds of simulated clients. Peers: {', '.join(installed) or 'none'}."
    if missing:
        question += f" Not installed: {', '.join(missing)}."
    table, found = rounds_of_small_clients(options)
    tables = [table, memory_with_many_clients(options), two_processes(options)]
    if importlib.util.find_spec("flwr") and importlib.util.find_spec("ray"):
        tables.append(flower_with_ray(options))
    return Report(question, tables, {"series": series_data(found)})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        print_memory(*map(int, sys.argv[2:4]))
    elif sys.argv[1:2] == ["--flower"]:
        print_flower_rounds(int(sys.argv[2]))
    else:
        present(measure, __doc__ or "")
