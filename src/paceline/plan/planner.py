"""The plan of a job under one number format: what every rank holds, and what a micro-batch takes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from paceline.data import build_order, longest_stretch
from paceline.layout.holding import without_values
from paceline.layout.recompute import recomputed_blocks
from paceline.layout.sizes import Sizes, bytes_of, sizes_of
from paceline.plan.coding import inside_replicas
from paceline.plan.fixed import fixed_bytes, untrained_bytes
from paceline.plan.flow import Flow
from paceline.plan.gathers import Gathers, gathers_of
from paceline.plan.handed_over import State
from paceline.plan.layers import layer_rows, layers_of, names_by_block
from paceline.plan.messages import buffer_bytes, near_stages
from paceline.plan.micro_batches import MicroBatches
from paceline.plan.moments import Walk, Work, first_step, in_agreement, in_update
from paceline.plan.parts import Parts, RankMemory
from paceline.plan.ranks import Place, places
from paceline.plan.reduced import Reduced, arriving_of
from paceline.plan.rehearsal import Footprint
from paceline.plan.side_by_side import SideBySide
from paceline.plan.sums import Sums, sums_of
from paceline.plan.travelling import travelling_bytes
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
    gathers: Gathers
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
        trained = trained_parameters(self._model)
        self._item_bytes = {slot.name: p.element_size() for slot, p in trained.items()}
        self._arriving = arriving_of(recipe, trained.values())
        self._names = {number: name for number, (name, _) in layers_of(task, self._model).items()}
        self._travelling: dict[Sizes, int] = {}
        self._rules: dict[int, RuleMemory] = {}
        self._reductions: dict[tuple[int, ...], tuple[Sums, Gathers]] = {}
        self._per_host = -(-processes // nodes) if recipe.strategy.path.in_memory else 0
        self._in_common = self._per_host == processes
        self._places = list(places(recipe, task, self._model, processes))
        self._micro_batches = MicroBatches(
            recipe, task, self._places, processes, compute, ranks_per_host=self._per_host
        )

    def ranks(self) -> list[RankMemory]:
        """All of the first replica."""
        return [self._rank(place) for place in self._places]

    def walks(self) -> Iterator[tuple[Place, Work, list[Walk | SideBySide]]]:
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

    def rule_of(self, number: int) -> RuleMemory:
        """What the rule keeps on one rank."""
        return self._basis(self._places[number % len(self._places)]).rule

    def own_sums(self, number: int) -> int:
        """Bytes of gradients that are there before any are."""
        return self._basis(self._places[number % len(self._places)]).sums.own

    def state_of(self, number: int) -> State:
        """The state of all, and what one rank has of it."""
        place, saved = self._places[number % len(self._places)], self.rule_of(number).saved
        return State(self.recipe, self._model, place.held, self._item_bytes, self._kept, saved)

    def _basis(self, place: Place) -> _Basis:
        sizes, work = sizes_of(place.held.values(), self._item_bytes), self._micro_batches.work(place)
        sums, gathers = self._reduction(place, work)
        if place.rank not in self._rules:
            self._rules[place.rank] = self._rule(place, sizes)
        rule = self._rules[place.rank]
        if rule.passes or not rule.trains:  # lets go of them with its update; or has the last ones that came
            sums = Sums(stays=0 if rule.passes else sizes.updates)
        still = self._still(place, sums, gathers, rule)
        return _Basis(still, sums, gathers, sizes, work, rule)

    def _reduction(self, place: Place, work: Work) -> tuple[Sums, Gathers]:
        """What sums and gathers take; the same on all ranks that share a state."""
        alike = tuple(n for axis, n in place.coordinates.items() if axis != "shard")
        if alike not in self._reductions:
            held, common, recipe = [*place.held.values()], self._in_common, inside_replicas(self.recipe)
            apart, sizes = not (common or all(x.kept for x in held)), sizes_of(held, self._item_bytes)
            of = Reduced(
                *(recipe, held, self._item_bytes, sizes, self._shards),
                common=common,
                arriving=self._arriving,
                completes=[name for one in work.footprints for name in one.completes],
                blocks=self._by_block(place) if apart else (),
            )
            self._reductions[alike] = sums_of(of), gathers_of(of)
        return self._reductions[alike]

    def _rank(self, place: Place) -> RankMemory:
        held, basis = list(place.held.values()), self._basis(place)
        still, sums, gathers, sizes, work, rule = basis
        updated = [one.updates for one in held if one.updates is not None]
        update = self._micro_batches.update
        stays = replace(still, gathered=0, gradients=sums.stays + sums.own)
        taken = update.takes([bytes_of(slot, self._item_bytes) for slot in updated])
        found = {"building": Parts(parameters=max(still.parameters, self._built()))}
        found |= {name: walk.most() for name, walk in _walks(basis).items()}
        if rule.passes:
            sent = 0 if self._in_common else rule.sent
            found |= Flow(still, sizes, work.footprints[0], rule.passes, sent, taken).moments()
        elif rule.updates:
            found["update"] = in_update(replace(still, gathered=0), sums, taken, gathers.arriving)
        if rule.at_pushes:
            grads = stays.gradients + rule.at_pushes
            found["pushes"] = replace(stays, gradients=grads, messages=rule.pushes)
        if gathers.beginning:
            found["gathering"] = replace(stays, gathered=gathers.beginning)
        if rule.agreement:
            found["agreement"] = in_agreement(still, sums, work, rule.agreement)
        if work.evaluation:
            found["evaluation"] = replace(stays, gathered=still.gathered, activations=work.evaluation)
        layers = layer_rows(self._names, place.held, work.footprints, self._item_bytes, update.kept)
        return RankMemory(place.rank, place.coordinates["pipeline"], found, layers, stays)

    def _rule(self, place: Place, sizes: Sizes) -> RuleMemory:
        """What the rule says that it keeps on a rank."""
        recipe, frozen, buffers = self.recipe, *untrained_bytes(self._model, place)
        steps = num_steps_of(recipe, build_order(recipe, self._task).steps_per_epoch)
        said: RuleMemory = imported(recipe.strategy.rule.memory)(
            Asked(
                *(recipe, place.held, self._item_bytes, sizes, self._state(sizes), frozen, buffers),
                rank=place.rank,
                processes=self.processes,
                stage=place.coordinates["pipeline"],
                stretch=longest_stretch(steps, intervals_of(recipe)),
                micro_batches=self._micro_batches.most,
            )
        )
        return said

    def _on_paths(self, place: Place, sizes: Sizes) -> int:
        if sizes not in self._travelling:
            of = self.recipe, place.held, self._item_bytes, self.processes
            self._travelling[sizes] = travelling_bytes(*of, common=self._in_common)
        return self._travelling[sizes]

    @property
    def _kept(self) -> float:
        """Bytes of the optimizer for each byte that it updates."""
        return self._micro_batches.update.kept

    def _state(self, sizes: Sizes) -> int:
        """Of the optimizer, and the average of the weights."""
        average = sizes.updates if self.recipe.average.decay is not None else 0
        return int(self._kept * sizes.updates) + average

    def _still(self, place: Place, sums: Sums, gathers: Gathers, rule: RuleMemory) -> Parts:
        """What stays while a rank trains."""
        recipe, sizes = self.recipe, sizes_of(place.held.values(), self._item_bytes)
        fixed = fixed_bytes(self._model, place, copies=recipe.strategy.lanes)
        moments, carried = self._state(sizes) if rule.updates else 0, self._on_paths(place, sizes)
        copies = recipe.strategy.degrees["replica"]
        keeps = all(one.kept for one in place.held.values())
        weights = sizes.computes if keeps else sizes.updates
        saved = fixed + sizes.updates + moments
        snapshot = saved if copies == 1 else min(saved, -(-saved // copies) + sizes.largest)
        return Parts(
            parameters=fixed + rule.copies + rule.running + weights // rule.sharers,
            gathered=gathers.here,
            moments=moments + rule.state,
            wire=sums.buckets + gathers.stay + rule.wire + self._mail(place, rule) + carried,
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

    def _by_block(self, place: Place) -> list[list[str]]:
        """What ZeRO 3 gathers at a time; inside a stage it is there for a whole run."""
        blocks = recomputed_blocks(self._model, self._task.blocks) if place.stage is None else ()
        return names_by_block(self._model, blocks, place.held)


def _walks(basis: _Basis) -> dict[str, Walk | SideBySide]:
    """Ways through a step; none where no step has an end of its own."""
    if basis.rule.passes or not basis.rule.trains:
        return {}
    new, (still, sums, _, _, work, _) = replace(basis.still, moments=0, snapshot=0), basis
    if sums.lanes:
        return {"first step": SideBySide(new, sums, work), "backward": SideBySide(still, sums, work)}
    return {"first step": Walk(new, first_step(sums), work), "backward": Walk(still, sums, work)}
