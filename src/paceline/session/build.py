"""Build the session of one rank from a recipe and a task; collective, with the same recipe on every rank.

The order matters. First everything that the recipe leaves open is chosen (`tune_recipe`), then the mesh is
built, then the task is checked, and only then memory is allocated for the model. Constructors of parts are
arguments (`Components`), so that tests and planted faults replace one part without touching the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from paceline.comm.net import Net
from paceline.comm.race_detector import CommChecks
from paceline.data.build_feed import build_feed
from paceline.data.task_data import build_order, prepare_data
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.models.training_mode import describe_modes, enter_training
from paceline.observe.step_stats import PhaseTimer
from paceline.optim.reduce_on_plateau import PLATEAU_KEY, PlateauRates, ReduceOnPlateau
from paceline.optim.user_optimizer import member_optimizers
from paceline.parallel.batch_gather import GatheringLoss, RankGather, WholeBatch, gather_scope
from paceline.parallel.buddy_copies import build_buddy_copies
from paceline.parallel.gradient_reduction import build_gradient_norm
from paceline.parallel.model_layout import ModelLayout, place_model
from paceline.parallel.model_runner import MetricNames
from paceline.parallel.session_context import Components, RuleInputs, SessionContext, TaskMaterial
from paceline.recipe.recipe import Recipe
from paceline.recipe.recovery import keeps_copies
from paceline.session.early_stopping import require_metrics
from paceline.session.model_guard import TRAINED_FLAGS_KEY, ModelGuard, ReplacedParameters
from paceline.session.model_setup import (
    apply_buffer_reductions,
    broadcast_model,
    build_slot_group,
    build_task_optimizer,
    prepare_model,
    recompute_and_compile,
    set_up_sync_batchnorm,
)
from paceline.session.partition_check import check_sequences, check_tensor_plan
from paceline.session.private_training import LEDGER_KEY, build_private_sum, with_private_samples
from paceline.session.reproducibility import check_numerics
from paceline.session.rule_switch import enter_rule
from paceline.session.session import EventQueue, RuleParts, Session, SessionBase
from paceline.session.start_warnings import warn_before_start, warn_missing_kernels
from paceline.session.task_contract import (
    check_task_loss,
    refuse_repeated_momentum_or_clip,
    require_data,
    require_equal_shapes,
    require_gather_support,
    require_same_order,
    warn_large_batch,
)
from paceline.session.training_check import TrainingCheck, needs_training_check
from paceline.state.train_state import LossScale, TrainState
from paceline.sync.bad_value_locator import LossRecorder
from paceline.sync.health import check_health_supported, install_guard
from paceline.sync.magnitude_pruning import install_masks
from paceline.sync.update import UpdateStep, update_parts
from paceline.sync.weight_average import averages_after_rounds, build_average
from paceline.task import Task
from paceline.tuning.tune_recipe import tune_recipe


def build_session(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    *,
    components: Components | None = None,
    warn: Callable[[str], None] = lambda text: None,
    stop_requested: Callable[[], bool] = lambda: False,
    fresh: bool = True,
    trains: bool = True,
    into: Session | None = None,
) -> Session:
    """Build one rank's session.

    Args:
        recipe: equal on every rank.
        task: model, data and loss; built alike on every rank.
        cluster: connected.
        device: where this rank computes.
        components: constructors in place of the usual ones.
        warn: receives sentences for the user: what was chosen, and which settings have no effect.
        stop_requested: returns whether this rank was asked to stop; checked once a round.
        fresh: the run begins here, with the weights that the recipe names; false: it will be restored.
        trains: the session makes updates; false: nothing is said about its optimizer.
        into: a session that becomes the new one; None: make one.
    Raises:
        StrategyError: the strategy does not fit the processes.
        TaskError, DataError: the task breaks its contract, or there is no data.
        CheckpointError: the first weights cannot be read, or are those of another model.
    """
    task, events = prepare_data(task, recipe), EventQueue()
    require_data(task)
    refuse_repeated_momentum_or_clip(recipe, task)
    if about_modes := describe_modes(task.model):
        warn(about_modes)
    enter_training(task.model)
    warn_large_batch(recipe, task, warn)
    recipe, strategy = tune_recipe(recipe, task, cluster, device, warn=warn, note=events.add)
    check_health_supported(recipe.health, strategy)
    net = Net(recipe.runtime.deadline_seconds, times_calls=device.type == "cpu")
    mesh = Mesh.build(cluster, strategy.degrees)
    private = build_private_sum(recipe, task, mesh, net, device, warn) if trains else None
    if private is not None and recipe.private.unit == "sample":
        components = with_private_samples(components or Components(), private)
    context = SessionContext(
        recipe=recipe.with_strategy(strategy.with_sync(strategy.phase(0).rule)),
        cluster=cluster,
        mesh=mesh,
        net=net,
        device=device,
        phases=PhaseTimer(net.activity),
        components=components or Components(),
        rule_inputs=RuleInputs(
            max(1, task.num_tokens_per_sample),
            stop_requested,
            choices=strategy.sync_choices,
            keeper=task.keeper,
            private=private,
        ),
        warn=warn,
        note=events.add,
        comm_checks=CommChecks(recipe.debug, net),
        trains=trains,
    )
    warn_before_start(context, task)
    require_same_order(build_order(recipe, task), net, context.mesh.world)
    warn_missing_kernels(context)
    session_base = build_session_base(context, recipe, task, fresh=fresh)
    return _build_from_base(session_base, recipe, task, events, into)


def _build_from_base(
    session_base: SessionBase, recipe: Recipe, task: Task, events: EventQueue, into: Session | None = None
) -> Session:
    """Build the state of a placed model and the session around it; collective."""
    context, runner = session_base.context, session_base.layout.runner
    optimizer = build_task_optimizer(context, task, runner.sharded_model)
    if recipe.reproducible:
        check_numerics(context.mesh, context.net, runner.sharded_model, optimizer)
    # A dynamic loss scale keeps small fp16 gradients from underflow; the other formats have the range of
    # fp32.
    precision = recipe.precision
    scales = precision.compute == "fp16"
    loss_scale = LossScale(precision.init_scale, precision.growth_steps) if scales else LossScale()
    state = TrainState(runner.sharded_model, optimizer, loss_scale)
    state.keep(TRAINED_FLAGS_KEY, session_base.guard.flags)
    private = session_base.context.rule_inputs.private
    if private is not None:
        state.keep(LEDGER_KEY, private.ledger)
    parts = build_rule_parts(session_base, task, state)
    session = object.__new__(Session) if into is None else into
    # In place where there is one already: the loop and all that refers to it continue with the new one.
    Session.__init__(session, recipe, task, state, runner, events, session_base, parts)
    if keeps_copies(recipe):
        context = session_base.context
        members = () if context.cluster.membership is None else context.cluster.membership.members
        in_memory = recipe.strategy.route_spec.in_memory and context.device.type == "cpu"
        session.copies = build_buddy_copies(
            context.mesh.world, members or (0,), context.net, in_memory=in_memory
        )
    session.enter_rule = partial(enter_rule, session, build_rule_parts)
    session.add_callbacks(task.callbacks)
    # Optimizers that need more than gradients (for example a closure) may define `on_build(session)`.
    for member in member_optimizers(optimizer):
        if hasattr(member, "on_build"):
            member.on_build(session)
    if task.attach is not None:
        task.attach(session)
    return session


def build_session_base(context: SessionContext, recipe: Recipe, task: Task, *, fresh: bool) -> SessionBase:
    """Build the model, equal on all ranks, and place on this rank the part that it holds; collective.

    Args:
        recipe: with the strategy as the user wrote it.
        fresh: see `build_session`.
    Raises:
        TaskError: ranks have built different models, or the model cannot be partitioned.
    """
    device, net, mesh = context.device, context.net, context.mesh
    # A run that will be restored need not read the weights with which it began.
    model = prepare_model(
        recipe if fresh else recipe.replace(init_from=None), task, device, warn=context.warn
    )
    require_equal_shapes(model, net, mesh.world)
    broadcast_model(model, net, mesh.world)
    apply_buffer_reductions(recipe, task, model)
    recompute_and_compile(recipe, task, model, device, context.warn)
    if recipe.batch.sync_batchnorm:
        set_up_sync_batchnorm(context, model, build_order(recipe, task))
    if mesh.axes["tensor"].size > 1 and not recipe.runtime.compile:
        check_tensor_plan(context, task, model)
    rank_gather = RankGather(
        mesh.data, net, lambda: require_gather_support(context, recipe, build_order(recipe, task))
    )
    loss_recorder = LossRecorder(GatheringLoss(task.loss, rank_gather))
    replaced = ReplacedParameters(model)
    material = TaskMaterial(replace(task, loss=loss_recorder), model, MetricNames(), device, recipe.seed)
    check = TrainingCheck(context, task, model) if needs_training_check(context, model) else None
    layout = place_model(context, material, check.run_whole if check else None)
    # The layout runs the loss here for the first time, which also teaches every rank the names of its
    # metrics.
    require_metrics(recipe, task, check_task_loss(context, recipe, task, layout.runner))
    if mesh.axes["context"].size > 1:
        check_sequences(task, layout.runner, net, mesh)
    if check is not None:
        # All replicas run the same samples, which are the whole batch of the check.
        with gather_scope(WholeBatch()):
            check.compare(layout.runner)
    loss_recorder.take()  # losses of the checks belong to no step
    enter_training(model)  # whatever modes the checks have left
    sharded_model = layout.runner.sharded_model
    guard = ModelGuard(sharded_model, replaced, holds_whole=sharded_model.is_whole)
    return SessionBase(context, layout, loss_recorder, rank_gather, guard)


def build_rule_parts(session_base: SessionBase, task: Task, state: TrainState) -> RuleParts:
    """Build what depends on the sync rule and the members of the job; collective."""
    context, layout = session_base.context, session_base.layout
    feed = build_feed(context, task, context.device)
    update_step = build_update_step(context, layout, state, feed.num_steps)
    if context.recipe.sparsity.target is not None:
        sharded_model = layout.runner.sharded_model
        install_masks(update_step, context, sharded_model, build_slot_group(context, sharded_model))
    install_guard(update_step, context, layout.runner, session_base.loss_recorder)
    update_step.parts = context.components.update(update_step.parts)
    rule = context.recipe.strategy.sync_spec.load()(context, layout, state)
    return RuleParts(
        strategy=context.recipe.strategy,
        cluster=context.cluster,
        mesh=context.mesh,
        feed=feed,
        update_step=update_step,
        rule=rule,
        close_callbacks=context.close_callbacks,
        loss_tolerant_rules=context.rule_inputs.loss_tolerant_rules,
        comm_checks=context.comm_checks,
        average=build_average(context, layout, state, update_step),
        average_after_rounds=averages_after_rounds(context),
    )


def plateau_of(recipe: Recipe, state: TrainState) -> ReduceOnPlateau | None:
    """Return the part of a state that reduces the rate on a plateau; None if the schedule has none.

    A session that switches its rule or its members builds its update step again, and keeps it.
    """
    if not recipe.schedule.follows_evaluations:
        return None
    if PLATEAU_KEY not in state.stateful_objects:
        state.keep(PLATEAU_KEY, ReduceOnPlateau(recipe.schedule))
    return cast("ReduceOnPlateau", state.stateful_objects[PLATEAU_KEY])


def build_update_step(
    context: SessionContext, layout: ModelLayout, state: TrainState, num_steps: int
) -> UpdateStep:
    """Build the update step over the parameters that this rank updates."""
    recipe, sharded_model = context.recipe, layout.runner.sharded_model
    state.updates_per_step = recipe.strategy.updates_per_step
    num_updates = num_steps * state.updates_per_step
    rates = context.components.schedule(recipe.schedule, num_updates, recipe.batch.size)
    plateau = plateau_of(recipe, state)
    parts = update_parts(
        rates if plateau is None else PlateauRates(rates, plateau),
        reduction=recipe.batch.reduction,
        clip_norm=recipe.optimizer.clip_norm,
        clip_value=recipe.optimizer.clip_value,
        norm=context.components.norm(build_gradient_norm(context, sharded_model)),
        gather=layout.gather,
    )
    return UpdateStep(state, sharded_model.updates, parts)
