"""What a rank holds of a model that no step trains: frozen parameters, and buffers.

The plan of a job under one number format: what every rank holds, and what a micro-batch takes of it.

The memory of every rank of a job, by kind, before it is started.

What stays from step to step is a closed form (`forms`), what the optimizer keeps comes from updates of small
tensors (`updates`), the activations from one micro-batch on tensors without memory (`rehearsal`). The peak is
the largest of the moments of a run (`moments`), not a sum of largest parts: gradients grow while activations
go.

A run whose rule changes on the way: what it has under each of its rules, and while one follows another.

Between two rules the state goes from rank to rank some tensors at a time; see `paceline.parallel.state_transfer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from paceline.data.build_feed import run_length, state_intervals
from paceline.data.task_data import build_order, prepare_data
from paceline.data.work import max_steps_between_pauses
from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.parallel.placement import ParameterBytes, count_parameter_bytes, slot_bytes
from paceline.parallel.recompute import recomputed_blocks
from paceline.parallel.sharded_model import copy_to_meta
from paceline.plan.activation_memory import MicroBatchFootprint
from paceline.plan.gradient_buckets import GradientReduction, receive_memory_of
from paceline.plan.layer_memory import layer_memories, model_layers, parameters_by_block
from paceline.plan.memory_plan import MemoryByKind, MemoryPlan, RankMemory
from paceline.plan.micro_batch_memory import MicroBatchMemory, message_buffer_bytes, stages_on_host
from paceline.plan.not_planned_coding import inside_replicas, travelling_bytes
from paceline.plan.not_planned_pipedream import Flow
from paceline.plan.not_planned_side_by_side import SideBySide
from paceline.plan.not_planned_switching import State, most_on_its_way
from paceline.plan.simulated_ranks import CPU, SimulatedRank, simulate_ranks
from paceline.plan.step_peak import StepWalk, StepWork, agreement_memory, first_step_sums, update_memory
from paceline.plan.zero_memory import GatherMemory, GradientSumMemory, gather_memory, gradient_sum_memory
from paceline.recipe.recipe import Recipe, max_sharers, num_micro_batches
from paceline.recipe.registry.word_spec import SyncSpec, import_object
from paceline.recipe.strategy_text import phases_of
from paceline.recipe.support import resolve_strategy
from paceline.state.slot import trained_parameters
from paceline.sync.sync_rule import MemoryQuery, RuleMemory
from paceline.task import Task
from paceline.tuning.stage_choice import measure_and_choose_stages


def untrained_bytes_in_state(model: nn.Module, place: SimulatedRank) -> tuple[int, int]:
    """Of frozen parameters, and of buffers of the state.

    Args:
        model: the task's, without values.
    """
    modules = _modules_of_rank(model, place)
    frozen = {p for m in modules for p in m.parameters() if not p.requires_grad}
    kept = {t for m in modules for t in m.state_dict(keep_vars=True).values()}
    saved = {b for m in modules for b in m.buffers()} & kept
    return sum(p.nbytes for p in frozen), sum(b.nbytes for b in saved)


def untrained_bytes_in_memory(model: nn.Module, place: SimulatedRank, copies: int = 1) -> int:
    """Of frozen parameters, and buffers; those of the state are there three times around a step.

    Args:
        copies: of the modules, which share the parameters.
    """
    frozen, saved = untrained_bytes_in_state(model, place)
    buffers = {b for m in _modules_of_rank(model, place) for b in m.buffers()}
    return frozen + copies * (sum(b.nbytes for b in buffers) + 2 * saved)


def _modules_of_rank(model: nn.Module, place: SimulatedRank) -> Sequence[nn.Module]:
    return [model] if place.stage is None else place.stage.links


class _RankBasis(NamedTuple):
    """What the moments of a rank are made of."""

    still: MemoryByKind
    sums: GradientSumMemory
    gathers: GatherMemory
    sizes: ParameterBytes
    work: StepWork
    rule: RuleMemory


class MemoryPlanner:
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
        self._model = copy_to_meta(task.model)
        self._shards = num_micro_batches(recipe, processes)
        trained = trained_parameters(self._model)
        self._item_bytes = {slot.name: p.element_size() for slot, p in trained.items()}
        self._arriving = receive_memory_of(recipe, trained.values())
        self._names = {number: name for number, (name, _) in model_layers(task, self._model).items()}
        self._travelling: dict[ParameterBytes, int] = {}
        self._rules: dict[int, RuleMemory] = {}
        self._reductions: dict[tuple[int, ...], tuple[GradientSumMemory, GatherMemory]] = {}
        self._per_host = -(-processes // nodes) if recipe.strategy.path.in_memory else 0
        self._in_common = self._per_host == processes
        self._places = list(simulate_ranks(recipe, task, self._model, processes))
        self._micro_batches = MicroBatchMemory(
            recipe, task, self._places, processes, compute, ranks_per_host=self._per_host
        )

    def ranks(self) -> list[RankMemory]:
        """All of the first replica."""
        return [self._rank(place) for place in self._places]

    def walks(self) -> Iterator[tuple[SimulatedRank, StepWork, list[StepWalk | SideBySide]]]:
        """By rank of the first replica, its work, and its ways through the first step and a later one."""
        for place in self._places:
            basis = self._basis(place)
            yield place, basis.work, list(_step_walks(basis).values())

    @property
    def recomputes(self) -> bool:
        """Whether something could be computed again: not where a rule keeps the weights of a forward."""
        return not any(self._basis(place).rule.passes for place in self._places)

    def chunks(self) -> list[MicroBatchFootprint]:
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

    def _basis(self, place: SimulatedRank) -> _RankBasis:
        sizes, work = (
            count_parameter_bytes(place.held.values(), self._item_bytes),
            self._micro_batches.work(place),
        )
        sums, gathers = self._reduction(place, work)
        if place.rank not in self._rules:
            self._rules[place.rank] = self._rule(place, sizes)
        rule = self._rules[place.rank]
        if rule.passes or not rule.trains:  # lets go of them with its update; or has the last ones that came
            sums = GradientSumMemory(stays=0 if rule.passes else sizes.updates)
        still = self._still(place, sums, gathers, rule)
        return _RankBasis(still, sums, gathers, sizes, work, rule)

    def _reduction(self, place: SimulatedRank, work: StepWork) -> tuple[GradientSumMemory, GatherMemory]:
        """What sums and gathers take; the same on all ranks that share a state."""
        alike = tuple(n for axis, n in place.coordinates.items() if axis != "shard")
        if alike not in self._reductions:
            held, common, recipe = [*place.held.values()], self._in_common, inside_replicas(self.recipe)
            apart, sizes = (
                not (common or all(x.kept for x in held)),
                count_parameter_bytes(held, self._item_bytes),
            )
            of = GradientReduction(
                *(recipe, held, self._item_bytes, sizes, self._shards),
                common=common,
                arriving=self._arriving,
                completes=[name for one in work.footprints for name in one.completes],
                blocks=self._by_block(place) if apart else (),
            )
            self._reductions[alike] = gradient_sum_memory(of), gather_memory(of)
        return self._reductions[alike]

    def _rank(self, place: SimulatedRank) -> RankMemory:
        held, basis = list(place.held.values()), self._basis(place)
        still, sums, gathers, sizes, work, rule = basis
        updated = [one.updates for one in held if one.updates is not None]
        update = self._micro_batches.update
        stays = replace(still, gathered=0, gradients=sums.stays + sums.own)
        taken = update.takes([slot_bytes(slot, self._item_bytes) for slot in updated])
        found = {"building": MemoryByKind(parameters=max(still.parameters, self._built()))}
        found |= {name: walk.most() for name, walk in _step_walks(basis).items()}
        if rule.passes:
            sent = 0 if self._in_common else rule.sent
            found |= Flow(still, sizes, work.footprints[0], rule.passes, sent, taken).moments()
        elif rule.updates:
            found["update"] = update_memory(replace(still, gathered=0), sums, taken, gathers.arriving)
        if rule.at_pushes:
            grads = stays.gradients + rule.at_pushes
            found["pushes"] = replace(stays, gradients=grads, messages=rule.pushes)
        if gathers.beginning:
            found["gathering"] = replace(stays, gathered=gathers.beginning)
        if rule.agreement:
            found["agreement"] = agreement_memory(still, sums, work, rule.agreement)
        if work.evaluation:
            found["evaluation"] = replace(stays, gathered=still.gathered, activations=work.evaluation)
        layers = layer_memories(self._names, place.held, work.footprints, self._item_bytes, update.kept)
        return RankMemory(place.rank, place.coordinates["pipeline"], found, layers, stays)

    def _rule(self, place: SimulatedRank, sizes: ParameterBytes) -> RuleMemory:
        """What the rule says that it keeps on a rank."""
        recipe, frozen, buffers = self.recipe, *untrained_bytes_in_state(self._model, place)
        steps = run_length(recipe, build_order(recipe, self._task).steps_per_epoch)
        said: RuleMemory = import_object(recipe.strategy.rule.memory)(
            MemoryQuery(
                *(recipe, place.held, self._item_bytes, sizes, self._state(sizes), frozen, buffers),
                rank=place.rank,
                processes=self.processes,
                stage=place.coordinates["pipeline"],
                stretch=max_steps_between_pauses(steps, state_intervals(recipe)),
                micro_batches=self._micro_batches.most,
            )
        )
        return said

    def _on_paths(self, place: SimulatedRank, sizes: ParameterBytes) -> int:
        if sizes not in self._travelling:
            of = self.recipe, place.held, self._item_bytes, self.processes
            self._travelling[sizes] = travelling_bytes(*of, common=self._in_common)
        return self._travelling[sizes]

    @property
    def _kept(self) -> float:
        """Bytes of the optimizer for each byte that it updates."""
        return self._micro_batches.update.kept

    def _state(self, sizes: ParameterBytes) -> int:
        """Of the optimizer, and the average of the weights."""
        average = sizes.updates if self.recipe.average.decay is not None else 0
        return int(self._kept * sizes.updates) + average

    def _still(
        self, place: SimulatedRank, sums: GradientSumMemory, gathers: GatherMemory, rule: RuleMemory
    ) -> MemoryByKind:
        """What stays while a rank trains."""
        recipe, sizes = self.recipe, count_parameter_bytes(place.held.values(), self._item_bytes)
        fixed = untrained_bytes_in_memory(self._model, place, copies=recipe.strategy.lanes)
        moments, carried = self._state(sizes) if rule.updates else 0, self._on_paths(place, sizes)
        copies = recipe.strategy.degrees["replica"]
        keeps = all(one.kept for one in place.held.values())
        weights = sizes.computes if keeps else sizes.updates
        saved = fixed + sizes.updates + moments
        snapshot = saved if copies == 1 else min(saved, -(-saved // copies) + sizes.largest)
        return MemoryByKind(
            parameters=fixed + rule.copies + rule.running + weights // rule.sharers,
            gathered=gathers.here,
            moments=moments + rule.state,
            wire=sums.buckets + gathers.stay + rule.wire + self._mail(place, rule) + carried,
            snapshot=snapshot if self._saves() else 0,
            messages=rule.messages,
        )

    def _mail(self, place: SimulatedRank, rule: RuleMemory) -> int:
        """Memory in which the messages of a stage lie for its neighbours on its host."""
        if place.stage is None:
            return 0
        number, stages = place.stage.stage, place.stage.num_stages
        table = rule.flow or self._micro_batches.table(stages)
        own = self._micro_batches.footprints(place, table.parts[number])[number::stages]
        near = stages_on_host(self.recipe.strategy.degrees, place.rank, self._per_host)
        return message_buffer_bytes(own, table, number, near, together=rule.together)

    def _saves(self) -> bool:
        """Whether a copy for a checkpoint stays in memory while the run goes on."""
        of = self.recipe.checkpoint
        return of.mode == "background" and max(of.every_steps, of.every_minutes) > 0

    def _built(self) -> int:
        """A model that is not built without memory is there whole before it is cut."""
        return sum(p.nbytes for p in self._task.model.parameters() if not p.is_meta)

    def _by_block(self, place: SimulatedRank) -> list[list[str]]:
        """What ZeRO 3 gathers at a time; inside a stage it is there for a whole run."""
        blocks = recomputed_blocks(self._model, self._task.blocks) if place.stage is None else ()
        return parameters_by_block(self._model, blocks, place.held)


def _step_walks(basis: _RankBasis) -> dict[str, StepWalk | SideBySide]:
    """Ways through a step; none where no step has an end of its own."""
    if basis.rule.passes or not basis.rule.trains:
        return {}
    new, (still, sums, _, _, work, _) = replace(basis.still, moments=0, snapshot=0), basis
    if sums.lanes:
        return {"first step": SideBySide(new, sums, work), "backward": SideBySide(still, sums, work)}
    return {"first step": StepWalk(new, first_step_sums(sums), work), "backward": StepWalk(still, sums, work)}


def under(rank: RankMemory, planner: MemoryPlanner) -> RankMemory:
    """A rank whose moments are told with their rule."""
    word = planner.recipe.strategy.sync
    return replace(rank, moments={f"{when} under {word}": parts for when, parts in rank.moments.items()})


def while_switching(
    before: MemoryPlanner, ranks: Sequence[RankMemory], after: MemoryPlanner, others: Sequence[RankMemory]
) -> list[RankMemory]:
    """What there is where a rule has ended and another begins: of the first its state alone is left.

    Args:
        before, ranks: of the rule that has ended.
        after, others: of the other.
    """
    strategy = before.recipe.strategy
    ranks_and_parts = strategy.ranks_per_replica, before.processes, strategy.shard * strategy.tensor
    word, found = after.recipe.strategy.sync, []
    for number in range(max(len(ranks), len(others))):
        new, rule = others[number % len(others)], before.rule_of(number)
        kept = rule.state if rule.saved else 0  # what is saved lies beside what is not
        state = before.state_of(number).tensors(after.state_of(number))
        parts = replace(
            new.stays,
            gradients=after.own_sums(number),
            moments=new.stays.moments + kept,
            activations=most_on_its_way(state, *ranks_and_parts, is_first=number == 0),
        )
        found.append(replace(new, rank=number, moments={f"switch to {word}": parts}))
    return found


def plan_memory(recipe: Recipe, task: Task, processes: int, *, nodes: int = 1) -> MemoryPlan:
    """The bytes of every rank.

    Args:
        recipe: as the user wrote it.
        task: its model may be built without memory; it is not changed.
        processes: in the job.
        nodes: on which they run.
    Raises:
        StrategyError: the strategy does not fit the processes, or keeps what no form is known for.
        TaskError: the model cannot be cut so, or cannot run on shapes alone.
    Exactness: no less than the tensors that are allocated in a step, and at most 10 % more;
        tests/dist/test_memory_plan.py.
    """
    task = prepare_data(task, recipe)
    recipe = resolve_layout(recipe, task, processes)
    return combine_plans(recipe, make_planners(recipe, task, processes, nodes))


def resolve_layout(recipe: Recipe, task: Task, processes: int) -> Recipe:
    """A recipe whose strategy has its replicas and stages filled in.

    Raises:
        StrategyError: it does not fit the processes, or keeps what no form is known for.
    """
    most, called = max_sharers(recipe)
    strategy = resolve_strategy(recipe.strategy, processes=processes, shards=most, called=called)
    recipe = recipe.replace(strategy=strategy)
    _require_planned(recipe)
    return _cut_by_time(recipe, task, processes) if strategy.stages == "time" else recipe


def make_planners(recipe: Recipe, task: Task, processes: int, nodes: int) -> list[MemoryPlanner]:
    """One for each number format and each codec that the run may have, under each of its rules.

    Args:
        recipe: see `resolve_layout`.
        task: as a run settles it.
    """
    strategy = recipe.strategy
    ways = [
        one for phase in phases_of(strategy.sync) for one in strategy.under(phase.rule).codec_alternatives
    ]
    recipes = [recipe.under(one) for one in ways]
    return [
        MemoryPlanner(one, task, processes, nodes, compute)
        for one in recipes
        for compute in _number_formats(one)
    ]


def combine_plans(recipe: Recipe, planners: Sequence[MemoryPlanner]) -> MemoryPlan:
    """The plan of what needs most in any format, by any codec, under any rule.

    Args:
        recipe: with all its rules.
        planners: of it.
    """
    plans = [one.ranks() for one in planners]
    switches = len(recipe.strategy.rules) > 1
    if switches:
        formats = len(_number_formats(recipe)) * len(recipe.strategy.codec_alternatives)
        told = [[under(rank, one) for rank in ranks] for ranks, one in zip(plans, planners, strict=True)]
        pairs = [*zip(planners, plans, strict=True)]
        plans = told + [
            while_switching(*one, *then) for one, then in zip(pairs, pairs[formats:], strict=False)
        ]
    ranks = []
    for number in range(max(map(len, plans))):  # beyond the first replica ranks are like those before
        alike = [of[number % len(of)] for of in plans]
        ranks.append(replace(max(alike, key=lambda one: one.peak.total), rank=number))
    return MemoryPlan(recipe, planners[0].processes, ranks)


def _number_formats(recipe: Recipe) -> list[str]:
    """Number formats that the run may have; what the machine will choose is not known before it is asked."""
    asked = recipe.precision.compute
    if asked != "auto":
        return [asked]
    return ["fp32"] if recipe.reproducible else ["fp32", "bf16"]


def _cut_by_time(recipe: Recipe, task: Task, processes: int) -> Recipe:
    """With stages that are even in what links take in this process."""
    stages = measure_and_choose_stages(recipe, task, Cluster.single(), processes, CPU).stages
    return recipe.replace(strategy=recipe.strategy.replace(stages=stages))


def _needs_server(rule: SyncSpec) -> bool:
    """Workers go on with the moments that they had, which nobody updates."""
    return rule.needs_server > 0


def _require_planned(recipe: Recipe) -> None:
    strategy, rules = recipe.strategy, recipe.strategy.rules
    switches = len(rules) > 1
    needs_error_feedback = any(one.is_coded and not one.form.exact for one in strategy.codec_alternatives)
    unknown = {
        f"sync={strategy.sync}": not all(rule.memory for rule in rules),
        f"sync={strategy.sync}, at last with a server,": switches and any(map(_needs_server, rules)),
        f"codec={strategy.codec} where a rule follows another": switches and needs_error_feedback,
        f"cut={strategy.cut}": bool(strategy.cut),
    }
    words = [word for word, holds in unknown.items() if holds]
    if words:
        raise StrategyError(
            f"what {' and '.join(words)} keeps in memory has no closed form yet",
            where=f'strategy "{strategy}"',
            next_step="plan the same layout without it, or leave memory.budget out",
        )
