"""Put a session together from a recipe and a task. Collective: every rank calls it with the same recipe.

The pieces are arguments, so that a test, a fault or a later strategy replaces one without touching the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.checkpoint import load_weights
from paceline.cluster import Cluster
from paceline.comm import Net
from paceline.data import Feed, Loader, Order
from paceline.errors import DataError, DeviceError, StrategyError
from paceline.layout.precision import compile_or_explain, recompute_blocks
from paceline.mesh import Group, Mesh
from paceline.models.dropout import name_dropouts
from paceline.observe import Phases
from paceline.optim import build_optimizer
from paceline.recipe import Recipe, Strategy, support
from paceline.state import LossScale, TrainState
from paceline.sync.witness import LossEar
from paceline.task import Source, Task
from paceline.training.arrange import Material, Pieces, Setting
from paceline.training.by_machine import choose_by_machine
from paceline.training.contract import (
    check_loss,
    refuse_two_optimizers,
    require_equal_shapes,
    tell_large_batch,
)
from paceline.training.guard import guard_tail
from paceline.training.layouts import LAYOUTS
from paceline.training.numerics import check_numerics
from paceline.training.rules import RULES
from paceline.training.session import Notes, Session


def build_session(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    pieces: Pieces | None = None,
    warn: Callable[[str], None] = lambda text: None,
    stop_requested: Callable[[], bool] = lambda: False,
    fresh: bool = True,
) -> Session:
    """Build one rank's session.

    Args:
        recipe: what to do; equal on every rank.
        task: model, data and loss; built alike on every rank.
        cluster: connected.
        device: where this rank computes.
        warn: receives sentences about what was asked for and runs differently.
        stop_requested: see `EveryStep`.
        fresh: the run begins here, with the weights that the recipe names; false: it will be restored.
    Raises:
        StrategyError: the strategy does not fit the processes.
        TaskError, DataError: the task breaks its contract, or there is no data.
        CheckpointError: the first weights cannot be read, or are those of another model.
    """
    pieces = pieces or Pieces()
    strategy, notes = resolved(recipe, cluster.world_size), Notes()
    recipe = choose_by_machine(recipe, task, cluster, device, warn=warn, note=notes.add)
    setting = Setting(
        recipe=recipe.replace(strategy=strategy),
        cluster=cluster,
        mesh=Mesh.build(cluster, strategy.degrees),
        net=Net(recipe.runtime.deadline_seconds, times_calls=device.type == "cpu"),
        phases=Phases(),
        pieces=pieces,
        items_per_sample=max(1, task.num_tokens_per_sample),
        stop_requested=stop_requested,
        device=device,
        warn=warn,
    )
    require_data(task)
    tell_large_batch(recipe, task, warn)
    model = prepare_model(recipe if fresh else recipe.replace(init_from=None), task, device)
    require_equal_shapes(model, setting.net, setting.mesh.world)
    make_equal(model, setting.net, setting.mesh.world)
    names = check_loss(task, model, device)
    recompute_and_compile(recipe, task, model, device, warn)
    ear = LossEar(task.loss)
    material = Material(replace(task, loss=ear), model, names, device)
    arranged = LAYOUTS[strategy.layout](setting, material)
    optimizer = arranged.adopt(build_task_optimizer(recipe, task, model))
    if recipe.reproducible:
        check_numerics(setting.mesh, setting.net, model, optimizer)
    state = TrainState(model, optimizer, loss_scale(recipe), trained=arranged.trained)
    feed = build_feed(setting, task, device)
    tail = arranged.tail(setting, state, feed.num_steps)
    return Session(
        recipe=recipe,
        cluster=cluster,
        mesh=setting.mesh,
        net=setting.net,
        task=task,
        state=state,
        placed=arranged.placed,
        feed=feed,
        tail=guard_tail(tail, setting, arranged.placed, ear, notes.add),
        rule=RULES[strategy.sync_word](setting, arranged, state),
        notes=notes,
        closers=setting.closers,
    )


def build_feed(setting: Setting, task: Task, device: torch.device) -> Feed:
    """The units of this rank's replica, and their loader."""
    recipe, data, servers = setting.recipe, setting.mesh.data, setting.recipe.strategy.servers
    order = build_order(recipe, task)
    place = max(0, data.rank - servers), data.size - servers  # servers come first, and train nothing
    work = setting.pieces.work(order, recipe.batch.shards, recipe.seed, *place)
    loader = build_loader(recipe, task, task.data, device)
    intervals = recipe.evaluate.every_steps, recipe.checkpoint.every_steps, recipe.hash_every
    return Feed(work, loader, num_steps_of(recipe, order.steps_per_epoch), intervals)


