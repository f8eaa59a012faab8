"""The cuts of a model: what each word of a layout does, and nothing of what the others do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from paceline.comm.routes.shared_memory import SharedMemoryCollective
from paceline.errors import StrategyError
from paceline.job.mesh import duplicate_group
from paceline.models.tensor_plans import tensor_plan_of
from paceline.parallel.context.context_attention import SequenceSplitter
from paceline.parallel.host_shared_parameters import share_sharded_parameters
from paceline.parallel.model_layout import ModelPartition, outermost_dims
from paceline.parallel.pipeline.model_chain import module_chain
from paceline.parallel.pipeline.stage_partition import StagePartition, partition_model
from paceline.parallel.pipeline.strategy_schedule import build_checked_table
from paceline.parallel.placement import ContextTransform, PipelineTransform, ShardTransform
from paceline.parallel.recompute import recomputed_blocks
from paceline.parallel.server_partition import (
    ServerTransform,
    TensorExtent,
    bytes_by_server,
    parse_partitioner,
    plan_partition,
)
from paceline.parallel.session_context import SessionContext, TaskMaterial
from paceline.parallel.sharded_model import ShardedModel
from paceline.parallel.tensor.tensor_plan import (
    TensorPlanEntry,
    apply_tensor_cuts,
    plan_tensor_cuts,
    plan_tensor_transform,
    resolve_tensor_plan,
)
from paceline.parallel.zero import GatherAfterUpdate, ParameterGatherer, SharedReadAfterUpdate
from paceline.state.slot import trained_parameters
from paceline.task import Task


def partition_among_servers(setting: SessionContext, material: TaskMaterial) -> ModelPartition:
    """What is updated, by the strategy's partitioner; its bytes on every server are told.

    Raises:
        StrategyError: a server would hold nothing.
    """
    strategy, dims = setting.recipe.strategy, outermost_dims(material.model)
    extents = {
        slot.name: TensorExtent(p.shape[dims[slot.name]] if p.dim() else 1, p.numel() * p.element_size())
        for slot, p in trained_parameters(material.model).items()
    }
    plan = plan_partition(extents, strategy.servers, parse_partitioner(strategy.partition))
    held = bytes_by_server(extents, plan)
    if not all(held):
        raise StrategyError(
            f"partition={strategy.partition} leaves nothing to server {held.index(0)} of {strategy.servers}",
            next_step="take fewer servers, or partition=fixed",
        )
    setting.note("servers", {"partition": strategy.partition, "bytes": held})
    return ModelPartition(ServerTransform(plan, dims))


def partition_into_stages(setting: SessionContext, material: TaskMaterial) -> ModelPartition:
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
    table = build_checked_table(setting.recipe, setting.shards)
    lengths = setting.recipe.strategy.stage_lengths
    place = stages.size, stages.rank, table.chunks, lengths
    cut = partition_model(material.task, material.model, *place, divided=table.parts)
    if setting.recipe.is_ordered:
        _require_one_addition(material, cut)
    return ModelPartition(PipelineTransform(cut.holders, cut.homes), stage=cut)


def _require_one_addition(material: TaskMaterial, cut: StagePartition) -> None:
    """Where sums have one order, at most two modules on several stages may use one tensor."""
    links = module_chain(material.task, material.model)
    tensors = {slot.name: p for slot, p in trained_parameters(material.model).items()}
    for name in cut.shared:
        users = sum(any(p is tensors[name] for p in link.parameters()) for link in links)
        if users > 2:
            raise StrategyError(
                f"{users} modules on several stages share '{name}', and with more than two the order of their"
                " sum would depend on the stages",
                next_step="leave out reproducible, or choose a strategy without pipeline",
            )


def partition_tensors(setting: SessionContext, material: TaskMaterial) -> ModelPartition:
    """Large layers, by the plan of the task, or that which ships for its model, and that of the recipe.

    Raises:
        StrategyError: there is no plan, or the model is compiled.
        TaskError: the plan does not fit the model.
    """
    _refuse_compile(setting, "tensor")
    group, model = setting.mesh.axes["tensor"], material.model
    cuts = plan_tensor_cuts(
        resolve_tensor_plan(tensor_plan_for(setting, material.task, model), model), group.size
    )
    staged = setting.mesh.axes["pipeline"].size > 1
    if staged:
        _require_run_whole(cuts.blocks, module_chain(material.task, model))

    def prepare(sharded_model: ShardedModel) -> ShardedModel:
        apply_tensor_cuts(cuts, setting.exact_collective(group), apart=staged)
        return sharded_model

    return ModelPartition(plan_tensor_transform(cuts, model), prepare=prepare)


def _require_run_whole(blocks: Sequence[TensorPlanEntry], links: Sequence[nn.Module]) -> None:
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


def tensor_plan_for(setting: SessionContext, task: Task, model: nn.Module) -> Mapping[str, str]:
    """How a model's layers are cut: words by pattern."""
    return {**(task.tensor or tensor_plan_of(model)), **setting.recipe.tensor}


