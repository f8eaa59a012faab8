"""The plan of a job under one number format: what every rank holds, and what a micro-batch takes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from paceline.comm.reduction import behind_bytes
from paceline.data import build_order, longest_stretch
from paceline.layout.holding import without_values
from paceline.layout.recompute import recomputed_blocks
from paceline.layout.sizes import Sizes, bytes_of, sizes_of
from paceline.plan.coding import coding_bytes
from paceline.plan.flow import Flow
from paceline.plan.forms import Sums, carried_in_turn, gathered_by_block, moved_in_turn, sums_of
from paceline.plan.layers import bytes_by_block, layer_rows, layers_of
from paceline.plan.messages import buffer_bytes, near_stages
from paceline.plan.micro_batches import MicroBatches
from paceline.plan.moments import Walk, Work, first_step, in_agreement, in_update
from paceline.plan.parts import Parts, RankMemory
from paceline.plan.ranks import Place, places
from paceline.plan.rehearsal import Footprint
from paceline.recipe import Recipe, num_micro_batches
from paceline.recipe.specs import imported
from paceline.slot import trained_parameters
from paceline.sync.memory import Asked, RuleMemory
from paceline.task import Task
from paceline.training.feeds import intervals_of, num_steps_of


class _Basis(NamedTuple):
    """What the moments of a rank are made of."""

    still: Parts
    sums: Sums
    sizes: Sizes
    work: Work
    rule: RuleMemory


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
        self._item_bytes = {s.name: p.element_size() for s, p in trained_parameters(self._model).items()}
        self._names = {number: name for number, (name, _) in layers_of(task, self._model).items()}
        self._coding: dict[Sizes, int] = {}
        self._per_host = -(-processes // nodes) if recipe.strategy.path.in_memory else 0
        self._in_common = self._per_host == processes
        self._places = list(places(recipe, task, self._model, processes))
        self._micro_batches = MicroBatches(
            recipe, task, self._places, processes, compute, ranks_per_host=self._per_host
        )

    def ranks(self) -> list[RankMemory]:
        """All of the first replica."""
        return [self._rank(place) for place in self._places]

    def walks(self) -> Iterator[tuple[Place, Work, list[Walk]]]:
        """By rank of the first replica, its work, and its ways through the first step and a later one."""
        for place in self._places:
            basis = self._basis(place)
            yield place, basis.work, list(_walks(basis).values())

    @property
    def recomputes(self) -> bool:
        """Whether something could be computed again: not where a rule keeps the weights of a forward."""
        return not any(self._basis(place).rule.passes for place in self._places)

    def chunks(self) -> list[Footprint]:
        """What a micro-batch takes in each chunk of the model, as the first rank of each runs it."""
        return self._micro_batches.footprints(self._places[0])

    @property
    def rule(self) -> RuleMemory:
        """Of the first rank."""
        return self._basis(self._places[0]).rule

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes of the whole state, as a checkpoint would hold it, and of what ranks put together for it.

        Replicas that train alone have optimizers of their own, all of which are state.
        """
        strategy, model, rule = self.recipe.strategy, self._model, self.rule
        weights = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        alone = strategy.degrees["replica"] if strategy.rule.agrees == "replica" else 0
        kept = int(self._micro_batches.update.kept * weights)
        average = weights if self.recipe.average.decay is not None else 0
        saved = sum(t.nbytes for t in {*model.state_dict(keep_vars=True).values()}) + rule.saved
        return saved + average + kept * (1 + alone), kept * alone

    def _basis(self, place: Place) -> _Basis:
        held = list(place.held.values())
        sizes, keeps = sizes_of(held, self._item_bytes), all(one.kept for one in held)
        frees = any(one.frees for one in held)
        meets, common = sizes.shared > 0, self._in_common
        blocks, rest = ([], 0) if keeps or common else self._by_block(place)
        late = behind_bytes(blocks, rest) if blocks else 0
        sums = sums_of(self.recipe, sizes, self._shards, frees=frees, meets=meets, common=common, late=late)
        work = self._micro_batches.work(place)
        rule = self._rule(place, sizes)
        if rule.passes or not rule.trains:  # lets go of them with its update; or has the last ones that came
            sums = Sums(stays=0 if rule.passes else sizes.updates)
        return _Basis(self._still(place, sizes, sums, rule, keeps=keeps), sums, sizes, work, rule)

    def _rank(self, place: Place) -> RankMemory:
        held, basis = list(place.held.values()), self._basis(place)
        still, sums, sizes, work, rule = basis
        updated = [one.updates for one in held if one.updates is not None]
        update, stays = self._micro_batches.update, replace(still, gradients=sums.stays + sums.own)
        taken = update.takes([bytes_of(slot, self._item_bytes) for slot in updated])
        gathers = all(one.kept for one in held) and not self._in_common
        arriving = carried_in_turn(self.recipe, sizes) if gathers else 0
        found = {"building": Parts(parameters=max(still.parameters, self._built()))}
        found |= {name: walk.most() for name, walk in _walks(basis).items()}
        if rule.passes:
            sent = 0 if self._in_common else rule.sent
            found |= Flow(still, sizes, work.footprints[0], rule.passes, sent, taken).moments()
        elif rule.updates:
            parts = in_update(replace(still, gathered=0), sums, taken, arriving)
            found["update"] = replace(parts, gradients=parts.gradients + rule.at_update)
        if rule.agreement:
            found["agreement"] = in_agreement(still, sums, work, rule.agreement)
        if work.evaluation:
            found["evaluation"] = replace(stays, activations=work.evaluation)
        layers = layer_rows(self._names, place.held, work.footprints, self._item_bytes, update.kept)
        return RankMemory(place.rank, place.coordinates["pipeline"], found, layers, stays)

    def _rule(self, place: Place, sizes: Sizes) -> RuleMemory:
        """What the rule says that it keeps on a rank."""
        recipe, frozen, buffers = self.recipe, *self._untrained(place)
        steps = num_steps_of(recipe, build_order(recipe, self._task).steps_per_epoch)
        said: RuleMemory = imported(recipe.strategy.rule.memory)(
            Asked(
                recipe,
                place.held,
                self._item_bytes,
                sizes,
                self._state(sizes),
                frozen,
                buffers,
                rank=place.rank,
                processes=self.processes,
                stage=place.coordinates["pipeline"],
                stretch=longest_stretch(steps, intervals_of(recipe)),
                micro_batches=self._micro_batches.most,
            )
        )
        return said

    def _coded(self, place: Place, sizes: Sizes) -> int:
        if sizes not in self._coding:
            of, waits = (place.held, self._item_bytes), self._in_common or self.recipe.strategy.zero < 3
            self._coding[sizes] = coding_bytes(self.recipe, *of, self.processes, waits=waits)
        return self._coding[sizes]

    def _state(self, sizes: Sizes) -> int:
        """Of the optimizer, and the average of the weights."""
        average = sizes.updates if self.recipe.average.decay is not None else 0
        return int(self._micro_batches.update.kept * sizes.updates) + average

    def _still(self, place: Place, sizes: Sizes, sums: Sums, rule: RuleMemory, *, keeps: bool) -> Parts:
        """What stays while a rank trains."""
        recipe, fixed = self.recipe, self._fixed(place)
        moments = self._state(sizes) if rule.updates else 0
        copies = recipe.strategy.degrees["replica"]
        shard, weights = recipe.strategy.shard, sizes.computes if keeps else sizes.updates
        read = moved_in_turn(recipe, sizes, sums, common=self._in_common) if keeps and shard > 1 else 0
        saved = fixed + sizes.updates + moments
        snapshot = saved if copies == 1 else min(saved, -(-saved // copies) + sizes.largest)
        return Parts(
            parameters=fixed + rule.copies + rule.running + weights // rule.sharers,
            gathered=0 if keeps or self._in_common else gathered_by_block(*self._by_block(place), shard),
            moments=moments + rule.state,
            wire=sums.buckets + rule.wire + self._mail(place, rule) + read + self._coded(place, sizes),
            snapshot=snapshot if self._saves() else 0,
            messages=rule.messages,
        )

    def _mail(self, place: Place, rule: RuleMemory) -> int:
        """Memory in which the messages of a stage lie for its neighbours on its host."""
        if place.stage is None:
            return 0
        number, stages = place.stage.stage, place.stage.num_stages
        table = rule.flow or self._micro_batches.table(stages)
        own = self._micro_batches.footprints(place, table.parts[number])[number::stages]
        near = near_stages(self.recipe.strategy.degrees, place.rank, self._per_host)
        return buffer_bytes(own, table, number, near, together=rule.together)

    def _saves(self) -> bool:
        """Whether a copy for a checkpoint stays in memory while the run goes on."""
        of = self.recipe.checkpoint
        return of.mode == "background" and max(of.every_steps, of.every_minutes) > 0

    def _built(self) -> int:
        """A model that is not built without memory is there whole before it is cut."""
        return sum(p.nbytes for p in self._task.model.parameters() if not p.is_meta)

    def _fixed(self, place: Place) -> int:
        """Frozen parameters, and buffers; those of the state are there three times around a step."""
        frozen, saved = self._untrained(place)
        buffers = {b for m in self._modules(place) for b in m.buffers()}
        return frozen + sum(b.nbytes for b in buffers) + 2 * saved

    def _untrained(self, place: Place) -> tuple[int, int]:
        """Bytes of frozen parameters, and of buffers of the state."""
        modules = self._modules(place)
        frozen = {p for m in modules for p in m.parameters() if not p.requires_grad}
        kept = {t for m in modules for t in m.state_dict(keep_vars=True).values()}
        saved = {b for m in modules for b in m.buffers()} & kept
        return sum(p.nbytes for p in frozen), sum(b.nbytes for b in saved)

    def _modules(self, place: Place) -> Sequence[nn.Module]:
        return [self._model] if place.stage is None else place.stage.links

    def _by_block(self, place: Place) -> tuple[list[int], int]:
        """What ZeRO 3 gathers at a time; inside a stage it is there for a whole run."""
        sizes = {name: bytes_of(one.computes, self._item_bytes) for name, one in place.held.items()}
        blocks = recomputed_blocks(self._model, self._task.blocks) if place.stage is None else ()
        return bytes_by_block(self._model, blocks, sizes)


def _walks(basis: _Basis) -> dict[str, Walk]:
    """Ways through a step; none where no step has an end of its own."""
    if basis.rule.passes or not basis.rule.trains:
        return {}
    new = replace(basis.still, moments=0, snapshot=0)
    return {
        "first step": Walk(new, first_step(basis.sums), basis.work),
        "backward": Walk(basis.still, basis.sums, basis.work),
    }
