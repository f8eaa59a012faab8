"""From a strategy to its parts: where state lives, what goes over the wire, when replicas agree.

Each choice is a table from its word to a constructor; nothing else in the project looks at the words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from paceline.cluster import Cluster
from paceline.comm import (
    AgreedNorm,
    Codec,
    CodedWire,
    Int8,
    Net,
    ParameterGather,
    PlainWire,
    Reducer,
    ShardedReducer,
    Wire,
    build_reducer,
)
from paceline.comm.channel import Channel, SocketChannel, accept_all, connect, listen
from paceline.comm.text import share_text
from paceline.data import LockstepWork
from paceline.errors import StrategyError
from paceline.layout import Placed, Precision, Replicate
from paceline.layout.pipeline import Pipeline, StageReducer, cut_model
from paceline.layout.zero import adopt, cut_rows, own_parts
from paceline.mesh import Group, Mesh
from paceline.observe import Phases
from paceline.optim import build_schedule
from paceline.recipe import Recipe
from paceline.state import Slot, TrainState, trained_parameters
from paceline.sync import EveryStep, Gathered, InnerMoments, LocalRounds, Outer, Rule, Tail, UpdateTail
from paceline.sync.pipedream import PipeDream
from paceline.sync.policy import ApplyEach, FirstN, Policy
from paceline.sync.residuals import Residuals
from paceline.sync.server import SERVER, Server, Worker
from paceline.task import Task


@dataclass(frozen=True)
class Pieces:
    """Constructors of the parts that may be exchanged."""

    work: Callable[..., LockstepWork] = LockstepWork
    placed: Callable[..., Replicate] = Replicate
    reducer: Callable[..., Reducer] = build_reducer
    tail: Callable[..., Tail] = UpdateTail
    rule: Callable[..., EveryStep] = EveryStep
    schedule: Callable[..., Any] = build_schedule


@dataclass(frozen=True)
class Setting:
    """What the constructors are given: equal on every rank but for the place in the mesh."""

    recipe: Recipe
    cluster: Cluster
    mesh: Mesh
    net: Net
    phases: Phases
    pieces: Pieces
    items_per_sample: int
    stop_requested: Callable[[], bool]
    closers: list[Callable[[], None]] = field(default_factory=list)

    @property
    def bucket_bytes(self) -> int:
        return self.recipe.runtime.bucket_bytes

    def wire(self, group: Group) -> Wire:
        """Sums over a group, through the recipe's codec where there is a wire at all."""
        codec = CODECS[self.recipe.strategy.codec]()
        plain = codec is None or group.size == 1
        return PlainWire(self.net, group) if plain or codec is None else CodedWire(self.net, group, codec)


def _nothing() -> None:
    """The parameters are whole already."""


