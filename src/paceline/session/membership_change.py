"""Change the members of a job while it runs: a session continues with other ranks in the same process.

Model, optimizer, data and the memory of the layout stay where they are; mesh, collectives, reduction,
update step and rule are built again. This works if every replica has the whole state, so that any
remaining rank has all that is needed. Under other strategies the job continues from a snapshot
(`Session.restore_shared`) or a checkpoint.

Invariant: afterwards all members have the same step and the same state, even if some had completed a step
that others had not; new members receive the state from old ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from paceline.comm.group_collectives import all_gather_texts
from paceline.errors import StrategyError
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh
from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.session_context import Components
from paceline.parallel.state_transfer import StateSnapshot, share_snapshot
from paceline.recipe.recipe import Recipe, max_sharers
from paceline.recipe.support import resolve_strategy
from paceline.session.build import build_rule_parts, build_session
from paceline.session.session import Session
from paceline.state.slot import InMemorySource
from paceline.state.train_state import TrainState
from paceline.task import Task


def change_members(session: Session, seconds: float | None = None) -> None:
    """Continue with the remaining members and those that have asked to join; changes the session.

    Every remaining rank calls it, between two rounds or after a communication error inside a round, whose
    incomplete step is dropped. Then `Session.rounds` continues.

    Args:
        seconds: how long to wait for living ranks that do not call; None: `runtime.deadline_seconds`.
    Raises:
        StrategyError: no rank has the whole state, or the strategy does not fit the remaining ranks.
        CommunicationError: the others have continued without this rank, or cannot be reached.
    """
    require_renewable(session)
    session.cluster.abort()  # ends every wait inside a collective of this epoch, also on other ranks
    session.close_rule()
    session.abort()
    limit = session.recipe.runtime.deadline_seconds if seconds is None else seconds
    _rebuild(session, session.cluster.renew(limit))


def prepare_new_member(
    recipe: Recipe, task: Task, device: torch.device, warn: Callable[[str], None]
) -> Session:
    """Build the session of a process that is about to join a job; `join_as_member` makes it a member.

    Args:
        recipe: of the run, as its folder keeps it: with what was chosen on the first machines filled in.
    """
    components = Components(whole=partial(_with_overlap, ReplicatedRunner))
    strategy = recipe.strategy.replace(replicas=1)
    single = recipe.replace(strategy=strategy)
    return build_session(
        single, task, Cluster.single(), device, components=components, warn=warn, fresh=False
    )


def join_as_member(session: Session, cluster: Cluster) -> None:
    """Become a member of a running job at its next change of members; changes a prepared session.

    Args:
        cluster: of this process, with its number in the job as `global_rank`.
    Raises:
        DeadlineError: the members did not accept this process in time.
        StrategyError: as for `change_members`, or this process computes in another precision.
    """
    require_renewable(session)
    limit = session.recipe.runtime.deadline_seconds
    _rebuild(session, cluster.join(session.runner.sharded_model.device.type, limit))


def require_renewable(session: Session) -> None:
    """Raise unless every replica of the session has the whole state.

    Raises:
        StrategyError: the model is partitioned, or replicas differ.
    """
    strategy = session.strategy
    reasons = {
        "a partitioned model": bool(strategy.cuts),
        f"sync={strategy.sync}": strategy.is_set("sync"),
        f"codec={strategy.codec}": strategy.is_coded,
        "batch.sync_batchnorm": session.recipe.batch.sync_batchnorm,
        "paceline.gather": session.session_base.rank_gather.is_open,
    }
    conflicts = [reason for reason, holds in reasons.items() if holds]
    if conflicts:
        raise StrategyError(
            f"members cannot change in a running process with {', '.join(conflicts)}:"
            " no remaining rank has the whole state",
            next_step="resume from a checkpoint, or use replicas with sync=every-step and codec=fp32",
        )


def _with_overlap(
    make: Callable[..., ReplicatedRunner], *args: object, **options: object
) -> ReplicatedRunner:
    """Build a runner that reduces gradients during backward, although the process is still alone."""
    return make(*args, **{**options, "overlap": True})


def _rebuild(session: Session, cluster: Cluster) -> None:
    context = session.session_base.context
    max_shards, limit_key = max_sharers(context.recipe)
    # The number of replicas follows from the members that are there now.
    open_ended = context.recipe.strategy.replace(replicas=None)
    strategy = resolve_strategy(
        open_ended, processes=cluster.world_size, shards=max_shards, limit_key=limit_key
    )
    context = replace(
        context,
        recipe=context.recipe.with_strategy(strategy),
        cluster=cluster,
        mesh=Mesh.build(cluster, strategy.degrees),
        close_callbacks=[],
        rule_inputs=replace(context.rule_inputs, choices=session.rule_switches.choices),
    )
    session.session_base = replace(session.session_base, context=context)
    extra_states = _take_extra_states(session.state)
    session.parts = build_rule_parts(session.session_base, session.task, session.state)
    for install in session.reinstall_hooks:
        install()
    # Averages and the like were built anew with their parts, and get their old values back.
    for name, tensors in extra_states.items():
        keeper, source = session.state.extra_states[name], InMemorySource(tensors)
        keeper.load(source.read(keeper.wanted(source.shapes)))
    _catch_up(session)


def _take_extra_states(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Copy and remove the state of all keepers but model and optimizer, which are about to be built again."""
    copies = {
        name: {piece.slot.name: piece.tensor.clone() for piece in keeper.pieces()}
        for name, keeper in state.extra_states.items()
    }
    state.extra_states.clear()
    return copies


def _catch_up(session: Session) -> None:
    """Give ranks that are behind the state of the first rank that is not; collective."""
    world, net, device = session.mesh.world, session.net, session.runner.sharded_model.device
    local = {"step": session.state.step, "compute": session.recipe.precision.compute}
    members = [json.loads(text) for text in all_gather_texts(json.dumps(local), world, net)]
    formats = [member["compute"] for member in members]
    if len(set(formats)) > 1:
        raise StrategyError(
            f"ranks compute in different number formats: {formats}",
            next_step="start a joining process with the recipe that the run folder keeps",
        )
    steps = [member["step"] for member in members]
    if len(set(steps)) == 1:
        return
    # Some ranks may have completed a step in which others saw the communication fail.
    source = steps.index(max(steps))
    state = session.state
    snapshot = StateSnapshot(state.step, state.tensors(), state.scalars()) if world.rank == source else None
    shared = share_snapshot(snapshot, world, net, device, source)
    if state.step < steps[source]:
        session.restore(*shared)