def resolved(recipe: Recipe, processes: int) -> Strategy:
    """The recipe's strategy with its replicas filled in.

    Raises:
        StrategyError: this combination is not supported; names the nearest that is.
    """
    answer = support(recipe.strategy, processes=processes, shards=recipe.batch.shards)
    if not answer.ok:
        raise StrategyError(
            f"strategy '{recipe.strategy}' on {processes} processes: {answer.reason}",
            next_step=f"the nearest that is supported: {answer.nearest}",
        )
    return answer.nearest


def require_data(task: Task) -> None:
    """Raises: DataError: there is nothing to train on."""
    if len(task.data) == 0:
        raise DataError("the training data is empty", next_step="look at the task's options that select it")


def build_order(recipe: Recipe, task: Task) -> Order:
    """The order of samples of every epoch."""
    batch = recipe.batch
    return Order(len(task.data), batch.size, recipe.seed, shuffle=batch.shuffle, drop_last=batch.drop_last)


def build_loader(recipe: Recipe, task: Task, source: Source, device: torch.device) -> Loader:
    """A loader of one source, as the recipe says."""
    return Loader(
        source, task.collate, recipe.loader, device, deadline_seconds=recipe.runtime.deadline_seconds
    )


def num_steps_of(recipe: Recipe, steps_per_epoch: int) -> int:
    """Length of the run in steps."""
    return recipe.steps or math.ceil((recipe.epochs or 0) * steps_per_epoch)


def prepare_model(recipe: Recipe, task: Task, device: torch.device) -> nn.Module:
    """The task's model on its device: weights from a file, or set by name where the task knows how."""
    if task.initialize is not None:
        task.initialize(task.model, recipe.seed)
    if recipe.init_from is not None:
        load_weights(task.model, recipe.init_from)
    name_dropouts(task.model)
    return task.model.to(device)


def make_equal(model: nn.Module, net: Net, group: Group) -> None:
    """Give every rank the parameters and buffers of rank 0, in one broadcast a dtype.

    Wire: n bytes received by each rank but the first.
    """
    if group.size == 1:
        return
    tensors: list[Tensor] = [p.detach() for p in model.parameters()] + list(model.buffers())
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        alike = [t for t in tensors if t.dtype == dtype]
        flat = net.broadcast(torch.cat([t.reshape(-1) for t in alike]), group).wait()
        for t, piece in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            t.copy_(piece.view_as(t))


def recompute_and_compile(
    recipe: Recipe, task: Task, model: nn.Module, device: torch.device, warn: Callable[[str], None]
) -> None:
    """Change the model in place as the recipe's memory and runtime sections say."""
    if recipe.memory.recompute == "blocks":
        recompute_blocks(model, task.blocks)
    if recipe.runtime.compile:
        reason = compile_or_explain(model, device.type)
        if reason:
            warn(reason)


def build_task_optimizer(recipe: Recipe, task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """The task's own optimizer, or the recipe's by name."""
    if task.optimizer is not None:
        refuse_two_optimizers(recipe)
        return task.optimizer(model)
    return build_optimizer(model.named_parameters(), recipe.optimizer, fused_allowed=not recipe.reproducible)


def loss_scale(recipe: Recipe) -> LossScale:
    """Dynamic for fp16, 1 for the rest."""
    if recipe.precision.compute == "fp16":
        return LossScale(recipe.precision.init_scale, recipe.precision.growth_steps)
    return LossScale()


def choose_device(name: str, local_rank: int, processes_here: int) -> torch.device:
    """`auto` takes one NVIDIA GPU a process where there are enough, the processor otherwise.

    Raises:
        DeviceError: "cuda" was asked for and is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and count < processes_here:
        raise DeviceError(
            f'runtime.device = "cuda": this host has {count} NVIDIA GPUs for {processes_here} processes',
            next_step='start fewer processes, or set runtime.device = "auto" to use the processor',
        )
    if name == "cpu" or count < processes_here:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)
