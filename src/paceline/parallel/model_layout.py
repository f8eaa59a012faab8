"""From a strategy to a placed model: an ordered list of cuts, then one way to run what is left.

No product of layouts has a name: each cut knows its own word, and what the cuts before it have left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

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
from paceline.parallel.placement import ModelPlacement, PlacementTransform
from paceline.parallel.session_context import SessionContext, TaskMaterial
from paceline.parallel.sharded_model import ShardedModel, shard_model
from paceline.parallel.thread_workers import ThreadedRunner
from paceline.state.slot import trained_parameters

if TYPE_CHECKING:
    from paceline.sync.bad_value_locator import LossRecorder


@dataclass(frozen=True)
class ModelLayout:
    """A model in its place.

    Args:
        runner: forward and backward.
        gather: brings what this rank computes with up to date after an update; collective.
        exit_callbacks: what a session calls when it is closed; the layout outlives its rules.
    """

    runner: ModelRunner
    gather: Callable[[], None]
    exit_callbacks: list[Callable[[], None]]


@dataclass(frozen=True)
class SessionBase:
    """What a session is made from; with another membership in the setting, what hangs on it is made again.

    Args:
        layout: the model in its place.
        loss_recorder: hears every loss.
    """

    setting: SessionContext
    layout: ModelLayout
    loss_recorder: LossRecorder


def _keep_model(sharded_model: ShardedModel) -> ShardedModel:
    return sharded_model


def _no_gather(sharded_model: ShardedModel) -> Callable[[], None]:
    return lambda: None


@dataclass(frozen=True)
class ModelPartition:
    """One cut of a model, as its word makes it.

    Args:
        transform: what it leaves to each rank.
        stage: the stage of this rank, if the cut is into stages.
        prepare: changes modules, or what is done around their use, once the rank has let go of the rest.
        gather: makes what is called after every update.
    """

    transform: PlacementTransform
    stage: StagePartition | None = None
    prepare: Callable[[ShardedModel], ShardedModel] = _keep_model
    gather: Callable[[ShardedModel], Callable[[], None]] = field(default=_no_gather)


def place_model(setting: SessionContext, material: TaskMaterial) -> ModelLayout:
    """Cut the model, let go of what other ranks hold, and say how the rest is run; collective.

    Raises:
        StrategyError, TaskError: the model cannot be cut so.
    """
    exit_callbacks = list[Callable[[], None]]()
    setting = replace(setting, closers=exit_callbacks)  # what cuts gather with stays where the rule changes
    cuttings: list[ModelPartition] = [spec.load()(setting, material) for spec in setting.recipe.strategy.cuts]
    placement = ModelPlacement(tuple(trained_parameters(material.model)))
    for cutting in cuttings:
        placement = placement.cut(cutting.transform)
    stage = next((cutting.stage for cutting in cuttings if cutting.stage is not None), None)
    coordinates = {axis: group.rank for axis, group in setting.mesh.axes.items()}
    links = stage.links if stage is not None else None
    sharded_model = shard_model(material.model, placement, coordinates, links=links, make=material.make)
    for cutting in cuttings:
        sharded_model = cutting.prepare(sharded_model)
    gathers = [cutting.gather(sharded_model) for cutting in cuttings]
    after_update = setting.pieces.gather(_call_in_order(gathers))
    if stage is None:
        return ModelLayout(_build_runner(setting, material, sharded_model), after_update, exit_callbacks)
    wire = _stage_wire(setting, material.device, exit_callbacks)
    return ModelLayout(
        _build_stage_runner(setting, material, sharded_model, stage, wire), after_update, exit_callbacks
    )


def _call_in_order(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def call_all() -> None:
        for call in calls:
            call()

    return call_all


def _stage_wire(
    setting: SessionContext, device: torch.device, exit_callbacks: list[Callable[[], None]]
) -> StageTransport:
    """Memory between stages of one host, where the route may be memory; else the backend. Collective."""
    ahead, in_memory = setting.mesh.axes["pipeline"], setting.recipe.strategy.path.in_memory
    back = duplicate_group(ahead, "back") if device.type == "cuda" else None
    far = NetTransport(ahead, setting.net, device, back)
    links = connect_ranks_of_host(ahead, setting.net) if in_memory and device.type == "cpu" else None
    if links is None:
        return far
    near = HostMemoryTransport(HostMessenger(setting.net, ahead, links))
    exit_callbacks.append(near.close)
    return near if len(near.stages) == ahead.size - 1 else MultiHostTransport(near, far)


def _runner_options(
    setting: SessionContext, sharded_model: ShardedModel
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What every way to run a model is given, and what one that runs in one thread is."""
    shared = {"precision": setting.precision, "phases": setting.phases}
    overlap = setting.mesh.size_over(sharded_model.reduction_axes) > 1
    return shared, {"overlap": overlap, "reports": setting.reports, "counts": setting.counts}


def _build_stage_runner(
    setting: SessionContext,
    material: TaskMaterial,
    sharded_model: ShardedModel,
    stage: StagePartition,
    wire: StageTransport,
) -> ModelRunner:
    shared, alone = _runner_options(setting, sharded_model)
    shared |= {"wire": wire, "schedule": make_schedule(setting.recipe.strategy)}
    return setting.pieces.stage(material.task, sharded_model, stage, material.metric_names, **shared, **alone)


def _build_runner(
    setting: SessionContext, material: TaskMaterial, sharded_model: ShardedModel
) -> ModelRunner:
    strategy, names = setting.recipe.strategy, material.metric_names
    shared, alone = _runner_options(setting, sharded_model)
    if strategy.lanes == 1:
        return setting.pieces.whole(sharded_model, material.task.loss, names, **shared, **alone)
    _require_cpu(material.device)
    shared["deadline_seconds"] = setting.net.deadline_seconds
    threads: ThreadedRunner | ThreadedPipelineRunner
    if strategy.pipeline > 1:
        shared |= {"schedule": make_schedule(strategy), "num_stages": strategy.pipeline}
        threads = ThreadedPipelineRunner(material.task, sharded_model, names, **shared)
    else:
        threads = ThreadedRunner(sharded_model, material.task.loss, names, num_lanes=strategy.lanes, **shared)
    setting.closers.append(threads.close)
    return threads


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise StrategyError(
            f"lanes are CPU threads, and this rank computes on {device}",
            next_step="leave out lanes: one process for each GPU",
        )


def outermost_dims(model: nn.Module) -> dict[str, int]:
    """By name, the dimension along which a part of a trained tensor is one run of memory."""
    return {
        slot.name: max(range(p.dim()), key=lambda d: (p.stride(d), -d)) if p.dim() else 0
        for slot, p in trained_parameters(model).items()
    }
