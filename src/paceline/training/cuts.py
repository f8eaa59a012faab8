"""The cuts of a model: what each word of a layout does, and nothing of what the others do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from paceline.comm.routes import SharedMemoryCollective
from paceline.errors import StrategyError
from paceline.layout import Holding
from paceline.layout.context import SplitSequences
from paceline.layout.partition import AmongServers, Extent, bytes_by_server, pieces_of, plan_partition
from paceline.layout.pipeline import Cut, chain_of, cut_model
from paceline.layout.placement import Sequences, Shard, Stages
from paceline.layout.recompute import recomputed_blocks
from paceline.layout.shard import GatherAfterUpdate, GatherOnUse, ReadAfterUpdate, lay_in_common
from paceline.layout.tensor import PlanEntry, apply_cuts, cuts_of, entries_of, transform_of
from paceline.mesh import twin_group
from paceline.models import tensor_plan_of
from paceline.slot import trained_parameters
from paceline.task import Task
from paceline.training.arrange import Material, Setting
from paceline.training.layouts import Cutting, outermost_dims
from paceline.training.schedules import proven_table


def cut_among_servers(setting: Setting, material: Material) -> Cutting:
    """What is updated, by the strategy's partitioner; its bytes on every server are told.

    Raises:
        StrategyError: a server would hold nothing.
    """
    strategy, dims = setting.recipe.strategy, outermost_dims(material.model)
    extents = {
        slot.name: Extent(p.shape[dims[slot.name]] if p.dim() else 1, p.numel() * p.element_size())
        for slot, p in trained_parameters(material.model).items()
    }
    plan = plan_partition(extents, strategy.servers, pieces_of(strategy.partition))
    held = bytes_by_server(extents, plan)
    if not all(held):
        raise StrategyError(
            f"partition={strategy.partition} leaves nothing to server {held.index(0)} of {strategy.servers}",
            next_step="take fewer servers, or partition=fixed",
        )
    setting.note("servers", {"partition": strategy.partition, "bytes": held})
    return Cutting(AmongServers(plan, dims))


def cut_into_stages(setting: Setting, material: Material) -> Cutting:
    """Consecutive layers on consecutive ranks.

    Raises:
        StrategyError: the model is compiled whole, has too few layers, or shares a weight too often; or the
            schedule cannot run.
        TaskError: it is no chain.
    """
    if setting.recipe.runtime.compile:
        raise StrategyError(
            "runtime.compile compiles the whole model, and a stage runs a part of it",
            next_step="set runtime.compile = false, or choose a strategy without pipeline",
        )
    stages = setting.mesh.axes["pipeline"]
    table = proven_table(setting.recipe, setting.shards)
    lengths = setting.recipe.strategy.stage_lengths
    place = stages.size, stages.rank, table.chunks, lengths
    cut = cut_model(material.task, material.model, *place, divided=table.parts)
    if setting.recipe.is_ordered:
        _require_one_addition(material, cut)
    return Cutting(Stages(cut.holders, cut.homes), stage=cut)


def _require_one_addition(material: Material, cut: Cut) -> None:
    """Where sums have one order, at most two modules on several stages may use one tensor."""
    links = chain_of(material.task, material.model)
    tensors = {slot.name: p for slot, p in trained_parameters(material.model).items()}
    for name in cut.shared:
        users = sum(any(p is tensors[name] for p in link.parameters()) for link in links)
        if users > 2:
            raise StrategyError(
                f"{users} modules on several stages share '{name}', and with more than two the order of their"
                " sum would depend on the stages",
                next_step="leave out reproducible, or choose a strategy without pipeline",
            )


def cut_tensors(setting: Setting, material: Material) -> Cutting:
    """Large layers, by the plan of the task, or that which ships for its model, and that of the recipe.

    Raises:
        StrategyError: there is no plan, or the model is compiled.
        TaskError: the plan does not fit the model.
    """
    _refuse_compile(setting, "tensor")
    group, model = setting.mesh.axes["tensor"], material.model
    cuts = cuts_of(entries_of(plan_of(setting, material.task, model), model), group.size)
    staged = setting.mesh.axes["pipeline"].size > 1
    if staged:
        _require_run_whole(cuts.blocks, chain_of(material.task, model))

    def prepare(holding: Holding) -> Holding:
        apply_cuts(cuts, setting.exact_collective(group), apart=staged)
        return holding

    return Cutting(transform_of(cuts, model), prepare=prepare)


def _require_run_whole(blocks: Sequence[PlanEntry], links: Sequence[nn.Module]) -> None:
    """A block that is cut by positions does so where it is called: the chain has to call it.

    Raises:
        StrategyError: the chain calls parts of one.
    """
    called = {id(module) for link in links for module in link.modules()}
    for block in blocks:
        if id(block.module) not in called:
            raise StrategyError(
                f"the tensor plan cuts '{block.name}' by positions, and the chain of stages runs it in parts",
                next_step="let Task(stages=...) name the whole block, or leave 'sequence' out of the plan",
            )


def plan_of(setting: Setting, task: Task, model: nn.Module) -> Mapping[str, str]:
    """How a model's layers are cut: words by pattern."""
    return {**(task.tensor or tensor_plan_of(model)), **setting.recipe.tensor}


