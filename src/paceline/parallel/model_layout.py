"""Place a model on the ranks of a strategy: apply its partitions in order, then build the runner.

Each partition knows only its own strategy word and what the partitions before it have left on a rank, so a
product of layouts (tensor x pipeline x ZeRO) has no code of its own. The optimizer and the reduction of
gradients are built elsewhere, from the `ShardedModel` that results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.comm.routes.host_links import connect_ranks_of_host
from paceline.comm.routes.host_messages import HostMessenger
from paceline.errors import StrategyError
from paceline.job.mesh import duplicate_group
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.pipeline.p2p import (
    HostMemoryTransport,
    MultiHostTransport,
    NetTransport,
    StageTransport,
)
from paceline.parallel.pipeline.pipeline_runner import ThreadedPipelineRunner
from paceline.parallel.pipeline.stage_partition import StagePartition
from paceline.parallel.pipeline.strategy_schedule import make_schedule
from paceline.parallel.placement import ModelPlacement, TensorPlacement
from paceline.parallel.session_context import SessionContext, TaskMaterial
from paceline.parallel.sharded_model import ModelPartition, ShardedModel, shard_model
from paceline.parallel.thread_workers import ThreadedRunner
from paceline.state.slot import trained_parameters


@dataclass(frozen=True)
class ModelLayout:
    """Model of one rank after all partitions, and the runner that trains it.

    Args:
        runner: runs forward and backward.
        gather: updates what this rank computes with after an optimizer step; collective. None if every rank
            updates all that it computes with.
        exit_callbacks: called when the session is closed; the layout outlives the sync rules of a run.
    """

    runner: ModelRunner
    gather: Callable[[], None] | None
    exit_callbacks: list[Callable[[], None]]

    def close(self) -> None:
        """Release the connections of the layout, which cannot be used afterwards."""
        while self.exit_callbacks:
            self.exit_callbacks.pop()()


def place_model(
    context: SessionContext,
    material: TaskMaterial,
    before_freeing: Callable[[Mapping[str, TensorPlacement]], None] | None = None,
) -> ModelLayout:
    """Apply the partitions of the strategy to the model and build its runner; collective.

    Args:
        material: the whole model; parameters that this rank does not hold are freed in place.
        before_freeing: called with what this rank will hold, by name, while the model is still whole.
    Raises:
        StrategyError, TaskError: the model cannot be partitioned in this way.
    """
    exit_callbacks = list[Callable[[], None]]()
    # Collectives of the partitions stay open when the rule changes, so their callbacks are kept
    # apart from those of the rule.
    context = replace(context, close_callbacks=exit_callbacks)
    partitions: list[ModelPartition] = [
        spec.load()(context, material) for spec in context.recipe.strategy.cuts
    ]
    placement = ModelPlacement(tuple(trained_parameters(material.model)))
    for partition in partitions:
        placement = placement.cut(partition.transform)
    stage = next((partition.stage for partition in partitions if partition.stage is not None), None)
    coordinates = {axis: group.rank for axis, group in context.mesh.axes.items()}
    links = stage.links if stage is not None else None
    if before_freeing is not None:
        before_freeing(placement.at(coordinates))
    sharded_model = shard_model(material.model, placement, coordinates, links=links, make=material.make)
    for partition in partitions:
        # Only now: modules and hooks change after the rank has freed what it does not hold.
        sharded_model = partition.prepare(sharded_model)
    gathers = [partition.gather(sharded_model) for partition in partitions if partition.gather is not None]
    gather = context.components.gather(_call_in_order(gathers)) if gathers else None
    idle_runner = next((partition.runner for partition in partitions if partition.runner is not None), None)
    if idle_runner is not None:
        return ModelLayout(idle_runner(sharded_model, material.metric_names), gather, exit_callbacks)
    if stage is None:
        return ModelLayout(_build_runner(context, material, sharded_model), gather, exit_callbacks)
    transport = _stage_transport(context, material.device, exit_callbacks)
    runner = _build_stage_runner(context, material, sharded_model, stage, transport)
    return ModelLayout(runner, gather, exit_callbacks)


def _call_in_order(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    if len(calls) == 1:
        return calls[0]

    def call_all() -> None:
        for call in calls:
            call()

    return call_all


def _stage_transport(
    context: SessionContext, device: torch.device, exit_callbacks: list[Callable[[], None]]
) -> StageTransport:
    """Return the transport between stages: shared memory on one host if the route allows it; collective."""
    forward_group, in_memory = context.mesh.axes["pipeline"], context.recipe.strategy.route_spec.in_memory
    # NCCL runs the messages of two ranks in one order for each group: sending both ways over one group
    # can deadlock.
    backward_group = duplicate_group(forward_group, "back") if device.type == "cuda" else None
    net_transport = NetTransport(forward_group, context.net, device, backward_group)
    links = connect_ranks_of_host(forward_group, context.net) if in_memory and device.type == "cpu" else None
    if links is None:
        return net_transport
    memory_transport = HostMemoryTransport(HostMessenger(context.net, forward_group, links))
    exit_callbacks.append(memory_transport.close)
    return (
        memory_transport
        if len(memory_transport.stages) == forward_group.size - 1
        else MultiHostTransport(memory_transport, net_transport)
    )


def _build_stage_runner(
    context: SessionContext,
    material: TaskMaterial,
    sharded_model: ShardedModel,
    stage: StagePartition,
    transport: StageTransport,
) -> ModelRunner:
    return context.components.stage(
        material.task,
        sharded_model,
        stage,
        material.metric_names,
        transport=transport,
        schedule=make_schedule(context.recipe.strategy),
        precision=context.precision,
        phases=context.phases,
        overlap=context.mesh.size_over(sharded_model.reduction_axes) > 1,
        reports=context.reports,
        counts=context.counts,
    )


def _build_runner(
    context: SessionContext, material: TaskMaterial, sharded_model: ShardedModel
) -> ModelRunner:
    strategy, names = context.recipe.strategy, material.metric_names
    if strategy.lanes == 1:
        return context.components.whole(
            sharded_model,
            material.task.loss,
            names,
            precision=context.precision,
            phases=context.phases,
            overlap=context.mesh.size_over(sharded_model.reduction_axes) > 1,
            reports=context.reports,
            counts=context.counts,
        )
    _require_cpu(material.device)
    threads: ThreadedRunner | ThreadedPipelineRunner
    if strategy.pipeline > 1:
        threads = ThreadedPipelineRunner(
            material.task,
            sharded_model,
            names,
            precision=context.precision,
            phases=context.phases,
            schedule=make_schedule(strategy),
            num_stages=strategy.pipeline,
            deadline_seconds=context.net.deadline_seconds,
        )
    else:
        threads = ThreadedRunner(
            sharded_model,
            material.task.loss,
            names,
            precision=context.precision,
            phases=context.phases,
            num_lanes=strategy.lanes,
            deadline_seconds=context.net.deadline_seconds,
        )
    context.close_callbacks.append(threads.close)
    return threads


def _require_cpu(device: torch.device) -> None:
    """Raise StrategyError if lanes are used on anything but a CPU."""
    if device.type != "cpu":
        raise StrategyError(
            f"lanes are CPU threads, and this rank computes on {device}",
            next_step="leave out lanes: one process for each GPU",
        )
