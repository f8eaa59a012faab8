"""From a strategy to a placed model: an ordered list of cuts, then one way to run what is left.

No product of layouts has a name: each cut knows its own word, and what the cuts before it have left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from paceline.comm.routes import HostMail, meet_those_here
from paceline.errors import StrategyError
from paceline.layout import Holding, Lanes, Placed
from paceline.layout.holding import hold
from paceline.layout.pipeline import Cut, HostWire, Neighbours, StageThreads, StageWire, WireByHost
from paceline.layout.placement import Placement, Transform
from paceline.mesh import twin_group
from paceline.slot import trained_parameters
from paceline.sync.witness import LossEar
from paceline.training.arrange import Material, Setting
from paceline.training.schedules import schedule_of


@dataclass(frozen=True)
class Layout:
    """A model in its place.

    Args:
        placed: forward and backward.
        gather: brings what this rank computes with up to date after an update; collective.
        leavers: what a session calls when it is closed; the layout outlives its rules.
    """

    placed: Placed
    gather: Callable[[], None]
    leavers: list[Callable[[], None]]


@dataclass(frozen=True)
class Grounds:
    """What a session is made from; with another membership in the setting, what hangs on it is made again.

    Args:
        layout: the model in its place.
        ear: hears every loss.
    """

    setting: Setting
    layout: Layout
    ear: LossEar


def _as_it_is(holding: Holding) -> Holding:
    return holding


def _nothing(holding: Holding) -> Callable[[], None]:
    return lambda: None


@dataclass(frozen=True)
class Cutting:
    """One cut of a model, as its word makes it.

    Args:
        transform: what it leaves to each rank.
        stage: the stage of this rank, if the cut is into stages.
        prepare: changes modules, or what is done around their use, once the rank has let go of the rest.
        gather: makes what is called after every update.
    """

    transform: Transform
    stage: Cut | None = None
    prepare: Callable[[Holding], Holding] = _as_it_is
    gather: Callable[[Holding], Callable[[], None]] = field(default=_nothing)


def place(setting: Setting, material: Material) -> Layout:
    """Cut the model, let go of what other ranks hold, and say how the rest is run; collective.

    Raises:
        StrategyError, TaskError: the model cannot be cut so.
    """
    leavers = list[Callable[[], None]]()
    setting = replace(setting, closers=leavers)  # what cuts gather with stays where the rule changes
    cuttings: list[Cutting] = [spec.load()(setting, material) for spec in setting.recipe.strategy.cuts]
    placement = Placement(tuple(trained_parameters(material.model)))
    for cutting in cuttings:
        placement = placement.cut(cutting.transform)
    stage = next((cutting.stage for cutting in cuttings if cutting.stage is not None), None)
    coordinates = {axis: group.rank for axis, group in setting.mesh.axes.items()}
    links = stage.links if stage is not None else None
    holding = hold(material.model, placement, coordinates, links=links, make=material.make)
    for cutting in cuttings:
        holding = cutting.prepare(holding)
    gathers = [cutting.gather(holding) for cutting in cuttings]
    after_update = setting.pieces.gather(_one_after_another(gathers))
    if stage is None:
        return Layout(_run(setting, material, holding), after_update, leavers)
    wire = _stage_wire(setting, material.device, leavers)
    return Layout(_run_stage(setting, material, holding, stage, wire), after_update, leavers)


def _one_after_another(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def call_all() -> None:
        for call in calls:
            call()

    return call_all


def _stage_wire(setting: Setting, device: torch.device, leavers: list[Callable[[], None]]) -> Neighbours:
    """Memory between stages of one host, where the route may be memory; else the backend. Collective."""
    ahead, in_memory = setting.mesh.axes["pipeline"], setting.recipe.strategy.path.in_memory
    back = twin_group(ahead, "back") if device.type == "cuda" else None
    far = StageWire(ahead, setting.net, device, back)
    links = meet_those_here(ahead, setting.net) if in_memory and device.type == "cpu" else None
    if links is None:
        return far
    near = HostWire(HostMail(setting.net, ahead, links))
    leavers.append(near.close)
    return near if len(near.stages) == ahead.size - 1 else WireByHost(near, far)


def _of_both(setting: Setting, holding: Holding) -> tuple[dict[str, Any], dict[str, Any]]:
    """What every way to run a model is given, and what one that runs in one thread is."""
    shared = {"precision": setting.precision, "phases": setting.phases}
    overlap = setting.mesh.size_over(holding.summed_over) > 1
    return shared, {"overlap": overlap, "reports": setting.reports, "counts": setting.counts}


def _run_stage(
    setting: Setting, material: Material, holding: Holding, stage: Cut, wire: Neighbours
) -> Placed:
    shared, alone = _of_both(setting, holding)
    shared |= {"wire": wire, "schedule": schedule_of(setting.recipe.strategy)}
    return setting.pieces.stage(material.task, holding, stage, material.metric_names, **shared, **alone)


def _run(setting: Setting, material: Material, holding: Holding) -> Placed:
    strategy, names = setting.recipe.strategy, material.metric_names
    shared, alone = _of_both(setting, holding)
    if strategy.lanes == 1:
        return setting.pieces.whole(holding, material.task.loss, names, **shared, **alone)
    _require_processor(material.device)
    shared["deadline_seconds"] = setting.net.deadline_seconds
    threads: Lanes | StageThreads
    if strategy.pipeline > 1:
        shared |= {"schedule": schedule_of(strategy), "num_stages": strategy.pipeline}
        threads = StageThreads(material.task, holding, names, **shared)
    else:
        threads = Lanes(holding, material.task.loss, names, num_lanes=strategy.lanes, **shared)
    setting.closers.append(threads.close)
    return threads


def _require_processor(device: torch.device) -> None:
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
