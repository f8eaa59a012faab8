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

from paceline.comm.net import Net
from paceline.comm.race_detector import CommChecks
from paceline.data.build_feed import build_feed
from paceline.data.task_data import build_order, prepare_data
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.observe.step_stats import PhaseTimer
from paceline.parallel.gradient_reduction import build_gradient_norm
from paceline.parallel.model_layout import ModelLayout, SessionBase, place_model
from paceline.parallel.model_runner import MetricNames
from paceline.parallel.session_context import Components, EventQueue, SessionContext, TaskMaterial
from paceline.recipe.recipe import Recipe, max_sharers
from paceline.recipe.strategy import Strategy
from paceline.recipe.support import resolve_strategy
from paceline.session.model_setup import (
    apply_buffer_reductions,
    broadcast_model,
    build_task_optimizer,
    prepare_model,
    recompute_and_compile,
)
from paceline.session.partition_check import check_task_and_sequences, check_tensor_plan
from paceline.session.reproducibility import check_numerics
from paceline.session.rule_switch import enter_rule
from paceline.session.session import Session
from paceline.session.start_warnings import synchronize_batch_norm, warn_before_start, warn_missing_kernels
from paceline.session.task_contract import (
    require_data,
    require_equal_shapes,
    require_same_order,
    warn_large_batch,
)
from paceline.state.train_state import LossScale, TrainState
from paceline.sync.bad_value_locator import LossRecorder
from paceline.sync.health import check_health_supported, install_guard
from paceline.sync.update import UpdateStep, update_parts
from paceline.sync.weight_average import averages_after_rounds, build_average
from paceline.task import Task
from paceline.tuning.hardware_defaults import choose_hardware_defaults
from paceline.tuning.stage_choice import choose_stages
from paceline.tuning.tune_recipe import apply_memory_budget, choose_codec_and_buckets