@dataclass(frozen=True)
class Arrangement:
    """A layout's share of a session.

    Args:
        placed: forward and backward.
        reducer: gives this rank the sums of what it updates.
        trained: what its optimizer updates, if that is not the model's own parameters.
        share: after an update, brings every rank's parameters up to date.
    """

    placed: Placed
    reducer: Reducer
    trained: Mapping[Slot, nn.Parameter] = field(default_factory=dict)
    share: Callable[[], None] = _nothing

    def adopt(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Hand this rank's parts to an optimizer that was built over the whole model."""
        if self.trained:
            parts = {slot.name: p for slot, p in self.trained.items()}
            whole = self.placed.slots.items()
            adopt(optimizer, {p: parts[slot.name] for slot, p in whole if slot.name in parts})
        return optimizer

    def tail(self, setting: Setting, state: TrainState, num_steps: int) -> Tail:
        """The tail over what this rank updates."""
        recipe = setting.recipe
        inner = setting.pieces.tail(
            state,
            self.updated(),
            setting.pieces.schedule(
                recipe.schedule, num_steps * recipe.strategy.updates_per_step, recipe.batch.size
            ),
            clip_norm=recipe.optimizer.clip_norm,
            reduction=recipe.batch.reduction,
        )
        return Gathered(inner, self.share) if self.trained else inner

    def updated(self) -> Sequence[nn.Parameter | None]:
        """By parameter index, what this rank updates of it."""
        if not self.trained:
            return self.placed.parameters
        parts = {slot.name: p for slot, p in self.trained.items()}
        return [parts.get(slot.name) for slot in self.placed.slots]


@dataclass(frozen=True)
class Material:
    """What a layout places.

    Args:
        model: whole, on its device, equal on every rank.
        metric_names: sorted names of the metrics that the task's loss returns.
    """

    task: Task
    model: nn.Module
    metric_names: tuple[str, ...]
    device: torch.device


# -- layouts ---------------------------------------------------------------------------------------------


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
    inner = setting.pieces.reducer([p for _, p in own], setting.wire(mesh.replica), setting.bucket_bytes)
    reducer = StageReducer(inner, cut, placed.parameters, stages, setting.net)
    trained = {replace(slot, axes=frozenset({"pipeline"})): p for slot, p in own}
    return Arrangement(placed, AgreedNorm(reducer, mesh.inside, setting.net), trained)


LAYOUTS: Mapping[str, Callable[[Setting, Material], Arrangement]] = {
    "replicate": _replicate,
    "zero-1": _zero_1,
    "pipeline": _pipeline,
}


# -- codecs ----------------------------------------------------------------------------------------------

CODECS: Mapping[str, Callable[[], Codec | None]] = {"fp32": lambda: None, "int8": Int8}


# -- rules -----------------------------------------------------------------------------------------------


def _step(setting: Setting, reducer: Reducer, group: Group) -> EveryStep:
    return setting.pieces.rule(
        group,
        setting.net,
        reducer,
        phases=setting.phases,
        items_per_sample=setting.items_per_sample,
        stop_requested=setting.stop_requested,
    )


def _every_step(setting: Setting, arranged: Arrangement, state: TrainState) -> Rule:
    _keep_residuals(setting, arranged.reducer, arranged.placed, state)
    return _step(setting, arranged.reducer, setting.mesh.world)


def _local(setting: Setting, arranged: Arrangement, state: TrainState, outer: Outer) -> Rule:
    mesh = setting.mesh
    alone = replace(mesh.replica, ranks=mesh.world.ranks[mesh.world.rank :][:1], rank=0, handle=None)
    own = setting.pieces.reducer(arranged.placed.parameters, PlainWire(setting.net, alone), 1)
    rule = LocalRounds(
        _step(setting, own, mesh.inside),
        int(setting.recipe.strategy.sync.partition(":")[2]),
        outer,
        lambda anchors: build_reducer(anchors, setting.wire(mesh.replica), setting.bucket_bytes),
        arranged.placed,
        world=mesh.world,
        net=setting.net,
        phases=setting.phases,
    )
    _keep_residuals(setting, rule.reducer, arranged.placed, state)
    state.keepers["outer"] = rule
    state.keepers["inner"] = InnerMoments(state, mesh.replica)
    return rule


def _diloco(setting: Setting, arranged: Arrangement, state: TrainState) -> Rule:
    outer = setting.recipe.outer
    return _local(setting, arranged, state, Outer(outer.lr, outer.momentum))


def _keep_residuals(setting: Setting, reducer: Reducer, placed: Placed, state: TrainState) -> None:
    if setting.recipe.strategy.codec != "fp32":
        state.keepers["residual"] = Residuals(reducer, list(placed.slots), setting.mesh.data)


def _served(setting: Setting, arranged: Arrangement, state: TrainState, policy: Policy) -> Rule:
    """Rank 0 serves, all others work."""
    workers = setting.mesh.world.ranks[1:]
    if setting.recipe.loader.workers:
        raise StrategyError(
            "loader.workers reads ahead, and under a server nobody knows which samples come next",
            next_step="set loader.workers = 0",
        )
    channel = _channel(setting)
    setting.closers.append(channel.close)
    shared = (channel, setting.net, setting.phases, setting.stop_requested)
    rule = (
        Server(policy, workers, *shared)
        if setting.mesh.world.rank == SERVER
        else Worker(len(workers), setting.items_per_sample, *shared)
    )
    state.keepers["work"] = rule
    return rule


def _channel(setting: Setting) -> Channel:
    """Connect every worker with the server; collective."""
    world, cluster, limit = setting.mesh.world, setting.cluster, setting.net.deadline_seconds
    device = torch.device("cpu")
    if world.rank == SERVER:
        with listen(cluster.address) as listener:
            share_text(str(listener.getsockname()[1]), world, setting.net, device)
            peers = accept_all(listener, cluster.token, world.ranks[1:], limit)
        return SocketChannel(peers, setting.net.ledger)
    port = int(share_text("", world, setting.net, device))
    hub = connect(cluster.address, port, world.rank, cluster.token, limit)
    return SocketChannel({SERVER: hub}, setting.net.ledger)


def _server_async(setting: Setting, arranged: Arrangement, state: TrainState) -> Rule:
    return _served(setting, arranged, state, ApplyEach(setting.mesh.world.size - 1))


def _backup(setting: Setting, arranged: Arrangement, state: TrainState) -> Rule:
    num_backups = int(setting.recipe.strategy.sync.partition(":")[2])
    return _served(setting, arranged, state, FirstN(setting.mesh.world.size - 1, num_backups))


def _pipedream(setting: Setting, arranged: Arrangement, state: TrainState) -> Rule:
    recipe, placed = setting.recipe, arranged.placed
    unfit = [
        name
        for name, wrong in (
            ("optimizer.clip_norm", recipe.optimizer.clip_norm is not None),
            ('precision.compute = "fp16"', recipe.precision.compute == "fp16"),
        )
        if wrong
    ]
    if unfit or not isinstance(placed, Pipeline) or placed.cut.tied:
        raise StrategyError(
            f"pipedream updates each stage alone: {', '.join(unfit) or 'tied weights on two stages'}"
            " would need all stages at once",
            next_step="leave it out, or choose sync=every-step",
        )
    return PipeDream(
        placed,
        setting.mesh.world,
        setting.net,
        setting.phases,
        items_per_sample=setting.items_per_sample,
        stop_requested=setting.stop_requested,
    )


RULES: Mapping[str, Callable[[Setting, Arrangement, TrainState], Rule]] = {
    "every-step": _every_step,
    "local": lambda setting, arranged, state: _local(setting, arranged, state, Outer()),
    "diloco": _diloco,
    "server-async": _server_async,
    "backup": _backup,
    "pipedream": _pipedream,
}
