"""The peak memory of every rank of a job, by kind, before the job is started.

What stays from step to step is a closed form (`zero_memory`, `gradient_buckets`, and `RuleMemory` of the
sync rule), the state of the optimizer is measured in updates of small tensors (`optimizer_memory`), and
activations come from one micro-batch on fake tensors (`activation_memory`). The peak is the largest moment of
a run (`step_peak`) and not a sum of largest parts, since activations are freed while gradients grow.

Planned are the rules every-step, local and diloco under every layout, with and without recomputation. Codecs,
routes of messages, thread workers (`lanes`), all other rules and changes of the rule are refused: a budget is
never checked against a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from paceline.data.task_data import prepare_data
from paceline.errors import StrategyError
from paceline.parallel.placement import ParameterBytes, count_parameter_bytes, slot_bytes
from paceline.parallel.recompute import recomputed_blocks
from paceline.parallel.sharded_model import copy_to_meta
from paceline.plan.activation_memory import MicroBatchFootprint
from paceline.plan.gradient_buckets import GradientReduction, receive_memory_of
from paceline.plan.layer_memory import layer_memories, model_layers, parameters_by_block
from paceline.plan.memory_plan import MemoryByKind, MemoryPlan, RankMemory
from paceline.plan.micro_batch_memory import MicroBatchMemory, message_buffer_bytes, stages_on_host
from paceline.plan.simulated_ranks import SimulatedRank, simulate_ranks
from paceline.plan.step_peak import StepWalk, StepWork, agreement_memory, first_step_sums, update_memory
from paceline.plan.zero_memory import GatherMemory, GradientSumMemory, gather_memory, gradient_sum_memory
from paceline.recipe.recipe import Recipe, max_sharers, num_micro_batches
from paceline.recipe.recovery import keeps_copies
from paceline.recipe.registry import import_object
from paceline.recipe.support import resolve_strategy
from paceline.state.slot import trained_parameters
from paceline.sync.sync_rule import MemoryQuery, RuleMemory
from paceline.task import Task


def untrained_bytes(model: nn.Module, rank: SimulatedRank) -> int:
    """Return the bytes of frozen parameters and of buffers on a rank.

    Args:
        model: the model of the task, on the meta device.
    """
    modules = [model] if rank.stage is None else rank.stage.links
    frozen = {p for m in modules for p in m.parameters() if not p.requires_grad}
    buffers = {b for m in modules for b in m.buffers()}
    persistent = buffers & {t for m in modules for t in m.state_dict(keep_vars=True).values()}
    # A step also keeps the values at its beginning and their change: buffers of the state count thrice.
    tensors = [*frozen, *buffers, *persistent, *persistent]
    return sum(t.nbytes for t in tensors)


class _RankBasis(NamedTuple):
    """The inputs from which all moments of a rank are computed."""

    steady: MemoryByKind
    sums: GradientSumMemory
    gathers: GatherMemory
    sizes: ParameterBytes
    work: StepWork
    rule: RuleMemory


class _ReductionMemory:
    """The memory of gradient sums and parameter gathers, computed once for ranks that share a state.

    Args:
        recipe: its strategy has its replicas filled in.
        model: the model of the task, on the meta device.
        item_bytes: bytes of one value, by name of a trained tensor.
        common: all ranks run on one host and sum in memory that they share.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        model: nn.Module,
        item_bytes: dict[str, int],
        shards: int,
        common: bool,
    ) -> None:
        self._recipe, self._task, self._model, self._item_bytes = recipe, task, model, item_bytes
        self._shards, self._common = shards, common
        self._receives = receive_memory_of(recipe, trained_parameters(model).values())
        self._known: dict[tuple[int, ...], tuple[GradientSumMemory, GatherMemory]] = {}

    def of(self, rank: SimulatedRank, work: StepWork) -> tuple[GradientSumMemory, GatherMemory]:
        """Return both for one rank."""
        # Ranks of one shard group hold parts of the same tensors, so their bytes are computed once.
        key = tuple(n for axis, n in rank.coordinates.items() if axis != "shard")
        if key not in self._known:
            placements = [*rank.held.values()]
            gathers = not (self._common or all(placement.kept for placement in placements))
            reduction = GradientReduction(
                *(self._recipe, placements, self._item_bytes),
                sizes=count_parameter_bytes(placements, self._item_bytes),
                shards=self._shards,
                common=self._common,
                receives=self._receives,
                completes=[name for footprint in work.footprints for name in footprint.completes],
                blocks=self._gathered_blocks(rank) if gathers else (),
            )
            self._known[key] = gradient_sum_memory(reduction), gather_memory(reduction)
        return self._known[key]

    def _gathered_blocks(self, rank: SimulatedRank) -> list[list[str]]:
        """Return the names of the parameters that ZeRO 3 gathers together; a stage gathers all of its own."""
        blocks = recomputed_blocks(self._model, self._task.blocks) if rank.stage is None else ()
        return parameters_by_block(self._model, blocks, rank.held)


