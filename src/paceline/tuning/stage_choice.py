"""Choose pipeline stages by measured time (`stages=time`): the partition whose slowest stage is fastest.

Every rank measures some modules of the chain, each by itself: forward and backward of one micro-batch on a
copy. With `memory.budget` the result is the fastest partition in which every stage keeps the budget.
Invariant: all ranks decide from the same numbers. The run folder keeps the lengths of the stages, so a
resumed run has the same stages.
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
from paceline.models.training_mode import enter_training
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
from paceline.report.number_format import format_bytes
from paceline.task import Task

_REPEATS = 3
RunModule = Callable[[nn.Module, Any], Any]


def measure_stage_modules(
    recipe: Recipe, task: Task, cluster: Cluster, shards: int, device: torch.device
) -> list[float]:
    """Measure seconds of forward and backward of one micro-batch for each module; collective."""
    enter_training(task.model)
    check_chain(task, task.model, module_chain(task, task.model))
    samples = -(-recipe.batch.size // shards)
    runs = _runs(recipe, task, samples, device)
    world = cluster.world_size
    # Each module is measured by one rank only, so that large models take a fraction of the time.
    local = {k: run() for k, run in enumerate(runs) if k % world == cluster.global_rank}
    group = Mesh.build(cluster, {"replica": world}).world
    texts = all_gather_texts(json.dumps(local), group, Net(recipe.runtime.deadline_seconds))
    seconds = {int(k): float(value) for text in texts for k, value in json.loads(text).items()}
    return [seconds[k] for k in sorted(seconds)]


def _runs(recipe: Recipe, task: Task, samples: int, device: torch.device) -> list[Callable[[], float]]:
    """Return a function for each module that measures it with inputs as it has them in the chain."""
    probe = [task.data[k % len(task.data)] for k in range(max(1, samples))]
    batch = collate_samples(task, probe, device)
    first_call = record_call(task.loss, batch, training=True)
    compute = recipe.precision.compute
    precision = MixedPrecision("fp32" if compute == "auto" else compute, device.type)
    links = module_chain(task, task.model)
    inputs = _shapes(task, collate_samples(task, probe, torch.device("meta")))
    functions: list[Callable[[], float]] = []
    for number, link in enumerate(links):
        first, last = number == 0, number == len(links) - 1
        run: RunModule = (
            (lambda twin, _: twin(*first_call.inputs, **first_call.named)) if first else _call_unpacked
        )
        if last:
            run = partial(_call_with_loss, task, batch, run)
        functions.append(partial(_time_module, link, run, inputs[number], precision, device))
    return functions


def _shapes(task: Task, batch: Any) -> list[tuple[Tensor, ...]]:
    """Return the inputs of each module as meta tensors; none for the first module."""
    model = enter_training(copy_to_meta(task.model))
    set_micro_batch_key(model, 0)
    first_call = record_call(task.loss, batch, training=True)
    inputs: list[tuple[Tensor, ...]] = [()]
    with torch.no_grad():
        for number, link in enumerate(module_chain(task, model)):
            x = link(*inputs[-1]) if number else link(*first_call.inputs, **first_call.named)
            inputs.append(as_tuple(x))
    return inputs


def _call_unpacked(twin: nn.Module, x: Any) -> Any:
    return twin(*x)


def _call_with_loss(task: Task, batch: Any, run: RunModule, twin: nn.Module, x: Any) -> Tensor:
    return task.loss(OutputStandIn(lambda: run(twin, x)), batch).total


def _time_module(
    link: nn.Module, run: RunModule, shapes: Sequence[Tensor], precision: MixedPrecision, device: torch.device
) -> float:
    """Return the least seconds of a forward and backward pass of a copy in a few runs after a warm-up."""
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
        # A module may return only tensors without gradients, such as indices.
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
    """Return recipe and strategy with numbers of modules in place of `stages=time`; collective.

    Args:
        recipe: with the number format of forward and backward.
        strategy: the recipe's, with its replicas filled in.
        warn: receives the choice with its times.
        note: receives the event `stages`.
    Raises:
        TaskError: the model is not a chain of modules.
        StrategyError: fewer modules have parameters than there are stages, or no partition keeps
            `memory.budget`.
    Wire: one ragged all_gather of some bytes for each module.
    """
    choice = measure_and_choose_stages(
        recipe.replace(strategy=strategy), task, cluster, cluster.world_size, device
    )
    warn(str(choice))
    note("stages", choice.record())
    recipe = recipe.replace(strategy=recipe.strategy.replace(stages=choice.stages))
    return recipe, strategy.replace(stages=choice.stages)


class StageChoice(NamedTuple):
    """Partition into stages by measured time.

    Args:
        stages: number of modules of each stage, separated by commas.
        link_seconds, stage_seconds: forward and backward of a micro-batch, by module and by stage.
        stage_bytes: planned peak memory of each stage, if there is a budget.
        fastest: the partition that is faster but does not keep the budget; empty if this is the fastest.
    """

    stages: str
    link_seconds: Sequence[float]
    stage_seconds: Sequence[float]
    stage_bytes: Sequence[int] = ()
    fastest: str = ""

    @property
    def imbalance(self) -> float:
        """Seconds of the slowest stage over the mean."""
        return max(self.stage_seconds) * len(self.stage_seconds) / sum(self.stage_seconds)

    def record(self) -> dict[str, Any]:
        """Return the event `stages` of the run."""
        return {**self._asdict(), "imbalance": self.imbalance}

    def __str__(self) -> str:
        slowest, whole = 1e3 * max(self.stage_seconds), 1e3 * sum(self.stage_seconds)
        return (
            f"stages: {self.stages} modules (the slowest takes {slowest:.3g} of {whole:.3g} ms per"
            f" micro-batch, {self.imbalance:.2f} times the mean{self._budget_text}); set"
            f" stages={self.stages} in the strategy to keep them"
        )

    @property
    def _budget_text(self) -> str:
        if not self.fastest:
            return ""
        most = format_bytes(max(self.stage_bytes))
        return f"; {self.fastest} is faster but exceeds memory.budget, this needs {most}"


def measure_and_choose_stages(
    recipe: Recipe, task: Task, cluster: Cluster, processes: int, device: torch.device
) -> StageChoice:
    """Measure on the ranks of a cluster, and choose stages for a job of `processes` processes; collective.

    Args:
        recipe: its strategy has its replicas filled in.
    """
    shards = num_micro_batches(recipe, processes)
    with torch.random.fork_rng():  # the run draws the same random numbers as without a measurement
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
    """Replace `stages=time` by numbers of modules, measured here for a job of `processes` processes.

    A memory plan needs the lengths of the stages, and plans them without the processes of the job.

    Raises:
        StrategyError, TaskError: as `choose_stages`.
    """
    if not recipe.strategy.has_timed_stages:
        return recipe
    task, (most, limit_key) = prepare_data(task, recipe), max_sharers(recipe)
    strategy = resolve_strategy(recipe.strategy, processes=processes, shards=most, limit_key=limit_key)
    choice = measure_and_choose_stages(
        recipe.replace(strategy=strategy), task, Cluster.single(), processes, torch.device("cpu")
    )
    return recipe.replace(strategy=recipe.strategy.replace(stages=choice.stages))


def _make_choice(spans: Sequence[range], seconds: Sequence[float]) -> StageChoice:
    return StageChoice(_spell_stages(spans), seconds, [sum(seconds[i] for i in span) for span in spans])


def _spell_stages(spans: Sequence[range]) -> str:
    return ",".join(str(len(span)) for span in spans)


def _within_budget(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    processes: int,
    seconds: Sequence[float],
    sizes: Sequence[int],
    chunks: int,
) -> tuple[list[range], list[int]]:
    """Return the partition that the first rank chooses, with its planned bytes, on all ranks; collective."""
    group = Mesh.build(cluster, {"replica": cluster.world_size}).world
    local: dict[str, Any] = {}
    # Planning takes seconds, and its result is small: the other ranks receive it.
    if group.rank == 0:
        try:
            cut = cut_within_budget(recipe, task, processes, in_nanoseconds(seconds), sizes, chunks)
            local = {"ends": [span.stop for span in cut.places], "bytes": cut.stage_bytes}
        except (StrategyError, TaskError) as error:
            local = {"what": error.what, "where": error.where, "next_step": error.next_step}
    texts = all_gather_texts(json.dumps(local), group, Net(recipe.runtime.deadline_seconds))
    chosen = json.loads(texts[0])
    if "what" in chosen:
        raise StrategyError(**chosen)
    return [range(a, b) for a, b in pairwise((0, *chosen["ends"]))], chosen["bytes"]


def in_nanoseconds(seconds: Sequence[float]) -> list[int]:
    return [round(value * _NANOSECONDS) for value in seconds]


def partition_by_time(seconds: Sequence[float], sizes: Sequence[int], num_parts: int) -> list[range]:
    """Return contiguous parts, each with parameters, of which the slowest is as fast as possible; pure.

    Args:
        seconds: of each module.
        sizes: number of parameters of each module.
    Source: the exact dynamic program of `partition_evenly`, with times in place of numbers of parameters.
    """
    return partition_evenly(in_nanoseconds(seconds), num_parts, sizes)
