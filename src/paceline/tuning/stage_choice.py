"""Seconds that each module of a chain takes, measured on the ranks of a cluster.

Every rank measures some of the modules, each by itself: forward and backward of one micro-batch on a copy.

`stages=time`: a pipeline is cut where the slowest of its stages is fastest, by what its links take here.

With `memory.budget` it is the fastest cut whose every stage keeps that. Invariant: all ranks cut by the same
numbers; the cut goes into the recipe of the run folder in place of the word, so a run that goes on has the
stages with which it began.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.group_collectives import all_gather_texts
from paceline.comm.net import Net
from paceline.data.loader import collate_samples
from paceline.data.task_data import prepare_data
from paceline.errors import StrategyError, TaskError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.models.dropout import set_micro_batch_key
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.pipeline.model_chain import (
    OutputStandIn,
    as_tuple,
    check_chain,
    module_chain,
    record_call,
)
from paceline.parallel.pipeline.stage_partition import partition_evenly
from paceline.parallel.pipeline.strategy_schedule import build_checked_table
from paceline.parallel.sharded_model import allocate_copy, copy_to_meta, sample_input
from paceline.plan.stage_budget import cut_within_budget
from paceline.recipe.recipe import Recipe, max_sharers, num_micro_batches
from paceline.recipe.strategy import Strategy
from paceline.recipe.support import resolve_strategy
from paceline.report.run_facts import format_bytes
from paceline.task import Task

_REPEATS = 3
RunModule = Callable[[nn.Module, Any], Any]


def measure_stage_modules(
    recipe: Recipe, task: Task, cluster: Cluster, shards: int, device: torch.device
) -> list[float]:
    """Seconds of forward and backward of one micro-batch, by link; collective, equal on every rank."""
    check_chain(task, task.model, module_chain(task, task.model))
    samples = -(-recipe.batch.size // shards)
    runs = _runs(recipe, task, samples, device)
    world = cluster.world_size
    mine = {k: run() for k, run in enumerate(runs) if k % world == cluster.global_rank}
    group = Mesh.build(cluster, {"replica": world}).world
    texts = all_gather_texts(json.dumps(mine), group, Net(recipe.runtime.deadline_seconds))
    found = {int(k): float(one) for text in texts for k, one in json.loads(text).items()}
    return [found[k] for k in sorted(found)]


def _runs(recipe: Recipe, task: Task, samples: int, device: torch.device) -> list[Callable[[], float]]:
    """What measures each link, whose input has the shape that it has in the chain."""
    there = [task.data[k % len(task.data)] for k in range(max(1, samples))]
    batch = collate_samples(task, there, device)
    given = record_call(task.loss, batch, training=True)
    compute = recipe.precision.compute
    precision = MixedPrecision("fp32" if compute == "auto" else compute, device.type)
    links = module_chain(task, task.model)
    inputs = _shapes(task, collate_samples(task, there, torch.device("meta")))
    found: list[Callable[[], float]] = []
    for number, link in enumerate(links):
        first, last = number == 0, number == len(links) - 1
        run: RunModule = (lambda twin, _: twin(*given.inputs, **given.named)) if first else _call_unpacked
        if last:
            run = partial(_call_with_loss, task, batch, run)
        found.append(partial(_time_module, link, run, inputs[number], precision, device))
    return found


def _shapes(task: Task, batch: Any) -> list[tuple[Tensor, ...]]:
    """What goes into each link, as shapes; nothing for the first."""
    model = copy_to_meta(task.model).train()
    set_micro_batch_key(model, 0)
    given = record_call(task.loss, batch, training=True)
    found: list[tuple[Tensor, ...]] = [()]
    with torch.no_grad():
        for number, link in enumerate(module_chain(task, model)):
            x = link(*found[-1]) if number else link(*given.inputs, **given.named)
            found.append(as_tuple(x))
    return found


def _call_unpacked(twin: nn.Module, x: Any) -> Any:
    return twin(*x)


def _call_with_loss(task: Task, batch: Any, run: RunModule, twin: nn.Module, x: Any) -> Tensor:
    return task.loss(OutputStandIn(lambda: run(twin, x)), batch).total


def _time_module(
    link: nn.Module, run: RunModule, shapes: Sequence[Tensor], precision: MixedPrecision, device: torch.device
) -> float:
    """The shortest of some forwards and backwards of a copy, after one that is not counted."""
    twin, times = allocate_copy(link).to(device), []
    x = [
        sample_input(shape.shape, shape.dtype).to(device).requires_grad_(shape.is_floating_point())
        for shape in shapes
    ]
    for _ in range(_REPEATS + 1):
        set_micro_batch_key(twin, 0)
        began = time.perf_counter()
        with precision.autocast():
            outputs = [t for t in as_tuple(run(twin, x)) if t.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


_NANOSECONDS = 1e9


def choose_stages(
    recipe: Recipe,
    strategy: Strategy,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    warn: Callable[[str], None],
    note: Callable[[str, Mapping[str, Any]], None],
) -> tuple[Recipe, Strategy]:
    """Both with numbers of links in place of `stages=time`; collective.

    Args:
        recipe: with the number format of forward and backward.
        strategy: the recipe's, with its replicas filled in.
        warn: is told what was chosen and why.
        note: the same, for the run folder.
    Raises:
        TaskError: the model is no chain.
        StrategyError: it has fewer links with parameters than stages, or no cut keeps `memory.budget`.
    Wire: one ragged all_gather of some bytes for each link.
    """
    choice = measure_and_choose_stages(
        recipe.replace(strategy=strategy), task, cluster, cluster.world_size, device
    )
    warn(str(choice))
    note("stages", choice.record())
    mended = recipe.strategy.replace(stages=choice.stages)
    return recipe.replace(strategy=mended), strategy.replace(stages=choice.stages)


class StageChoice(NamedTuple):
    """A cut by measured time.

    Args:
        stages: numbers of links.
        link_seconds, stage_seconds: of forward and backward of a micro-batch.
        stage_bytes: planned peaks, where there is a budget.
        fastest: numbers of links that would be faster, and need more than the budget; or nothing.
    """

    stages: str
    link_seconds: Sequence[float]
    stage_seconds: Sequence[float]
    stage_bytes: Sequence[int] = ()
    fastest: str = ""

    @property
    def imbalance(self) -> float:
        """The slowest stage over the mean."""
        return max(self.stage_seconds) * len(self.stage_seconds) / sum(self.stage_seconds)

    def record(self) -> dict[str, Any]:
        """As it stands in the run folder."""
        return {**self._asdict(), "imbalance": self.imbalance}

    def __str__(self) -> str:
        slowest, whole = 1e3 * max(self.stage_seconds), 1e3 * sum(self.stage_seconds)
        return (
            f"stages: {self.stages} modules, the slowest {slowest:.3g} ms of {whole:.3g} ms a micro-batch,"
            f" {self.imbalance:.2f} times the mean{self._within};"
            f" stages={self.stages} in the strategy names them"
        )

    @property
    def _within(self) -> str:
        if not self.fastest:
            return ""
        most = format_bytes(max(self.stage_bytes))
        return f" ({self.fastest} is faster and does not keep memory.budget; this needs {most})"


def measure_and_choose_stages(
    recipe: Recipe, task: Task, cluster: Cluster, processes: int, device: torch.device
) -> StageChoice:
    """Measure on the ranks of a cluster, and cut for a job of so many processes; collective.

    Args:
        recipe: its strategy has its replicas filled in.
    """
    shards = num_micro_batches(recipe, processes)
    with torch.random.fork_rng():  # a run draws as if nothing had been measured
        seconds = measure_stage_modules(recipe, task, cluster, shards, device)
    sizes = [sum(p.numel() for p in link.parameters()) for link in module_chain(task, task.model)]
    chunks = build_checked_table(recipe, shards).chunks
    fastest = partition_by_time(seconds, sizes, recipe.strategy.pipeline * chunks)
    if recipe.memory.budget is None:
        return _make_choice(fastest, seconds)
    places, stage_bytes = _within_budget(recipe, task, cluster, processes, seconds, sizes, chunks)
    other = "" if places == fastest else _spell_stages(fastest)
    return _make_choice(places, seconds)._replace(stage_bytes=stage_bytes, fastest=other)


def resolve_measured_stages(recipe: Recipe, task: Task, processes: int) -> Recipe:
    """Replace `stages=time` by numbers of modules, measured in this process for a job of so many processes.

    A memory plan needs the lengths of the stages, and plans them without the processes of the job.

    Raises:
        StrategyError, TaskError: as `choose_stages`.
    """
    if recipe.strategy.stages != "time":
        return recipe
    task, (most, called) = prepare_data(task, recipe), max_sharers(recipe)
    strategy = resolve_strategy(recipe.strategy, processes=processes, shards=most, called=called)
    choice = measure_and_choose_stages(
        recipe.replace(strategy=strategy), task, Cluster.single(), processes, torch.device("cpu")
    )
    return recipe.replace(strategy=recipe.strategy.replace(stages=choice.stages))


def _make_choice(places: Sequence[range], seconds: Sequence[float]) -> StageChoice:
    return StageChoice(_spell_stages(places), seconds, [sum(seconds[i] for i in place) for place in places])


def _spell_stages(places: Sequence[range]) -> str:
    return ",".join(str(len(place)) for place in places)


def _within_budget(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    processes: int,
    seconds: Sequence[float],
    sizes: Sequence[int],
    chunks: int,
) -> tuple[list[range], list[int]]:
    """The cut of the first rank, on all ranks."""
    group = Mesh.build(cluster, {"replica": cluster.world_size}).world
    mine: dict[str, Any] = {}
    if group.rank == 0:
        try:
            cut = cut_within_budget(recipe, task, processes, in_nanoseconds(seconds), sizes, chunks)
            mine = {"ends": [place.stop for place in cut.places], "bytes": cut.stage_bytes}
        except (StrategyError, TaskError) as error:
            mine = {"what": error.what, "where": error.where, "next_step": error.next_step}
    texts = all_gather_texts(json.dumps(mine), group, Net(recipe.runtime.deadline_seconds))
    found = json.loads(texts[0])
    if "what" in found:
        raise StrategyError(**found)
    return [range(a, b) for a, b in pairwise((0, *found["ends"]))], found["bytes"]


def in_nanoseconds(seconds: Sequence[float]) -> list[int]:
    return [round(one * _NANOSECONDS) for one in seconds]


def partition_by_time(seconds: Sequence[float], sizes: Sequence[int], num_parts: int) -> list[range]:
    """Contiguous parts, each with parameters: the slowest as fast as possible; pure.

    Args:
        seconds: of each link.
        sizes: numbers of its parameters.
    Source: the exact dynamic program of `partition_evenly`, over times in place of numbers of parameters.
    """
    return partition_evenly(in_nanoseconds(seconds), num_parts, sizes)