def partition_sequences(setting: SessionContext, material: TaskMaterial) -> ModelPartition:
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
    split = SequenceSplitter(
        sequence, replace(duplicate_group(context, "ring"), name=context.name), setting.net
    )
    return ModelPartition(
        ContextTransform(), prepare=lambda sharded_model: replace(sharded_model, seen=split.seen)
    )


def shard_optimizer_state(
    setting: SessionContext, material: TaskMaterial, *, frees_gradients: bool = False
) -> ModelPartition:
    """What is updated; everybody computes with whole tensors, which are gathered after an update."""
    group = setting.mesh.axes["shard"]

    def gather(sharded_model: ShardedModel) -> Callable[[], None]:
        collective = setting.exact_collective(group)
        if isinstance(collective, SharedMemoryCollective):
            return SharedReadAfterUpdate(sharded_model, collective)
        return GatherAfterUpdate(sharded_model, collective, setting.bucket_bytes, setting.moving)

    return ModelPartition(
        ShardTransform(group.size, _shard_dims(setting, material), frees_gradients=frees_gradients),
        gather=gather,
    )


def shard_gradients(setting: SessionContext, material: TaskMaterial) -> ModelPartition:
    """What is updated, and the gradients, which are scattered as soon as they are there."""
    return shard_optimizer_state(setting, material, frees_gradients=True)


def shard_parameters(setting: SessionContext, material: TaskMaterial) -> ModelPartition:
    """What is held at all; tensors lie once on a host, or are gathered by block, in a stage for a run."""
    _refuse_compile(setting, "zero=3")
    group = setting.mesh.axes["shard"]

    def prepare(sharded_model: ShardedModel) -> ShardedModel:
        staged = (
            setting.mesh.axes["pipeline"].size > 1
        )  # whose ranks run forwards and backwards in other orders
        blocks = [] if staged else recomputed_blocks(material.model, material.task.blocks)
        collective = setting.exact_collective(group)
        if isinstance(collective, SharedMemoryCollective):
            return share_sharded_parameters(sharded_model, collective)
        use = ParameterGatherer(
            sharded_model.computes,
            sharded_model.updates,
            sharded_model.parts,
            blocks,
            collective,
            setting.net,
        )
        return replace(sharded_model, use=use)

    return ModelPartition(
        ShardTransform(group.size, _shard_dims(setting, material), keeps=False, frees_gradients=True),
        prepare=prepare,
    )


def _shard_dims(setting: SessionContext, material: TaskMaterial) -> dict[str, int]:
    """Along which dimension tensors are cut; where sums have one order, the norm is added by rows."""
    return {} if setting.recipe.is_ordered else outermost_dims(material.model)


def _refuse_compile(setting: SessionContext, word: str) -> None:
    if setting.recipe.runtime.compile:
        raise StrategyError(
            f"runtime.compile traces the model once, and {word} changes how its modules run",
            next_step=f"set runtime.compile = false, or choose a strategy without {word}",
        )