def cut_sequences(setting: Setting, material: Material) -> Cutting:
    """Every sequence, by the task's `sequence`; attention goes over the ranks that have its other positions.

    Raises:
        StrategyError: the task does not say where positions are, or the model is compiled.
    """
    _refuse_compile(setting, "context")
    sequence = material.task.sequence
    if sequence is None:
        raise StrategyError(
            "context splits sequences, and nothing says where the positions of a batch are",
            next_step="pass Task(sequence=lambda batch, part: part(batch, 1)), or leave out context",
        )
    context = setting.mesh.axes["context"]
    split = SplitSequences(sequence, replace(twin_group(context, "ring"), name=context.name), setting.net)
    return Cutting(Sequences(), prepare=lambda holding: replace(holding, seen=split.seen))


def cut_updates(setting: Setting, material: Material, *, frees: bool = False) -> Cutting:
    """What is updated; everybody computes with whole tensors, which are gathered after an update."""
    group = setting.mesh.axes["shard"]

    def gather(holding: Holding) -> Callable[[], None]:
        collective = setting.exact_collective(group)
        if isinstance(collective, SharedMemoryCollective):
            return ReadAfterUpdate(holding, collective)
        return GatherAfterUpdate(holding, collective, setting.bucket_bytes, setting.moving)

    return Cutting(Shard(group.size, _dims(setting, material), frees=frees), gather=gather)


def cut_gradients(setting: Setting, material: Material) -> Cutting:
    """What is updated, and the gradients, which are scattered as soon as they are there."""
    return cut_updates(setting, material, frees=True)


def cut_everything(setting: Setting, material: Material) -> Cutting:
    """What is held at all; tensors lie once on a host, or are gathered by block, in a stage for a run."""
    _refuse_compile(setting, "zero=3")
    group = setting.mesh.axes["shard"]

    def prepare(holding: Holding) -> Holding:
        staged = (
            setting.mesh.axes["pipeline"].size > 1
        )  # whose ranks run forwards and backwards in other orders
        blocks = [] if staged else recomputed_blocks(material.model, material.task.blocks)
        collective = setting.exact_collective(group)
        if isinstance(collective, SharedMemoryCollective):
            return lay_in_common(holding, collective)
        use = GatherOnUse(holding.computes, holding.updates, holding.parts, blocks, collective, setting.net)
        return replace(holding, use=use)

    return Cutting(Shard(group.size, _dims(setting, material), keeps=False, frees=True), prepare=prepare)


def _dims(setting: Setting, material: Material) -> dict[str, int]:
    """Along which dimension tensors are cut; where sums have one order, the norm is added by rows."""
    return {} if setting.recipe.is_ordered else outermost_dims(material.model)


def _refuse_compile(setting: Setting, word: str) -> None:
    if setting.recipe.runtime.compile:
        raise StrategyError(
            f"runtime.compile traces the model once, and {word} changes how its modules run",
            next_step=f"set runtime.compile = false, or choose a strategy without {word}",
        )
