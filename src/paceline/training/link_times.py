"""Seconds that each module of a chain takes, measured on the ranks of a cluster.

Every rank measures some of the modules, each by itself: forward and backward of one micro-batch on a copy.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.cluster import Cluster
from paceline.comm import Net
from paceline.comm.text import gather_texts
from paceline.data import collate_samples
from paceline.layout import Precision
from paceline.layout.holding import without_values
from paceline.layout.pipeline import chain_of
from paceline.layout.pipeline.chain import as_tuple, check_chain
from paceline.layout.pipeline.view import Answers, asked
from paceline.mesh import Mesh
from paceline.models.dropout import set_micro_batch_key
from paceline.recipe import Recipe
from paceline.task import Task

_REPEATS = 3
Run = Callable[[nn.Module, Any], Any]


def measure_links(
    recipe: Recipe, task: Task, cluster: Cluster, shards: int, device: torch.device
) -> list[float]:
    """Seconds of forward and backward of one micro-batch, by link; collective, equal on every rank."""
    check_chain(task, task.model, chain_of(task, task.model))
    samples = -(-recipe.batch.size // shards)
    runs = _runs(recipe, task, samples, device)
    world = cluster.world_size
    mine = {k: run() for k, run in enumerate(runs) if k % world == cluster.global_rank}
    group = Mesh.build(cluster, {"replica": world}).world
    texts = gather_texts(json.dumps(mine), group, Net(recipe.runtime.deadline_seconds))
    found = {int(k): float(one) for text in texts for k, one in json.loads(text).items()}
    return [found[k] for k in sorted(found)]


def _runs(recipe: Recipe, task: Task, samples: int, device: torch.device) -> list[Callable[[], float]]:
    """What measures each link, whose input has the shape that it has in the chain."""
    there = [task.data[k % len(task.data)] for k in range(max(1, samples))]
    batch = collate_samples(task, there, device)
    given = asked(task.loss, batch, training=True)
    compute = recipe.precision.compute
    precision = Precision("fp32" if compute == "auto" else compute, device.type)
    links = chain_of(task, task.model)
    inputs = _shapes(task, collate_samples(task, there, torch.device("meta")))
    found: list[Callable[[], float]] = []
    for number, link in enumerate(links):
        first, last = number == 0, number == len(links) - 1
        run: Run = (lambda twin, _: twin(*given.inputs, **given.named)) if first else _called
        if last:
            run = partial(_answered, task, batch, run)
        found.append(partial(_seconds, link, run, inputs[number], precision, device))
    return found


def _shapes(task: Task, batch: Any) -> list[tuple[Tensor, ...]]:
    """What goes into each link, as shapes; nothing for the first."""
    model = without_values(task.model).train()
    set_micro_batch_key(model, 0)
    given = asked(task.loss, batch, training=True)
    found: list[tuple[Tensor, ...]] = [()]
    with torch.no_grad():
        for number, link in enumerate(chain_of(task, model)):
            x = link(*found[-1]) if number else link(*given.inputs, **given.named)
            found.append(as_tuple(x))
    return found


def _called(twin: nn.Module, x: Any) -> Any:
    return twin(*x)


def _answered(task: Task, batch: Any, run: Run, twin: nn.Module, x: Any) -> Tensor:
    return task.loss(Answers(lambda: run(twin, x)), batch).total


def _seconds(
    link: nn.Module, run: Run, shapes: Sequence[Tensor], precision: Precision, device: torch.device
) -> float:
    """The shortest of some forwards and backwards of a copy, after one that is not counted."""
    twin, times = with_memory(link).to(device), []
    x = [
        filled(shape.shape, shape.dtype).to(device).requires_grad_(shape.is_floating_point())
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


def with_memory(link: nn.Module) -> nn.Module:
    """A copy; parameters without memory get some, with small values, and buffers with zeros."""
    twin = copy.deepcopy(link).train()
    for module in twin.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                values = torch.empty(p.shape, dtype=p.dtype).normal_(std=0.02)
                module._parameters[name] = nn.Parameter(values, p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                module._buffers[name] = torch.zeros(b.shape, dtype=b.dtype)
    return twin


def filled(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An input of a module: numbers of ordinary size, or zeros where it holds none."""
    if not dtype.is_floating_point:
        return torch.zeros(sizes, dtype=dtype)
    return torch.randn(sizes, dtype=dtype)
