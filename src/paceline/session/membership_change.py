"""A session goes on with other members, in the same process: what hangs on the membership is made again.

Model, optimizer, data and the memory of the layout stay where they are; mesh, collectives, reduction, update
step and rule are new. It holds for strategies in which every replica has the whole state: all the ranks that
are left have what is needed. Others go on from a snapshot (`Session.take_over`).

Invariant: afterwards all members have the same step and the same state, also where some had made a step that
others had not, and members that are new have it from those that were there.
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
from paceline.parallel.model_layout import SessionBase
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
    """Go on with the members that are left, and those that have asked to join; changes the session.

    Every rank that goes on calls it: between two rounds, or after an error of communication in one, whose
    half step is dropped. Then `Session.rounds` goes on.

    Args:
        seconds: how long to wait for ranks that are alive and do not call; None: `runtime.deadline_seconds`.
    Raises:
        StrategyError: no rank has the whole state, or the strategy does not fit the ranks that are left.
        CommunicationError: the others have gone on without this rank, or cannot be reached.
    """
    session_base = require_renewable(session)
    session.cluster.abort()  # who still waits in this epoch waits no more, also on other ranks
    session.release()
    session.abort()
    limit = session.recipe.runtime.deadline_seconds if seconds is None else seconds
    _rebuild(session, session_base, session.cluster.renew(limit))


def prepare_new_member(
    recipe: Recipe, task: Task, device: torch.device, warn: Callable[[str], None]
) -> Session:
    """A session of a process that is about to join a job; `join_as_member` makes it a member.

    Args:
        recipe: of the run, with what it has left to the machine filled in, as its folder keeps it.
    """
    pieces = Components(whole=partial(_with_overlap, ReplicatedRunner))
    strategy = recipe.strategy.replace(replicas=1)
    alone = recipe.replace(strategy=strategy)
    return build_session(alone, task, Cluster.single(), device, pieces=pieces, warn=warn, fresh=False)


def join_as_member(session: Session, cluster: Cluster) -> None:
    """Become a member of a job that runs, at its next change; changes a session that was prepared.

    Args:
        cluster: this process's place: its number in the job as `global_rank`.
    Raises:
        DeadlineError: the members did not take this process in.
        StrategyError: as for `change_members`, or this process computes in another precision.
    """
    session_base = require_renewable(session)
    limit = session.recipe.runtime.deadline_seconds
    _rebuild(session, session_base, cluster.join(session.runner.sharded_model.device.type, limit))


def require_renewable(session: Session) -> SessionBase:
    """What the session is made from.

    Raises:
        StrategyError: its replicas do not each have the whole state.
    """
    strategy = session.strategy
    unfit = {
        "a model that is cut": bool(strategy.cuts),
        f"sync={strategy.sync}": strategy.sync != "every-step",
        f"codec={strategy.codec}": strategy.codec != "fp32",
        "batch.sync_batchnorm": session.recipe.batch.sync_batchnorm,
    }
    reasons = [what for what, holds in unfit.items() if holds]
    if reasons or session.session_base is None:
        raise StrategyError(
            f"members cannot change in process under {', '.join(reasons)}:"
            " no rank that is left has all of the state",
            next_step="go on from a checkpoint, or choose replicas with sync=every-step and codec=fp32",
        )
    return session.session_base


def _with_overlap(
    make: Callable[..., ReplicatedRunner], *args: object, **options: object
) -> ReplicatedRunner:
    """One that hands gradients on during backward: the process is alone now, and will not be."""
    return make(*args, **{**options, "overlap": True})


def _rebuild(session: Session, session_base: SessionBase, cluster: Cluster) -> None:
    recipe = session_base.setting.recipe
    most, called = max_sharers(recipe)
    open_ended = recipe.strategy.replace(replicas=None)
    strategy = resolve_strategy(open_ended, processes=cluster.world_size, shards=most, called=called)
    setting = replace(
        session_base.setting,
        recipe=recipe.under(strategy),
        cluster=cluster,
        mesh=Mesh.build(cluster, strategy.degrees),
        closers=[],
        choices=session.turns.choices,
    )
    session.session_base = replace(session_base, setting=setting)
    kept = _take_kept_tensors(session.state)
    for name, value in build_rule_parts(session.session_base, session.task, session.state).items():
        setattr(session, name, value)
    for put in session.reinstall_hooks:
        put()
    for word, tensors in kept.items():
        keeper, source = session.state.extra_states[word], InMemorySource(tensors)
        keeper.load(source.read(keeper.wanted(source.shapes)))
    _catch_up(session)


def _take_kept_tensors(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """What others than model and optimizer keep, by word and name; they are made again."""
    kept = {
        word: {piece.slot.name: piece.tensor.clone() for piece in keeper.pieces()}
        for word, keeper in state.extra_states.items()
    }
    state.extra_states.clear()
    return kept


def _catch_up(session: Session) -> None:
    """Ranks that are behind take over the state of the first that is not; collective."""
    world, net, device = session.mesh.world, session.net, session.runner.sharded_model.device
    mine = {"step": session.state.step, "compute": session.recipe.precision.compute}
    found = [json.loads(text) for text in all_gather_texts(json.dumps(mine), world, net)]
    if len({one["compute"] for one in found}) > 1:
        raise StrategyError(
            f"ranks compute in different formats: {[one['compute'] for one in found]}",
            next_step="let a process that joins have the recipe that the run folder keeps",
        )
    steps = [one["step"] for one in found]
    if len({*steps}) == 1:
        return
    source = steps.index(max(steps))
    state = session.state
    snapshot = StateSnapshot(state.step, state.tensors(), state.scalars()) if world.rank == source else None
    shared = share_snapshot(snapshot, world, net, device, source)
    if state.step < steps[source]:
        session.restore(*shared)
