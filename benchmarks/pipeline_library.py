"""`torch.distributed.pipelining` in a loop as a careful user writes it: the schedule, one sum, clip, update.

Stages hold the same modules as Paceline's, and take the same samples in the same micro-batches. Norm and loss
go in one sum over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils.data import default_collate

from benchmarks.loops import adamw, autocast_of, set_rate
from benchmarks.measure import Side
from benchmarks.subjects import Subject
from paceline.data import KeyedOrder, LockstepWork
from paceline.job.cluster import Cluster
from paceline.parallel.pipeline import module_chain, partition_evenly

SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved:2": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
"""By Paceline's word. Zero-bubble over one stage of each rank is ZB-H1, as ours."""
_TAKES_ONE = ("gpipe", "1f1b")
_PLANNED_STEPS = 500


@dataclass(frozen=True)
class Ends:
    """What a pipeline's first and last stage do with a batch.

    Args:
        split: of a batch, what the model is called with, and what the loss compares.
        loss: of what came out and the latter, the mean.
    """

    split: Callable[[Any], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


class TorchPipeline:
    """One rank of a pipeline.

    Args:
        schedule: a word of `SCHEDULES`.
        num_chunks: of each rank.
    """

    def __init__(
        self, subject: Subject, ends: Ends, schedule: str, cluster: Cluster, num_chunks: int = 1
    ) -> None:
        self._subject, self._ends, self._cluster = subject, ends, cluster
        self._micro_batches, self._taken = subject.recipe.batch.shards or 1, 0
        order = KeyedOrder(len(subject.task.data), subject.recipe.batch.size, subject.recipe.seed)
        work = LockstepWork(order, self._micro_batches, subject.recipe.seed, 0, 1)
        self._plan = [
            [int(i) for micro_batch in work.micro_batches(step) for i in micro_batch.indices]
            for step in range(_PLANNED_STEPS)
        ]
        chunks = _own_chunks(subject, cluster, num_chunks)
        self._model = nn.ModuleList(chunks)
        self._optimizer = adamw(self._model, subject.recipe)
        self._autocast = autocast_of(subject.recipe)
        num_stages = cluster.world_size * num_chunks
        stages = [
            PipelineStage(
                chunk, cluster.global_rank + k * cluster.world_size, num_stages, torch.device("cpu")
            )
            for k, chunk in enumerate(chunks)
        ]
        self._schedule = SCHEDULES[schedule](
            stages[0] if schedule in _TAKES_ONE else stages, self._micro_batches, loss_fn=ends.loss
        )

    def step(self) -> float:
        """One update; returns the mean loss, on every rank."""
        set_rate(self._optimizer, self._subject.recipe, self._taken)
        self._optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        with self._autocast():
            self._run(losses)
        grads = [p.grad for p in self._model.parameters() if p.grad is not None]
        loss = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        both = torch.stack((torch.stack(torch._foreach_norm(grads)).square().sum(), loss))
        dist.all_reduce(both)
        squares, mean = both.tolist()
        factor = (self._subject.recipe.optimizer.clip_norm or math.inf) / (math.sqrt(squares) + 1e-6)
        if factor < 1.0:
            torch._foreach_mul_(grads, factor)
        self._optimizer.step()
        self._taken += 1
        return mean

    def _run(self, losses: list[Tensor]) -> None:
        first, last = (self._cluster.global_rank == place for place in (0, self._cluster.world_size - 1))
        if not (first or last):
            self._schedule.step()
            return
        data, collate = self._subject.task.data, self._subject.task.collate or default_collate
        inputs, targets = self._ends.split(collate([data[i] for i in self._plan[self._taken]]))
        given = (inputs,) if first else ()
        if last:
            self._schedule.step(*given, target=targets, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*given, return_outputs=False)

    def side(self, name: str) -> Side:
        """As a side of a comparison."""
        return Side(name, self.step)


def _own_chunks(subject: Subject, cluster: Cluster, num_chunks: int) -> Sequence[nn.Module]:
    """What this rank runs, cut as Paceline cuts it."""
    task = subject.fresh()
    links = module_chain(task, task.model.train())
    weights = [sum(p.numel() for p in link.parameters()) for link in links]
    places = partition_evenly(weights, cluster.world_size * num_chunks)
    own = range(cluster.global_rank, len(places), cluster.world_size)
    return [nn.Sequential(*(links[i] for i in places[k])) for k in own]
