"""From a strategy to its layout: where state lives. One table from words to constructors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from paceline.comm import (
    AgreedNorm,
    ParameterGather,
    Reducer,
    ShardedReducer,
)
from paceline.errors import StrategyError
from paceline.layout import Lanes, Placed, Replicate
from paceline.layout.pipeline import Pipeline, StageReducer, StageThreads, StageWire, cut_model
from paceline.layout.zero import cut_rows, own_parts
from paceline.slot import Slot, trained_parameters
from paceline.training.arrange import Arrangement, Material, Setting
from paceline.training.ordered import ordered_stage, ordered_sums


def _whole(setting: Setting, material: Material) -> Replicate | Lanes | StageThreads:
    task, strategy = material.task, setting.recipe.strategy
    shared: dict[str, Any] = {"precision": setting.precision(material.device), "phases": setting.phases}
    if strategy.lanes == 1:
        alone = setting.mesh.data.size == 1
        return setting.pieces.placed(
            material.model, task.loss, material.metric_names, **shared, overlap=not alone
        )
    if material.device.type != "cpu":
        raise StrategyError(
            f"lanes are threads of the processor, and this rank computes on {material.device}",
            next_step="leave out lanes: one process for each GPU",
        )
    shared["deadline_seconds"] = setting.net.deadline_seconds
    model, names = material.model, material.metric_names
    threads: Lanes | StageThreads
    if strategy.pipeline > 1:
        threads = StageThreads(task, model, names, num_stages=strategy.pipeline, **shared)
    else:
        threads = Lanes(model, task.loss, names, num_lanes=strategy.lanes, **shared)
    setting.closers.append(threads.close)
    return threads


def _known(placed: Placed) -> tuple[list[Slot], list[nn.Parameter]]:
    return list(placed.slots), list(placed.parameters)


def _replicate(setting: Setting, material: Material) -> Arrangement:
    placed = _whole(setting, material)
    if setting.recipe.is_ordered:
        return Arrangement(placed, ordered_sums(setting, *_known(placed), cut_rows(placed.slots, 1)))
    wire = setting.wire(setting.mesh.replica)
    return Arrangement(placed, setting.pieces.reducer(placed.parameters, wire, setting.bucket_bytes))


def _zero_1(setting: Setting, material: Material) -> Arrangement:
    placed = _whole(setting, material)
    mesh, shard = setting.mesh, setting.mesh.axes["shard"]
    cuts = cut_rows(placed.slots, shard.size)
    wires = setting.wire(shard), setting.wire(mesh.replica)
    reducer: Reducer
    if setting.recipe.is_ordered:
        reducer = ordered_sums(setting, *_known(placed), cuts)
    else:
        reducer = ShardedReducer(placed.parameters, cuts, *wires, setting.bucket_bytes)
        reducer = AgreedNorm(reducer, mesh.inside, setting.net)
    return Arrangement(
        placed,
        reducer,
        own_parts(placed.slots, cuts, shard.rank),
        ParameterGather(placed.parameters, cuts, shard, setting.net),
    )


def _pipeline(setting: Setting, material: Material) -> Arrangement:
    if setting.recipe.runtime.compile:
        raise StrategyError(
            "runtime.compile compiles the whole model, and a stage runs a part of it",
            next_step="set runtime.compile = false, or choose a strategy without pipeline",
        )
    stages, model = setting.mesh.axes["pipeline"], material.model
    cut = cut_model(material.task, model, trained_parameters(model), stages.size, stages.rank)
    placed = Pipeline(
        material.task,
        model,
        cut,
        material.metric_names,
        wire=StageWire(stages, setting.net, material.device),
        precision=setting.precision(material.device),
        phases=setting.phases,
    )
    own = [(slot, p) for (slot, p), mine in zip(placed.slots.items(), cut.own, strict=True) if mine]
    trained = {replace(slot, axes=frozenset({"pipeline"})): p for slot, p in own}
    if setting.recipe.is_ordered:
        return Arrangement(placed, ordered_stage(setting, material, placed), trained)
    return Arrangement(placed, _stage_sums(setting, placed), trained)


def _stage_sums(setting: Setting, placed: Pipeline) -> Reducer:
    mesh, cut = setting.mesh, placed.cut
    reduced = [placed.parameters[i] for i in cut.reduced]
    inner = setting.pieces.reducer(reduced, setting.wire(mesh.replica), setting.bucket_bytes)
    reducer = StageReducer(inner, cut, placed.parameters, mesh.axes["pipeline"], setting.net)
    return AgreedNorm(reducer, mesh.inside, setting.net)


LAYOUTS: Mapping[str, Callable[[Setting, Material], Arrangement]] = {
    "replicate": _replicate,
    "zero-1": _zero_1,
    "pipeline": _pipeline,
}