def build_session(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    pieces: Components | None = None,
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
    task, notes = prepare_data(task, recipe), EventQueue()
    told: dict[str, Any] = {"warn": warn, "note": notes.add}
    recipe, strategy = choose_settings(recipe, task, cluster, device, **told)
    check_health_supported(recipe.health, strategy)
    found = pieces or Components()
    setting = make_context(
        recipe, strategy, task, cluster, device, pieces=found, stop_requested=stop_requested, **told
    )
    check_before_build(setting, recipe, task)
    warn_missing_kernels(setting)
    setting, recipe = apply_memory_budget(setting, recipe, task)
    return build_state(setting, recipe, task, notes, fresh=fresh)


def choose_settings(
    recipe: Recipe, task: Task, cluster: Cluster, device: torch.device, **told: Any
) -> tuple[Recipe, Strategy]:
    """What the recipe leaves to the processes, the machine and the network; collective.

    Args:
        told: who is told what was chosen.
    """
    most, called = max_sharers(recipe)
    strategy = resolve_strategy(recipe.strategy, processes=cluster.world_size, shards=most, called=called)
    recipe = choose_hardware_defaults(recipe, task, cluster, device, **told)
    recipe, strategy = choose_stages(recipe, strategy, task, cluster, device, **told)
    return choose_codec_and_buckets(recipe, strategy, task, cluster, device, **told)


def make_context(
    recipe: Recipe, strategy: Strategy, task: Task, cluster: Cluster, device: torch.device, **given: Any
) -> SessionContext:
    """The mesh, this rank's wires, and all else that constructors are given; collective.

    Args:
        given: further fields of the setting.
    """
    net = Net(recipe.runtime.deadline_seconds, times_calls=device.type == "cpu")
    return SessionContext(
        recipe=recipe.under(strategy.under(strategy.phase(0).rule)),
        cluster=cluster,
        mesh=Mesh.build(cluster, strategy.degrees),
        net=net,
        debugging=CommChecks(recipe.debug, net),
        phases=PhaseTimer(),
        items_per_sample=max(1, task.num_tokens_per_sample),
        device=device,
        choices=strategy.choices,
        **given,
    )


def check_before_build(setting: SessionContext, recipe: Recipe, task: Task) -> None:
    """See that the task can be trained, alike on all ranks; collective."""
    require_data(task)
    warn_large_batch(recipe, task, setting.warn)
    warn_before_start(setting, task)
    require_same_order(build_order(recipe, task), setting.net, setting.mesh.world)


def build_state(
    setting: SessionContext, recipe: Recipe, task: Task, notes: EventQueue, *, fresh: bool
) -> Session:
    """The model where it lies, its state, and the session of both; collective."""
    session_base = build_session_base(setting, recipe, task, fresh=fresh)
    sharded_model = session_base.layout.runner.sharded_model
    optimizer = build_task_optimizer(setting, task, sharded_model)
    if recipe.reproducible:
        check_numerics(setting.mesh, setting.net, sharded_model, optimizer)
    state = TrainState(sharded_model, optimizer, build_loss_scale(recipe))
    session = Session(
        recipe=recipe,
        net=setting.net,
        task=task,
        state=state,
        runner=session_base.layout.runner,
        notes=notes,
        session_base=session_base,
        exit_callbacks=session_base.layout.exit_callbacks,
        **build_rule_parts(session_base, task, state),
    )
    session.enter = partial(enter_rule, session, build_rule_parts)
    session.listen(task.callbacks)
    getattr(optimizer, "on_build", id)(session)  # most need nothing but gradients
    return session


def build_session_base(setting: SessionContext, recipe: Recipe, task: Task, *, fresh: bool) -> SessionBase:
    """The model, equal on all ranks, and the parts of it that this rank has; collective.

    Args:
        recipe: with the strategy as the user wrote it.
        fresh: see `build_session`.
    """
    device = setting.device
    begun = recipe if fresh else recipe.replace(init_from=None)
    model = prepare_model(begun, task, device, warn=setting.warn)
    equalize_model(model, setting)
    apply_buffer_reductions(recipe, task, model)
    recompute_and_compile(recipe, task, model, device, setting.warn)
    synchronize_batch_norm(setting, model, build_order(recipe, task))
    check_tensor_plan(setting, task, model)
    loss_recorder = LossRecorder(task.loss)
    material = TaskMaterial(replace(task, loss=loss_recorder), model, MetricNames(), device, recipe.seed)
    layout = place_model(setting, material)
    check_task_and_sequences(task, layout.runner, setting.net, setting.mesh)
    loss_recorder.take()  # what a trial said
    return SessionBase(setting, layout, loss_recorder)


def build_rule_parts(session_base: SessionBase, task: Task, state: TrainState) -> dict[str, Any]:
    """The fields of a session that hang on its membership; collective."""
    setting, layout = session_base.setting, session_base.layout
    feed = build_feed(setting, task, setting.device)
    update_step = build_update_step(setting, layout, state, feed.num_steps)
    install_guard(update_step, setting, layout.runner, session_base.loss_recorder)
    update_step.parts = setting.pieces.update(update_step.parts)
    return {
        "strategy": setting.recipe.strategy,
        "cluster": setting.cluster,
        "mesh": setting.mesh,
        "feed": feed,
        "update_step": update_step,
        "rule": setting.recipe.strategy.rule.load()(setting, layout, state),
        "closers": setting.closers,
        "loss_tolerant_rules": setting.loss_tolerant_rules,
        "debugging": setting.debugging,
        "average": build_average(setting, layout, state, update_step),
        "average_after_rounds": averages_after_rounds(setting),
    }


def equalize_model(model: nn.Module, setting: SessionContext) -> None:
    """All ranks go on with the parameters of rank 0.

    Raises:
        TaskError: they have built different models.
    """
    require_equal_shapes(model, setting.net, setting.mesh.world)
    broadcast_model(model, setting.net, setting.mesh.world)


def build_update_step(
    setting: SessionContext, layout: ModelLayout, state: TrainState, num_steps: int
) -> UpdateStep:
    """The update step over what this rank updates."""
    recipe, sharded_model = setting.recipe, layout.runner.sharded_model
    state.updates_per_step = recipe.strategy.updates_per_step
    parts = update_parts(
        setting.pieces.schedule(recipe.schedule, num_steps * state.updates_per_step, recipe.batch.size),
        reduction=recipe.batch.reduction,
        clip_norm=recipe.optimizer.clip_norm,
        norm=setting.pieces.norm(build_gradient_norm(setting, sharded_model)),
        gather=layout.gather,
    )
    return UpdateStep(state, sharded_model.updates, parts)


def build_loss_scale(recipe: Recipe) -> LossScale:
    """Dynamic for fp16, 1 for the rest."""
    if recipe.precision.compute == "fp16":
        return LossScale(recipe.precision.init_scale, recipe.precision.growth_steps)
    return LossScale()
