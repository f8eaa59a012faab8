"""The plan of a job under one number format: what every rank holds, and what a micro-batch takes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.layout import Precision
from paceline.layout.holding import without_values
from paceline.layout.pipeline.chain import chain_of
from paceline.layout.recompute import recomputed_blocks
from paceline.plan.forms import (
    Sizes,
    Sums,
    bytes_of,
    gathered_by_block,
    kept_for_rounds,
    read_in_turn,
    sizes_of,
    sums_of,
    trains_alone,
)
from paceline.plan.layers import layer_rows, layers_of
from paceline.plan.messages import buffer_bytes, late_bytes, near_stages
from paceline.plan.moments import Walk, Work, first_step, in_agreement, in_update
from paceline.plan.parts import Parts, RankMemory
from paceline.plan.ranks import CPU, Place, fake_model, places
from paceline.plan.rehearsal import Footprint, Rehearsal
from paceline.plan.updates import Update, update_of
from paceline.recipe import Recipe, num_micro_batches
from paceline.schedule import Action, Table
from paceline.slot import trained_parameters
from paceline.task import Task
from paceline.training.schedules import schedule_of


class _Basis(NamedTuple):
    """What the moments of a rank are made of."""

    still: Parts
    sums: Sums
    sizes: Sizes
    work: Work


class Planner:
    """Ranks that are alike share what is found for them.

    Args:
        recipe: its strategy has its replicas and stages filled in.
        task: as a run settles it; its model may be built without memory, and is not changed.
        processes, nodes: in the job, and on which they run.
        compute: number format of forward and backward.
    """

    def __init__(self, recipe: Recipe, task: Task, processes: int, nodes: int, compute: str) -> None:
        self.recipe, self.processes = recipe, processes
        self._task = task
        self._model = without_values(task.model)
        self._shards = num_micro_batches(recipe, processes)
        self._precision = Precision(compute, CPU.type, caches=not recipe.is_ordered)
        self._item_bytes = {s.name: p.element_size() for s, p in trained_parameters(self._model).items()}
        self._names = {number: name for number, (name, _) in layers_of(task, self._model).items()}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._found: dict[tuple[int, int], list[Footprint]] = {}
        self._update: Update | None = None
        self._per_host = -(-processes // nodes) if recipe.strategy.path.in_memory else 0
        self._in_common = self._per_host == processes
        self._places = list(places(recipe, task, self._model, processes))

    def ranks(self) -> list[RankMemory]:
        """All of the first replica."""
        return [self._rank(place) for place in self._places]

    def walks(self) -> Iterator[tuple[Place, Work, list[Walk]]]:
        """By rank of the first replica, its work, and its ways through the first step and a later one."""
        for place in self._places:
            basis = self._basis(place)
            yield place, basis.work, list(_walks(basis).values())

    def chunks(self) -> list[Footprint]:
        """What a micro-batch takes in each chunk of the model, as the first rank of each runs it."""
        return self._footprints(self._places[0])

    def _basis(self, place: Place) -> _Basis:
        held = list(place.held.values())
        sizes, keeps = sizes_of(held, self._item_bytes), all(one.kept for one in held)
        frees = any(one.frees for one in held)
        meets, common = sizes.shared > 0, self._in_common
        sums = sums_of(self.recipe, sizes, self._shards, frees=frees, meets=meets, common=common)
        work = self._work(place)  # which finds out what an update takes
        return _Basis(self._still(place, sizes, sums, keeps=keeps), sums, sizes, work)

    def _rank(self, place: Place) -> RankMemory:
        held = list(place.held.values())
        still, sums, sizes, work = basis = self._basis(place)
        assert self._update is not None  # it was found with the work
        updated = [one.updates for one in held if one.updates is not None]
        taken = self._update.takes([bytes_of(slot, self._item_bytes) for slot in updated])
        sharers = self.recipe.strategy.shard if all(one.kept for one in held) else 1
        found = {
            "building": Parts(parameters=max(still.parameters, self._built())),
            **{name: walk.most() for name, walk in _walks(basis).items()},
            "update": in_update(
                replace(still, gathered=0), sums, sizes, taken, sharers=sharers, common=self._in_common
            ),
        }
        if trains_alone(self.recipe):
            found["agreement"] = in_agreement(still, sums, sizes)
        if work.evaluation:
            between = sums.stays + sums.own
            found["evaluation"] = replace(still, gradients=between, activations=work.evaluation)
        layers = layer_rows(self._names, place.held, work.footprints, self._item_bytes, self._update.kept)
        return RankMemory(place.rank, place.coordinates["pipeline"], found, layers)

    def _still(self, place: Place, sizes: Sizes, sums: Sums, *, keeps: bool) -> Parts:
        """What stays while a rank trains."""
        recipe, fixed = self.recipe, self._fixed(place)
        assert self._update is not None
        moments = int(self._update.kept * sizes.updates)
        moments += sizes.updates if recipe.average.decay is not None else 0
        begun, movements = kept_for_rounds(recipe, sizes)
        copies, reads = recipe.strategy.degrees["replica"], keeps and self._in_common
        shard = recipe.strategy.shard
        read = read_in_turn(sizes, shard) if reads and shard > 1 else 0
        saved = fixed + sizes.updates + moments
        snapshot = saved if copies == 1 else min(saved, -(-saved // copies) + sizes.largest)
        return Parts(
            parameters=fixed + (sizes.computes if keeps else sizes.updates),
            gathered=0 if keeps or self._in_common else self._gathered(place, sizes),
            moments=moments + begun,
            wire=sums.buckets + movements + self._mail(place) + read,
            snapshot=snapshot if self._saves() else 0,
        )

    def _mail(self, place: Place) -> int:
        """Memory in which the messages of a stage lie for its neighbours on its host."""
        if place.stage is None:
            return 0
        number, stages = place.stage.stage, place.stage.num_stages
        table = self._table(stages)
        own = self._footprints(place, table.parts[number])[number::stages]
        near = near_stages(self.recipe.strategy.degrees, place.rank, self._per_host)
        return buffer_bytes(own, table, number, near)

    def _table(self, num_stages: int) -> Table:
        """Of the rank that has most micro-batches."""
        return schedule_of(self.recipe.strategy)(num_stages, self._most)

    @property
    def _most(self) -> int:
        """Micro-batches of the rank that has most."""
        strategy = self.recipe.strategy
        return -(-self._shards // (strategy.degrees["replica"] * strategy.shard))

    def _saves(self) -> bool:
        """Whether a copy for a checkpoint stays in memory while the run goes on."""
        every = self.recipe.checkpoint
        return every.mode == "background" and (every.every_steps > 0 or every.every_minutes > 0)

    def _built(self) -> int:
        """A model that is not built without memory is there whole before it is cut."""
        return sum(p.nbytes for p in self._task.model.parameters() if not p.is_meta)

    def _fixed(self, place: Place) -> int:
        """Frozen parameters, and buffers; those of the state are there three times around a step."""
        modules: Sequence[nn.Module] = [self._model] if place.stage is None else place.stage.links
        frozen = {p for m in modules for p in m.parameters() if not p.requires_grad}
        buffers = {b for m in modules for b in m.buffers()}
        kept = {t for m in modules for t in m.state_dict(keep_vars=True).values()}
        around = sum(b.nbytes for b in buffers if b in kept)
        return sum(t.nbytes for t in (*frozen, *buffers)) + 2 * around

    def _gathered(self, place: Place, sizes: Sizes) -> int:
        """Whole parameters under ZeRO 3; inside a stage they are there for a whole run."""
        shard = self.recipe.strategy.shard
        if place.stage is not None:
            return gathered_by_block([], sizes.computes, shard)
        names = {id(p): slot.name for slot, p in trained_parameters(self._model).items()}
        found, left = [], {name: bytes_of(one.computes, self._item_bytes) for name, one in place.held.items()}
        for block in recomputed_blocks(self._model, self._task.blocks):
            own = [names[id(p)] for p in block.parameters() if names.get(id(p)) in left]
            found.append(sum(left.pop(name) for name in own))
        return gathered_by_block(found, sum(left.values()), shard)

    # -- what one micro-batch takes ------------------------------------------------------------------------

    def _work(self, place: Place) -> Work:
        """What a rank does in a step, and what each of its chunks takes for it."""
        if place.stage is None:
            footprints = self._footprints(place)
            order = [Action(kind, k) for k in range(self._most) for kind in "FB"]
            total = sum(bytes_of(one.computes, self._item_bytes) for one in place.held.values())
            return Work(order, footprints, [total])
        number, stages = place.stage.stage, place.stage.num_stages
        table = self._table(stages)
        order, parts = list(table.orders[number]), table.parts
        sizes = [0] * place.stage.num_chunks
        for one in place.held.values():
            sizes[one.chunk] += bytes_of(one.computes, self._item_bytes)
        own = self._footprints(place, parts[number])[number::stages]
        before, after = (parts[number] // parts[n % stages] for n in (number - 1, number + 1))
        divided = sum(max(0, before - 1) * f.arriving + max(0, after - 1) * f.departing for f in own)
        near = near_stages(self.recipe.strategy.degrees, place.rank, self._per_host)
        return Work(order, own, sizes, divided + late_bytes(own, table, number, near))

    def _footprints(self, place: Place, parts: int = 1) -> list[Footprint]:
        """Of all chunks of the model, as tensor ranks at this place run a micro-batch, or a part of one."""
        of = place.coordinates["tensor"], parts
        if of not in self._found:
            recipe, fake, task = self.recipe, self._fake, self._task
            found = fake_model(recipe, task, place, self.processes, fake)
            if self._update is None:
                self._update = update_of(recipe, task, found.model, fake)
            samples = -(-recipe.batch.size // (self._shards * parts))
            evaluated = 0 if task.held_out is None else recipe.evaluate.batch
            layers = {number: layer for number, (_, layer) in layers_of(task, found.model).items()}
            rehearsal = Rehearsal(task, fake, self._precision, samples, evaluated, found.exchanged, layers)
            self._found[of] = rehearsal.run(found.model, self._chunks(found.model))
        return self._found[of]

    def _chunks(self, model: nn.Module) -> list[list[nn.Module]] | None:
        """The links of every chunk, those of all stages one after another; None: there are no stages."""
        by_number = {
            chunk * place.stage.num_stages + place.stage.stage: len(links)
            for place in self._places
            if place.stage is not None
            for chunk, links in enumerate(place.stage.chunks)
        }
        if not by_number:
            return None
        links = chain_of(self._task, model)
        ends = accumulate((by_number[number] for number in sorted(by_number)), initial=0)
        return [links[start:stop] for start, stop in pairwise(ends)]


def _walks(basis: _Basis) -> dict[str, Walk]:
    new = replace(basis.still, moments=0, snapshot=0)
    return {
        "first step": Walk(new, first_step(basis.sums), basis.work),
        "backward": Walk(basis.still, basis.sums, basis.work),
    }
