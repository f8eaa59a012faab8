"""Put a session together from a recipe and a task. Collective: every rank calls it with the same recipe.

The pieces are arguments, so that a test, a fault or a later strategy replaces one without touching the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.cluster import Cluster
from paceline.comm import Net
from paceline.data import build_order, settled
from paceline.layout.sums import MetricNames
from paceline.mesh import Mesh
from paceline.observe import Phases
from paceline.recipe import Recipe, Strategy, most_sharers, resolve
from paceline.state import LossScale, TrainState
from paceline.sync import UpdateStep, update_parts
from paceline.sync.witness import LossEar
from paceline.task import Task
from paceline.training.arrange import Material, Notes, Pieces, Setting
from paceline.training.averaging import build_average, by_rounds
from paceline.training.budget import keep_to_budget
from paceline.training.buffer_hows import say_hows
from paceline.training.by_machine import choose_by_machine
from paceline.training.check_plan import check_plan
from paceline.training.check_sequences import check_task
from paceline.training.contract import (
    require_data,
    require_equal_shapes,
    require_same_order,
    tell_large_batch,
)
from paceline.training.debugging import Debugging
from paceline.training.feeds import build_feed
from paceline.training.guard import guard_update, refuse_health
from paceline.training.layouts import Grounds, Layout, place
from paceline.training.micro_batches import synchronize, tell_before
from paceline.training.missing_kernels import say_missing_kernels
from paceline.training.numerics import check_numerics
from paceline.training.optimizers import build_task_optimizer
from paceline.training.prepare import make_equal, prepare_model, recompute_and_compile
from paceline.training.reductions import build_norm
from paceline.training.session import Session
from paceline.training.stage_choice import choose_stages
from paceline.training.switching import enter
from paceline.training.wire_choice import choose_wire


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
    task, notes = settled(task, recipe), Notes()
    told: dict[str, Any] = {"warn": warn, "note": notes.add}
    recipe, strategy = choose(recipe, task, cluster, device, **told)
    refuse_health(recipe.health, strategy)
    found = pieces or Pieces()
    setting = lay_out(
        recipe, strategy, task, cluster, device, pieces=found, stop_requested=stop_requested, **told
    )
    require(setting, recipe, task)
    say_missing_kernels(setting)
    setting, recipe = keep_to_budget(setting, recipe, task)
    return begin(setting, recipe, task, notes, fresh=fresh)


def choose(
    recipe: Recipe, task: Task, cluster: Cluster, device: torch.device, **told: Any
) -> tuple[Recipe, Strategy]:
    """What the recipe leaves to the processes, the machine and the network; collective.

    Args:
        told: who is told what was chosen.
    """
    most, called = most_sharers(recipe)
    strategy = resolve(recipe.strategy, processes=cluster.world_size, shards=most, called=called)
    recipe = choose_by_machine(recipe, task, cluster, device, **told)
    recipe, strategy = choose_stages(recipe, strategy, task, cluster, device, **told)
    return choose_wire(recipe, strategy, task, cluster, device, **told)


def lay_out(
    recipe: Recipe, strategy: Strategy, task: Task, cluster: Cluster, device: torch.device, **given: Any
) -> Setting:
    """The mesh, this rank's wires, and all else that constructors are given; collective.

    Args:
        given: further fields of the setting.
    """
    net = Net(recipe.runtime.deadline_seconds, times_calls=device.type == "cpu")
    return Setting(
        recipe=recipe.under(strategy.under(strategy.phase(0).rule)),
        cluster=cluster,
        mesh=Mesh.build(cluster, strategy.degrees),
        net=net,
        debugging=Debugging(recipe.debug, net),
        phases=Phases(),
        items_per_sample=max(1, task.num_tokens_per_sample),
        device=device,
        choices=strategy.choices,
        **given,
    )


def require(setting: Setting, recipe: Recipe, task: Task) -> None:
    """See that the task can be trained, alike on all ranks; collective."""
    require_data(task)
    tell_large_batch(recipe, task, setting.warn)
    tell_before(setting, task)
    require_same_order(build_order(recipe, task), setting.net, setting.mesh.world)


def begin(setting: Setting, recipe: Recipe, task: Task, notes: Notes, *, fresh: bool) -> Session:
    """The model where it lies, its state, and the session of both; collective."""
    grounds = lay_grounds(setting, recipe, task, fresh=fresh)
    holding = grounds.layout.placed.holding
    optimizer = build_task_optimizer(setting, task, holding)
    if recipe.reproducible:
        check_numerics(setting.mesh, setting.net, holding, optimizer)
    state = TrainState(holding, optimizer, loss_scale(recipe))
    session = Session(
        recipe=recipe,
        net=setting.net,
        task=task,
        state=state,
        placed=grounds.layout.placed,
        notes=notes,
        grounds=grounds,
        leavers=grounds.layout.leavers,
        **arrange(grounds, task, state),
    )
    session.enter = partial(enter, session, arrange)
    session.listen(task.callbacks)
    getattr(optimizer, "on_build", id)(session)  # most need nothing but gradients
    return session


def lay_grounds(setting: Setting, recipe: Recipe, task: Task, *, fresh: bool) -> Grounds:
    """The model, equal on all ranks, and the parts of it that this rank has; collective.

    Args:
        recipe: with the strategy as the user wrote it.
        fresh: see `build_session`.
    """
    device = setting.device
    begun = recipe if fresh else recipe.replace(init_from=None)
    model = prepare_model(begun, task, device, warn=setting.warn)
    agree_on_model(model, setting)
    say_hows(recipe, task, model)
    recompute_and_compile(recipe, task, model, device, setting.warn)
    synchronize(setting, model, build_order(recipe, task))
    check_plan(setting, task, model)
    ear = LossEar(task.loss)
    material = Material(replace(task, loss=ear), model, MetricNames(), device, recipe.seed)
    layout = place(setting, material)
    check_task(task, layout.placed, setting.net, setting.mesh)
    ear.take()  # what a trial said
    return Grounds(setting, layout, ear)


def arrange(grounds: Grounds, task: Task, state: TrainState) -> dict[str, Any]:
    """The fields of a session that hang on its membership; collective."""
    setting, layout = grounds.setting, grounds.layout
    feed = build_feed(setting, task, setting.device)
    update_step = build_update_step(setting, layout, state, feed.num_steps)
    guard_update(update_step, setting, layout.placed, grounds.ear)
    update_step.parts = setting.pieces.update(update_step.parts)
    return {
        "strategy": setting.recipe.strategy,
        "cluster": setting.cluster,
        "mesh": setting.mesh,
        "feed": feed,
        "update_step": update_step,
        "rule": setting.recipe.strategy.rule.load()(setting, layout, state),
        "closers": setting.closers,
        "presence": setting.presence,
        "debugging": setting.debugging,
        "average": build_average(setting, layout, state, update_step),
        "averages_rounds": by_rounds(setting),
    }


def agree_on_model(model: nn.Module, setting: Setting) -> None:
    """All ranks go on with the parameters of rank 0.

    Raises:
        TaskError: they have built different models.
    """
    require_equal_shapes(model, setting.net, setting.mesh.world)
    make_equal(model, setting.net, setting.mesh.world)


def build_update_step(setting: Setting, layout: Layout, state: TrainState, num_steps: int) -> UpdateStep:
    """The update step over what this rank updates."""
    recipe, holding = setting.recipe, layout.placed.holding
    state.updates_per_step = recipe.strategy.updates_per_step
    parts = update_parts(
        setting.pieces.schedule(recipe.schedule, num_steps * state.updates_per_step, recipe.batch.size),
        reduction=recipe.batch.reduction,
        clip_norm=recipe.optimizer.clip_norm,
        norm=setting.pieces.norm(build_norm(setting, holding)),
        gather=layout.gather,
    )
    return UpdateStep(state, holding.updates, parts)


def loss_scale(recipe: Recipe) -> LossScale:
    """Dynamic for fp16, 1 for the rest."""
    if recipe.precision.compute == "fp16":
        return LossScale(recipe.precision.init_scale, recipe.precision.growth_steps)
    return LossScale()