class MemoryPlanner:
    """The memory of a job under one number format; ranks that are alike are computed once.

    Args:
        recipe: its strategy has its replicas and stages filled in.
        task: prepared as for a run; its model may be on the meta device, and is not changed.
        processes, nodes: number of processes of the job, and of hosts on which they run.
        compute: number format of forward and backward.
    """

    def __init__(self, recipe: Recipe, task: Task, processes: int, nodes: int, compute: str) -> None:
        self.recipe, self.processes = recipe, processes
        self._task = task
        self._model = copy_to_meta(task.model)
        trained = trained_parameters(self._model)
        self._item_bytes = {slot.name: p.element_size() for slot, p in trained.items()}
        self._layer_names = {number: name for number, (name, _) in model_layers(task, self._model).items()}
        self._per_host = -(-processes // nodes) if recipe.strategy.route_spec.in_memory else 0
        shards = num_micro_batches(recipe, processes)
        self._reductions = _ReductionMemory(
            recipe, task, self._model, self._item_bytes, shards, self._per_host == processes
        )
        self._ranks = list(simulate_ranks(recipe, task, self._model, processes))
        self._micro_batches = MicroBatchMemory(
            recipe, task, self._ranks, processes, compute, ranks_per_host=self._per_host
        )

    def ranks(self) -> list[RankMemory]:
        """Return the memory of all ranks of the first replica."""
        return [self._rank(rank) for rank in self._ranks]

    def walks(self) -> Iterator[tuple[SimulatedRank, StepWork, list[StepWalk]]]:
        """Yield each rank of the first replica, its work, and its walks through a first and a later step."""
        for rank in self._ranks:
            basis = self._basis(rank)
            yield rank, basis.work, list(_step_walks(basis).values())

    def chunks(self) -> list[MicroBatchFootprint]:
        """Return what a micro-batch takes in each chunk of the model, on the first rank that runs it."""
        return self._micro_batches.footprints(self._ranks[0])

    def _basis(self, rank: SimulatedRank) -> _RankBasis:
        sizes = count_parameter_bytes(rank.held.values(), self._item_bytes)
        work = self._micro_batches.work(rank)
        sums, gathers = self._reductions.of(rank, work)
        query = MemoryQuery(self.recipe, rank.held, self._item_bytes, sizes)
        rule: RuleMemory = import_object(self.recipe.strategy.sync_spec.memory)(query)
        steady = self._steady(rank, sizes, sums, gathers, rule)
        return _RankBasis(steady, sums, gathers, sizes, work, rule)

    def _rank(self, rank: SimulatedRank) -> RankMemory:
        basis = self._basis(rank)
        steady, sums, gathers, _, work, rule = basis
        update = self._micro_batches.update
        updated = [placement.updates for placement in rank.held.values() if placement.updates is not None]
        update_bytes = update.takes([slot_bytes(slot, self._item_bytes) for slot in updated])
        between_steps = replace(steady, gathered=0, gradients=sums.stays + sums.own)
        moments = {"building": MemoryByKind(parameters=max(steady.parameters, self._built_bytes()))}
        moments |= {name: walk.peak() for name, walk in _step_walks(basis).items()}
        moments["update"] = update_memory(replace(steady, gathered=0), sums, update_bytes, gathers.arriving)
        if gathers.beginning:
            moments["gathering"] = replace(between_steps, gathered=gathers.beginning)
        if rule.agreement:
            moments["agreement"] = agreement_memory(steady, sums, work, rule.agreement)
        if work.evaluation:
            moments["evaluation"] = replace(
                between_steps, gathered=steady.gathered, activations=work.evaluation
            )
        layers = layer_memories(self._layer_names, rank.held, work.footprints, self._item_bytes, update.kept)
        return RankMemory(rank.global_rank, rank.coordinates["pipeline"], moments, layers)

    def _steady(
        self,
        rank: SimulatedRank,
        sizes: ParameterBytes,
        sums: GradientSumMemory,
        gathers: GatherMemory,
        rule: RuleMemory,
    ) -> MemoryByKind:
        """Return what stays allocated while the rank trains."""
        recipe = self.recipe
        untrained = untrained_bytes(self._model, rank)
        average = sizes.updates if recipe.average.decay is not None else 0
        moments = int(self._micro_batches.update.kept * sizes.updates) + average
        keeps = all(placement.kept for placement in rank.held.values())
        weights = sizes.computes if keeps else sizes.updates
        # Replicas write a checkpoint together, each a part of whole tensors.
        saved, writers = untrained + sizes.updates + moments, recipe.strategy.degrees["replica"]
        # With several writers, a tensor is not divided further, so one more can fit into a share.
        snapshot = saved if writers == 1 else min(saved, -(-saved // writers) + sizes.largest)
        return MemoryByKind(
            parameters=untrained + weights,
            gathered=gathers.while_computing,
            moments=moments + rule.state,
            wire=sums.buckets + gathers.stay + rule.wire + self._message_buffers(rank),
            snapshot=snapshot if _saves_in_background(recipe) else 0,
            copies=self._num_copies * (sizes.updates + moments) if keeps_copies(recipe) else 0,
        )

    @property
    def _num_copies(self) -> int:
        """Return how many copies of its part of the state a rank has in memory, its neighbour's included.

        On one host the neighbour reads where this rank has written, and a third buffer is free for the next
        step; between hosts both have copies of two steps.
        """
        return 3 if self._per_host == self.processes else 4

    def _message_buffers(self, rank: SimulatedRank) -> int:
        """Return the bytes of shared memory through which a stage sends messages to stages on its host."""
        if rank.stage is None:
            return 0
        number, stages = rank.stage.stage, rank.stage.num_stages
        table = self._micro_batches.table(stages)
        stage_footprints = self._micro_batches.footprints(rank, table.parts[number])[number::stages]
        near = stages_on_host(self.recipe.strategy.degrees, rank.global_rank, self._per_host)
        return message_buffer_bytes(stage_footprints, table, number, near)

    def _built_bytes(self) -> int:
        """Return the bytes of the whole model in memory before it is split; 0 if it is built on `meta`."""
        return sum(p.nbytes for p in self._task.model.parameters() if not p.is_meta)


def _saves_in_background(recipe: Recipe) -> bool:
    """Return whether a copy for a checkpoint stays in memory while the run goes on."""
    checkpoint = recipe.checkpoint
    return checkpoint.mode == "background" and max(checkpoint.every_steps, checkpoint.every_minutes) > 0


def _step_walks(basis: _RankBasis) -> dict[str, StepWalk]:
    steady, sums, work = basis.steady, basis.sums, basis.work
    # The optimizer makes its state in the first update, and no checkpoint is written before.
    new = replace(steady, moments=0, snapshot=0)
    return {
        "first step": StepWalk(new, first_step_sums(sums), work),
        "backward": StepWalk(steady, sums, work),
    }


def plan_memory(recipe: Recipe, task: Task, processes: int, *, nodes: int = 1) -> MemoryPlan:
    """Plan the bytes of every rank of a job.

    Args:
        recipe: as the user wrote it, but for `stages=time`, which is measured before.
        task: its model may be on the meta device; it is not changed.
        processes: of the job.
        nodes: hosts on which they run.
    Raises:
        StrategyError: the strategy does not fit the processes, or its memory is not planned.
        TaskError: the model cannot be partitioned in this way, or cannot run on fake tensors.
    Exactness: no less than the tensors that are allocated in a step, and at most 10 % more;
        tests/dist/test_memory_plan.py.
    """
    task = prepare_data(task, recipe)
    recipe = resolve_layout(recipe, processes, nodes)
    return combine_plans(recipe, make_planners(recipe, task, processes, nodes))


def resolve_layout(recipe: Recipe, processes: int, nodes: int = 1) -> Recipe:
    """Return the recipe with the number of replicas filled in.

    Raises:
        StrategyError: the strategy does not fit the processes, or its memory is not planned.
    """
    most, limit_key = max_sharers(recipe)
    strategy = resolve_strategy(recipe.strategy, processes=processes, shards=most, limit_key=limit_key)
    recipe = recipe.replace(strategy=strategy)
    _require_planned(recipe, nodes)
    return recipe


def make_planners(recipe: Recipe, task: Task, processes: int, nodes: int) -> list[MemoryPlanner]:
    """Return one planner for each number format that the run may use.

    Args:
        recipe: as `resolve_layout` returns it.
        task: prepared as for a run.
    """
    return [MemoryPlanner(recipe, task, processes, nodes, compute) for compute in _number_formats(recipe)]


def combine_plans(recipe: Recipe, planners: Sequence[MemoryPlanner]) -> MemoryPlan:
    """Return for every rank of the job the plan of the number format that needs most."""
    plans = [planner.ranks() for planner in planners]
    largest = [max(variants, key=lambda rank: rank.peak.total) for variants in zip(*plans, strict=True)]
    return MemoryPlan(recipe, planners[0].processes, largest)


def _number_formats(recipe: Recipe) -> list[str]:
    """Return the number formats of forward and backward; a machine chooses "auto" only when it runs."""
    compute = recipe.precision.compute
    if compute != "auto":
        return [compute]
    return ["fp32"] if recipe.reproducible else ["fp32", "bf16"]


def _require_planned(recipe: Recipe, nodes: int) -> None:
    strategy = recipe.strategy
    rule, route = strategy.sync_spec, strategy.route_spec
    if strategy.has_timed_stages:
        raise StrategyError(
            "stages=time has not been measured, so the memory of the stages cannot be planned",
            where=f'strategy "{strategy}"',
            next_step="give the numbers of modules, as in stages=3,2",
        )
    # Between hosts route=auto chooses by measured time among routes that keep different buffers.
    sums = rule.sums and any(strategy.degrees[axis] > 1 for axis in ("replica", "context", "shard"))
    varies = sums and route.in_memory and nodes > 1 and not recipe.is_ordered
    unplanned = {
        f"sync={strategy.sync}": len(strategy.sync_specs) > 1 or not rule.memory,
        f"codec={strategy.codec}": any(codec.is_coded for codec in strategy.codec_alternatives),
        f"route={strategy.route}": rule.sums and not (route.is_default or route.in_memory),
        f"route={strategy.route} between hosts": varies,
        f"lanes={strategy.lanes}": strategy.lanes > 1,
        f"cut={strategy.cut}": bool(strategy.cut),
    }
    words = [word for word, holds in unplanned.items() if holds]
    if words:
        raise StrategyError(
            f"the memory of {' and '.join(words)} is not planned",
            where=f'strategy "{strategy}"',
            next_step="plan the same layout without it, or leave memory.budget out",
        )
