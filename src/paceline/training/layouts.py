"""From a strategy to a placed model: an ordered list of cuts, then one way to run what is left.

No product of layouts has a name: each cut looks at its own word, and at what the cuts before it have left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paceline.errors import StrategyError
from paceline.layout import Holding, Lanes, Placed
from paceline.layout.holding import hold
from paceline.layout.pipeline import Cut, StageThreads, StageWire, chain_of, cut_model, gpipe, one_f_one_b
from paceline.layout.pipeline.schedule import MakeSchedule
from paceline.layout.placement import Placement, Shard, Stages, Transform
from paceline.layout.precision import recomputed_blocks
from paceline.layout.shard import GatherAfterUpdate, GatherOnUse
from paceline.layout.tensor import PlanEntry, apply_plan, dims_of, plan_of
from paceline.slot import trained_parameters
from paceline.training.arrange import Material, Setting

SCHEDULES: Mapping[str, MakeSchedule] = {"gpipe": gpipe, "1f1b": one_f_one_b}


@dataclass(frozen=True)
class Layout:
    """A model in its place.

    Args:
        placed: forward and backward.
        gather: brings what this rank computes with up to date after an update; collective.
    """

    placed: Placed
    gather: Callable[[], None]


def place(setting: Setting, material: Material) -> Layout:
    """Cut the model, let go of what other ranks hold, and say how the rest is run; collective.

    Raises:
        StrategyError, TaskError: the model cannot be cut so.
    """
    mesh = setting.mesh
    cut = _stages(setting, material)
    plan = _tensor_plan(setting, material)
    transforms = [*_cut_stages(cut), *_cut_tensors(plan, mesh.axes["tensor"].size), *_cut_shards(setting, material)]
    placement = Placement(tuple(trained_parameters(material.model)))
    for transform in transforms:
        placement = placement.cut(transform)
    coordinates = {axis: group.rank for axis, group in mesh.axes.items()}
    links = cut.links if cut is not None else None
    holding = hold(material.model, placement, coordinates, links=links)
    if plan:
        apply_plan(plan, setting.exact_collective(mesh.axes["tensor"]))
    holding, gather = _gathering(setting, material, holding)
    return Layout(_run(setting, material, holding, cut), setting.pieces.gather(gather))


# -- the cuts, in their order -----------------------------------------------------------------------------


def _stages(setting: Setting, material: Material) -> Cut | None:
    """This rank's stage, where stages are ranks."""
    stages = setting.mesh.axes["pipeline"]
    if stages.size == 1:
        return None
    if setting.recipe.runtime.compile:
        raise StrategyError(
            "runtime.compile compiles the whole model, and a stage runs a part of it",
            next_step="set runtime.compile = false, or choose a strategy without pipeline",
        )
    cut = cut_model(material.task, material.model, stages.size, stages.rank)
    if setting.recipe.is_ordered:
        _require_one_addition(material, cut)
    return cut


def _require_one_addition(material: Material, cut: Cut) -> None:
    """Where sums have one order, at most two modules on several stages may use one tensor."""
    links = chain_of(material.task, material.model)
    tensors = {slot.name: p for slot, p in trained_parameters(material.model).items()}
    for name in cut.shared:
        users = sum(any(p is tensors[name] for p in link.parameters()) for link in links)
        if users > 2:
            raise StrategyError(
                f"{users} modules on several stages share '{name}', and with more than two the order of their sum"
                " would depend on the stages",
                next_step="leave out reproducible, or choose a strategy without pipeline",
            )


def _cut_stages(cut: Cut | None) -> list[Transform]:
    return [] if cut is None else [Stages(cut.holders)]


def _tensor_plan(setting: Setting, material: Material) -> list[PlanEntry]:
    return plan_of(material.task, material.model) if setting.mesh.axes["tensor"].size > 1 else []


def _cut_tensors(plan: list[PlanEntry], degree: int) -> list[Transform]:
    return [dims_of(plan, degree)] if plan else []


def _cut_shards(setting: Setting, material: Material) -> list[Transform]:
    shard = setting.mesh.axes["shard"]
    if shard.size == 1:
        return []
    ordered = setting.recipe.is_ordered  # whose norm is added by rows
    dims = {} if ordered else _outermost_dims(material.model)
    return [Shard(shard.size, dims, keeps=setting.recipe.strategy.zero < 3)]


def _outermost_dims(model: nn.Module) -> dict[str, int]:
    """By name, the dimension along which a part of a tensor is one run of memory."""
    return {
        slot.name: max(range(p.dim()), key=lambda d: (p.stride(d), -d)) if p.dim() else 0
        for slot, p in trained_parameters(model).items()
    }


# -- what is done around an update or a use -----------------------------------------------------------------


def _nothing() -> None:
    """Everything is up to date already."""


def _gathering(setting: Setting, material: Material, holding: Holding) -> tuple[Holding, Callable[[], None]]:
    shard, zero = setting.mesh.axes["shard"], setting.recipe.strategy.zero
    if shard.size == 1:
        return holding, _nothing
    collective = setting.exact_collective(shard)
    if zero < 3:
        return holding, GatherAfterUpdate(holding, collective)
    blocks = recomputed_blocks(material.model, material.task.blocks) or [*material.model.children()]
    use = GatherOnUse(holding.computes, holding.updates, holding.parts, blocks, collective)
    return replace(holding, use=use), _nothing


# -- how it is run ------------------------------------------------------------------------------------------


def _run(setting: Setting, material: Material, holding: Holding, cut: Cut | None) -> Placed:
    strategy = setting.recipe.strategy
    shared: dict[str, Any] = {"precision": setting.precision, "phases": setting.phases}
    overlap = {"overlap": setting.mesh.data.size > 1, "reports": setting.reports}
    schedule = SCHEDULES[strategy.schedule]
    names = material.metric_names
    if cut is not None:
        wire = StageWire(setting.mesh.axes["pipeline"], setting.net, material.device)
        return setting.pieces.stage(
            material.task, holding, cut, names, wire=wire, schedule=schedule, **shared, **overlap
        )
    if strategy.lanes == 1:
        return setting.pieces.whole(holding, material.task.loss, names, **shared, **overlap)
    _require_processor(material.device)
    shared["deadline_seconds"] = setting.net.deadline_seconds
    threads: Lanes | StageThreads
    if strategy.pipeline > 1:
        threads = StageThreads(
            material.task, holding, names, schedule=schedule, num_stages=strategy.pipeline, **shared
        )
    else:
        threads = Lanes(holding, material.task.loss, names, num_lanes=strategy.lanes, **shared)
    setting.closers.append(threads.close)
    return threads


def _require_processor(device: torch.device) -> None:
    if device.type != "cpu":
        raise StrategyError(
            f"lanes are threads of the processor, and this rank computes on {device}",
            next_step="leave out lanes: one process for each GPU",
        )
