"""The work of a rank in a step and the memory of its micro-batches, computed once for ranks that are alike.

It also plans messages between stages: buffers in the shared memory of a host, and messages that a backend
carries. Nothing of the optimizer or of reductions is counted here, but `update` measures the optimizer, since
that needs the fake model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.comm.routes.host_messages import round_up_to_pages
from paceline.job.mesh import AXES
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.pipeline.model_chain import module_chain
from paceline.parallel.pipeline.p2p_message import HEADER_BYTES
from paceline.parallel.pipeline.pipeline_runner import MAX_EVALUATION_LEAD
from paceline.parallel.pipeline.strategy_schedule import make_schedule
from paceline.parallel.placement import slot_bytes
from paceline.parallel.sharded_model import copy_to_meta
from paceline.pipeline_schedule.schedule_table import (
    PipelineAction,
    ScheduleTable,
    max_messages_in_flight,
    next_chunk,
    previous_chunk,
)
from paceline.plan.activation_memory import LATE_MESSAGES, FakeTensorRun, MicroBatchFootprint
from paceline.plan.layer_memory import model_layers
from paceline.plan.optimizer_memory import UpdateMemory, measure_update
from paceline.plan.simulated_ranks import CPU, SimulatedRank, make_fake_model
from paceline.plan.step_peak import StepWork
from paceline.recipe.recipe import Recipe, num_micro_batches
from paceline.state.slot import trained_parameters
from paceline.task import Task


def stages_on_host(degrees: Mapping[str, int], rank: int, ranks_per_host: int) -> set[int]:
    """Return the stages of a rank's pipeline that run on its host, including its own.

    Args:
        degrees: size of each mesh axis.
        rank: global rank; ranks of a host are consecutive.
        ranks_per_host: 0: messages do not go through shared memory.
    """
    stride = prod(degrees[axis] for axis in AXES[AXES.index("pipeline") + 1 :])
    first_stage = rank - rank // stride % degrees["pipeline"] * stride
    first = rank - rank % max(1, ranks_per_host)
    host_ranks = range(first, first + ranks_per_host)
    return {stage for stage in range(degrees["pipeline"]) if first_stage + stage * stride in host_ranks}


def unreleased_message_bytes(
    chunks: Sequence[MicroBatchFootprint], table: ScheduleTable, stage: int, near: Collection[int]
) -> int:
    """Return the bytes of messages that the thread of a backend frees late; 0 if it carries none.

    Args:
        chunks: footprints of the chunks of one rank.
        near: stages whose messages go through shared memory.
    """
    is_used = not _message_sizes(chunks, table, stage).keys() <= {*near}
    return (
        LATE_MESSAGES * max(footprint.arriving + footprint.departing for footprint in chunks)
        if is_used
        else 0
    )


def message_buffer_bytes(
    chunks: Sequence[MicroBatchFootprint],
    table: ScheduleTable,
    stage: int,
    near: Collection[int],
) -> int:
    """Return the most bytes of shared memory for messages of a stage to its neighbours on its host.

    Args:
        chunks: footprints of the chunks of the stage.
        near: stages on its host.
    """
    return sum(
        _buffers_bytes(max_messages_in_flight(table, stage, to), *map(max, zip(*pairs, strict=True)))
        for to, pairs in _message_sizes(chunks, table, stage).items()
        if to in near
    )


def _message_sizes(
    chunks: Sequence[MicroBatchFootprint], table: ScheduleTable, stage: int
) -> dict[int, list[tuple[int, int]]]:
    """Return (bytes in training, bytes in an evaluation) of the messages to each neighbour, by chunk."""
    sizes: dict[int, list[tuple[int, int]]] = {}
    for chunk, footprint in enumerate(chunks):
        action = PipelineAction("F", 0, chunk)
        if (following := next_chunk(stage, action, table.num_stages, table.chunks)) is not None:
            sizes.setdefault(following[0], []).append((footprint.departing, footprint.departing_evaluation))
        if (previous := previous_chunk(stage, action, table.num_stages)) is not None:
            sizes.setdefault(previous[0], []).append((footprint.arriving, 0))
    return sizes


def _buffers_bytes(count: int, trained: int, evaluated: int) -> int:
    """Return the bytes of buffers for `count` messages of a step, some of which an evaluation also uses."""
    shared = MAX_EVALUATION_LEAD + 1 if evaluated else 0
    both = shared * _one_buffer_bytes(max(trained, evaluated))
    return both + max(0, count - shared) * _one_buffer_bytes(trained)


def _one_buffer_bytes(num_bytes: int) -> int:
    return round_up_to_pages(HEADER_BYTES + num_bytes)


class MicroBatchMemory:
    """The memory of micro-batches of a job under one number format.

    Args:
        recipe, task, processes, compute: as in `MemoryPlanner`.
        ranks: all ranks of the first replica.
        ranks_per_host: ranks of a host that send messages through shared memory; 0: no messages do.
    Attributes:
        most: micro-batches of the rank that has most.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        ranks: Sequence[SimulatedRank],
        processes: int,
        compute: str,
        *,
        ranks_per_host: int,
    ) -> None:
        self._recipe, self._task, self._ranks, self._processes = recipe, task, ranks, processes
        self._per_host, strategy = ranks_per_host, recipe.strategy
        self._shards = num_micro_batches(recipe, processes)
        self.most = -(-self._shards // ((strategy.replicas or 1) * strategy.shard))
        self._precision = MixedPrecision(compute, CPU.type, caches=not recipe.is_ordered)
        model = copy_to_meta(task.model)
        self._item_bytes = {slot.name: p.element_size() for slot, p in trained_parameters(model).items()}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._footprints: dict[tuple[int, int, int], list[MicroBatchFootprint]] = {}
        self._update: UpdateMemory | None = None

    @property
    def update(self) -> UpdateMemory:
        """Return the memory of an update of the optimizer."""
        if self._update is None:
            self.footprints(self._ranks[0])
        assert self._update is not None
        return self._update

    def table(self, num_stages: int) -> ScheduleTable:
        """Return the schedule of the replica that has most micro-batches."""
        return make_schedule(self._recipe.strategy)(num_stages, self.most)

    def work(self, rank: SimulatedRank) -> StepWork:
        """Return the work of a rank in a step."""
        if rank.stage is None:
            order = [PipelineAction(kind, k) for k in range(self.most) for kind in "FB"]
            gradients = sum(
                slot_bytes(placement.computes, self._item_bytes) for placement in rank.held.values()
            )
            return StepWork(order, self.footprints(rank), [gradients])
        number, stages = rank.stage.stage, rank.stage.num_stages
        table = self.table(stages)
        order, parts = list(table.orders[number]), table.parts
        sizes = [0] * rank.stage.num_chunks
        for placement in rank.held.values():
            sizes[placement.chunk] += slot_bytes(placement.computes, self._item_bytes)
        chunks = self.footprints(rank, parts[number])[number::stages]
        # A neighbour that runs larger parts sends and takes several parts of this stage in one message.
        before, after = (parts[number] // parts[n % stages] for n in (number - 1, number + 1))
        divided = sum(max(0, before - 1) * f.arriving + max(0, after - 1) * f.departing for f in chunks)
        near = stages_on_host(self._recipe.strategy.degrees, rank.global_rank, self._per_host)
        return StepWork(order, chunks, sizes, divided + unreleased_message_bytes(chunks, table, number, near))

    def footprints(self, rank: SimulatedRank, parts: int = 1) -> list[MicroBatchFootprint]:
        """Return the footprints of all chunks of the model, for a rank with these coordinates.

        Args:
            parts: in how many parts the stage runs a micro-batch (`rechunk`).
        """
        key = rank.coordinates["tensor"], rank.coordinates["context"], parts
        if key not in self._footprints:
            recipe, fake, task = self._recipe, self._fake, self._task
            fake_model = make_fake_model(recipe, task, rank, self._processes, fake)
            if self._update is None:
                # Once for all ranks: the optimizer is the same, and its memory is per byte of a parameter.
                self._update = measure_update(recipe, task, fake_model.model, fake)
            # Rounded up: the largest micro-batch decides the peak.
            samples = -(-recipe.batch.size // (self._shards * parts))
            evaluated = 0 if task.held_out is None else recipe.evaluate.batch
            layers = {number: layer for number, (_, layer) in model_layers(task, fake_model.model).items()}
            run = FakeTensorRun(
                *(task, fake_model, fake, self._precision),
                samples=samples,
                evaluated=evaluated,
                layers=layers,
            )
            self._footprints[key] = run.run(self._chunks(fake_model.model))
        return self._footprints[key]

    def _chunks(self, model: nn.Module) -> list[list[nn.Module]] | None:
        """Return the modules of every chunk, in the order of the chain; None: there are no stages."""
        lengths = self._lengths()
        if not lengths:
            return None
        links, ends = module_chain(self._task, model), accumulate(lengths, initial=0)
        return [links[start:stop] for start, stop in pairwise(ends)]

    def _lengths(self) -> list[int]:
        """Return the number of modules of each chunk, in the order of the chain."""
        by_number = {
            chunk * rank.stage.num_stages + rank.stage.stage: len(links)
            for rank in self._ranks
            if rank.stage is not None
            for chunk, links in enumerate(rank.stage.chunks)
        }
        return [by_number[number] for number in sorted(by_number)]
