"""What a rank does in a step, and what one micro-batch takes of it, found once for ranks that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.layout import Precision
from paceline.layout.holding import without_values
from paceline.layout.pipeline import cut_model
from paceline.layout.pipeline.chain import chain_of
from paceline.layout.sizes import bytes_of
from paceline.plan.lanes import shards_side_by_side, stages_side_by_side
from paceline.plan.layers import layers_of
from paceline.plan.messages import late_bytes, near_stages
from paceline.plan.moments import Work
from paceline.plan.ranks import CPU, Place, fake_model
from paceline.plan.rehearsal import Footprint, Rehearsal
from paceline.plan.updates import Update, update_of
from paceline.recipe import Recipe, num_micro_batches
from paceline.schedule import Action, Table
from paceline.slot import trained_parameters
from paceline.task import Task
from paceline.training.schedules import schedule_of


class MicroBatches:
    """Of one job under one number format.

    Args:
        recipe, task, processes, compute: see `Planner`.
        places: all ranks of the first replica.
        ranks_per_host: of those whose messages lie in memory of their host; 0: no messages do.
    Attributes:
        most: micro-batches of the rank that has most.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        places: Sequence[Place],
        processes: int,
        compute: str,
        *,
        ranks_per_host: int,
    ) -> None:
        self._recipe, self._task, self._places, self._processes = recipe, task, places, processes
        self._per_host, strategy = ranks_per_host, recipe.strategy
        self._shards = num_micro_batches(recipe, processes)
        self.most = -(-self._shards // ((strategy.replicas or 1) * strategy.shard))
        self._precision = Precision(compute, CPU.type, caches=not recipe.is_ordered)
        model = without_values(task.model)
        self._item_bytes = {slot.name: p.element_size() for slot, p in trained_parameters(model).items()}
        stages = range(strategy.pipeline if strategy.pipeline > strategy.stage_ranks else 0)
        self._side_by_side = [cut_model(task, model, len(stages), stage) for stage in stages]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._found: dict[tuple[int, int, int], list[Footprint]] = {}
        self._update: Update | None = None

    @property
    def update(self) -> Update:
        """What an update takes and keeps."""
        if self._update is None:
            self.footprints(self._places[0])
        assert self._update is not None
        return self._update

    def table(self, num_stages: int) -> Table:
        """Of the rank that has most micro-batches."""
        return schedule_of(self._recipe.strategy)(num_stages, self.most)

    def work(self, place: Place) -> Work:
        """What a rank does in a step, and what each of its chunks takes for it."""
        if place.stage is None:
            return self._of_threads(place)
        number, stages = place.stage.stage, place.stage.num_stages
        table = self.table(stages)
        order, parts = list(table.orders[number]), table.parts
        sizes = [0] * place.stage.num_chunks
        for one in place.held.values():
            sizes[one.chunk] += bytes_of(one.computes, self._item_bytes)
        own = self.footprints(place, parts[number])[number::stages]
        before, after = (parts[number] // parts[n % stages] for n in (number - 1, number + 1))
        divided = sum(max(0, before - 1) * f.arriving + max(0, after - 1) * f.departing for f in own)
        near = near_stages(self._recipe.strategy.degrees, place.rank, self._per_host)
        return Work(order, own, sizes, divided + late_bytes(own, table, number, near))

    def _of_threads(self, place: Place) -> Work:
        """Of a process that has no stage of its own: all of them, or none."""
        sizes, found = self._item_bytes, self.footprints(place)
        if cuts := self._side_by_side:
            return stages_side_by_side(cuts, place.held, sizes, found, self.table(len(cuts)))
        order = [Action(kind, k) for k in range(self.most) for kind in "FB"]
        work = Work(order, found, [sum(bytes_of(one.computes, sizes) for one in place.held.values())])
        lanes = self._recipe.strategy.lanes
        return work if lanes == 1 else shards_side_by_side(work, lanes, self.most)

    def footprints(self, place: Place, parts: int = 1) -> list[Footprint]:
        """Of all chunks of the model, as ranks at this place run a micro-batch, or a part of one."""
        of = place.coordinates["tensor"], place.coordinates["context"], parts
        if of not in self._found:
            recipe, fake, task = self._recipe, self._fake, self._task
            found = fake_model(recipe, task, place, self._processes, fake)
            if self._update is None:
                self._update = update_of(recipe, task, found.model, fake)
            samples = -(-recipe.batch.size // (self._shards * parts))
            evaluated = 0 if task.held_out is None else recipe.evaluate.batch
            layers = {number: layer for number, (_, layer) in layers_of(task, found.model).items()}
            rehearsal = Rehearsal(
                *(task, found, fake, self._precision), samples=samples, evaluated=evaluated, layers=layers
            )
            self._found[of] = rehearsal.run(self._chunks(found.model))
        return self._found[of]

    def _chunks(self, model: nn.Module) -> list[list[nn.Module]] | None:
        """The links of every chunk, those of all stages one after another; None: there are no stages."""
        lengths = [len(cut.links) for cut in self._side_by_side] or self._lengths()
        if not lengths:
            return None
        links, ends = chain_of(self._task, model), accumulate(lengths, initial=0)
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
