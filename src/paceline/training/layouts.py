"""From a strategy to its layout: where state lives. One table from words to constructors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.comm import (
    AgreedNorm,
    ParameterGather,
    ShardedReducer,
)
from paceline.errors import StrategyError
from paceline.layout import Precision, Replicate
from paceline.layout.pipeline import Pipeline, StageReducer, cut_model
from paceline.layout.zero import cut_rows, own_parts
from paceline.slot import trained_parameters
from paceline.training.arrange import Arrangement, Material, Setting


def _whole(setting: Setting, material: Material) -> Replicate:
    return setting.pieces.placed(
        material.model,
        material.task.loss,
        material.metric_names,
        precision=Precision(setting.recipe.precision.compute, material.device.type),
        phases=setting.phases,
        overlap=setting.mesh.data.size > 1,
    )


def _replicate(setting: Setting, material: Material) -> Arrangement:
    placed = _whole(setting, material)
    wire = setting.wire(setting.mesh.replica)
    return Arrangement(placed, setting.pieces.reducer(placed.parameters, wire, setting.bucket_bytes))


def _zero_1(setting: Setting, material: Material) -> Arrangement:
    placed = _whole(setting, material)
    mesh, shard = setting.mesh, setting.mesh.axes["shard"]
    cuts = cut_rows(placed.slots, shard.size)
    wires = setting.wire(shard), setting.wire(mesh.replica)
    reducer = ShardedReducer(placed.parameters, cuts, *wires, setting.bucket_bytes)
    return Arrangement(
        placed,
        AgreedNorm(reducer, mesh.inside, setting.net),
        own_parts(placed.slots, cuts, shard.rank),
        ParameterGather(placed.parameters, cuts, shard, setting.net),
    )


def _pipeline(setting: Setting, material: Material) -> Arrangement:
    if setting.recipe.runtime.compile:
        raise StrategyError(
            "runtime.compile compiles the whole model, and a stage runs a part of it",
            next_step="set runtime.compile = false, or choose a strategy without pipeline",
        )
    mesh, stages, model = setting.mesh, setting.mesh.axes["pipeline"], material.model
    cut = cut_model(material.task, model, trained_parameters(model), stages.size, stages.rank)
    placed = Pipeline(
        material.task,
        model,
        cut,
        material.metric_names,
        group=stages,
        net=setting.net,
        precision=Precision(setting.recipe.precision.compute, material.device.type),
        phases=setting.phases,
    )
    own = [(slot, p) for (slot, p), mine in zip(placed.slots.items(), cut.own, strict=True) if mine]
    reduced = [placed.parameters[i] for i in cut.reduced]
    inner = setting.pieces.reducer(reduced, setting.wire(mesh.replica), setting.bucket_bytes)
    reducer = StageReducer(inner, cut, placed.parameters, stages, setting.net)
    trained = {replace(slot, axes=frozenset({"pipeline"})): p for slot, p in own}
    return Arrangement(placed, AgreedNorm(reducer, mesh.inside, setting.net), trained)


LAYOUTS: Mapping[str, Callable[[Setting, Material], Arrangement]] = {
    "replicate": _replicate,
    "zero-1": _zero_1,
    "pipeline": _pipeline,
}
