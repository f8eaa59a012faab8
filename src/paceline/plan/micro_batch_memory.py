"""What messages between stages take: by a backend, or in memory of their host. Pure.

What a rank does in a step, and what one micro-batch takes of it, found once for ranks that are alike.
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
    """Stages of a rank's pipeline that are on its host, its own too; ranks of a host follow each other.

    Args:
        degrees: size of each axis.
        ranks_per_host: 0: hosts do not count.
    """
    apart = prod(degrees[axis] for axis in AXES[AXES.index("pipeline") + 1 :])
    first_stage = rank - rank // apart % degrees["pipeline"] * apart
    first = rank - rank % max(1, ranks_per_host)
    here = range(first, first + ranks_per_host)
    return {stage for stage in range(degrees["pipeline"]) if first_stage + stage * apart in here}


def unreleased_message_bytes(
    own: Sequence[MicroBatchFootprint], table: ScheduleTable, stage: int, near: Collection[int]
) -> int:
    """Of messages that the thread of a backend has not let go of, if it carries any.

    Args:
        own: the chunks of one rank.
        near: stages whose messages it does not carry.
    """
    is_used = not _message_sizes(own, table, stage).keys() <= {*near}
    return LATE_MESSAGES * max(one.arriving + one.departing for one in own) if is_used else 0


def message_buffer_bytes(
    own: Sequence[MicroBatchFootprint],
    table: ScheduleTable,
    stage: int,
    near: Collection[int],
) -> int:
    """Of the most memory in which the messages of a stage may lie for its neighbours on one host.

    Args:
        own: the chunks of the stage.
        near: the stages of its host.
    """
    return sum(
        _buffers_bytes(max_messages_in_flight(table, stage, to), *map(max, zip(*pairs, strict=True)))
        for to, pairs in _message_sizes(own, table, stage).items()
        if to in near
    )


def _message_sizes(
    own: Sequence[MicroBatchFootprint], table: ScheduleTable, stage: int
) -> dict[int, list[tuple[int, int]]]:
    """By neighbour, bytes of a message in training and in an evaluation, by chunk."""
    sizes: dict[int, list[tuple[int, int]]] = {}
    for chunk, one in enumerate(own):
        action = PipelineAction("F", 0, chunk)
        if (goes := next_chunk(stage, action, table.num_stages, table.chunks)) is not None:
            sizes.setdefault(goes[0], []).append((one.departing, one.departing_evaluation))
        if (comes := previous_chunk(stage, action, table.num_stages)) is not None:
            sizes.setdefault(comes[0], []).append((one.arriving, 0))
    return sizes


def _buffers_bytes(count: int, trained: int, evaluated: int) -> int:
    """Of buffers for so many messages of a step, and for those of an evaluation."""
    few = MAX_EVALUATION_LEAD + 1 if evaluated else 0
    return few * _one_buffer_bytes(max(trained, evaluated)) + max(0, count - few) * _one_buffer_bytes(trained)


def _one_buffer_bytes(num_bytes: int) -> int:
    return round_up_to_pages(HEADER_BYTES + num_bytes)


class MicroBatchMemory:
    """Of one job under one number format.

    Args:
        recipe, task, processes, compute: see `MemoryPlanner`.
        places: all ranks of the first replica.
        ranks_per_host: of those whose messages lie in memory of their host; 0: no messages do.
    Attributes:
        most: micro-batches of the rank that has most.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        places: Sequence[SimulatedRank],
        processes: int,
        compute: str,
        *,
        ranks_per_host: int,
    ) -> None:
        self._recipe, self._task, self._places, self._processes = recipe, task, places, processes
        self._per_host, strategy = ranks_per_host, recipe.strategy
        self._shards = num_micro_batches(recipe, processes)
        self.most = -(-self._shards // ((strategy.replicas or 1) * strategy.shard))
        self._precision = MixedPrecision(compute, CPU.type, caches=not recipe.is_ordered)
        model = copy_to_meta(task.model)
        self._item_bytes = {slot.name: p.element_size() for slot, p in trained_parameters(model).items()}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._found: dict[tuple[int, int, int], list[MicroBatchFootprint]] = {}
        self._update: UpdateMemory | None = None

    @property
    def update(self) -> UpdateMemory:
        """What an update takes and keeps."""
        if self._update is None:
            self.footprints(self._places[0])
        assert self._update is not None
        return self._update

    def table(self, num_stages: int) -> ScheduleTable:
        """Of the rank that has most micro-batches."""
        return make_schedule(self._recipe.strategy)(num_stages, self.most)

    def work(self, place: SimulatedRank) -> StepWork:
        """What a rank does in a step, and what each of its chunks takes for it."""
        if place.stage is None:
            order = [PipelineAction(kind, k) for k in range(self.most) for kind in "FB"]
            gradients = sum(slot_bytes(one.computes, self._item_bytes) for one in place.held.values())
            return StepWork(order, self.footprints(place), [gradients])
        number, stages = place.stage.stage, place.stage.num_stages
        table = self.table(stages)
        order, parts = list(table.orders[number]), table.parts
        sizes = [0] * place.stage.num_chunks
        for one in place.held.values():
            sizes[one.chunk] += slot_bytes(one.computes, self._item_bytes)
        own = self.footprints(place, parts[number])[number::stages]
        before, after = (parts[number] // parts[n % stages] for n in (number - 1, number + 1))
        divided = sum(max(0, before - 1) * f.arriving + max(0, after - 1) * f.departing for f in own)
        near = stages_on_host(self._recipe.strategy.degrees, place.global_rank, self._per_host)
        return StepWork(order, own, sizes, divided + unreleased_message_bytes(own, table, number, near))

    def footprints(self, place: SimulatedRank, parts: int = 1) -> list[MicroBatchFootprint]:
        """Of all chunks of the model, as ranks at this place run a micro-batch, or a part of one."""
        of = place.coordinates["tensor"], place.coordinates["context"], parts
        if of not in self._found:
            recipe, fake, task = self._recipe, self._fake, self._task
            found = make_fake_model(recipe, task, place, self._processes, fake)
            if self._update is None:
                self._update = measure_update(recipe, task, found.model, fake)
            samples = -(-recipe.batch.size // (self._shards * parts))
            evaluated = 0 if task.held_out is None else recipe.evaluate.batch
            layers = {number: layer for number, (_, layer) in model_layers(task, found.model).items()}
            rehearsal = FakeTensorRun(
                *(task, found, fake, self._precision), samples=samples, evaluated=evaluated, layers=layers
            )
            self._found[of] = rehearsal.run(self._chunks(found.model))
        return self._found[of]

    def _chunks(self, model: nn.Module) -> list[list[nn.Module]] | None:
        """The links of every chunk, those of all stages one after another; None: there are no stages."""
        lengths = self._lengths()
        if not lengths:
            return None
        links, ends = module_chain(self._task, model), accumulate(lengths, initial=0)
        return [links[start:stop] for start, stop in pairwise(ends)]

    def _lengths(self) -> list[int]:
        """Numbers of links of the chunks that ranks have, in the order of the chain."""
        by_number = {
            chunk * place.stage.num_stages + place.stage.stage: len(links)
            for place in self._places
            if place.stage is not None
            for chunk, links in enumerate(place.stage.chunks)
        }
        return [by_number[number] for number in sorted(by_number)]
