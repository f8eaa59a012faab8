"""Change the members of a job while it runs: a session continues with other ranks in the same process.

Where every replica has the whole state, model, optimizer, data and the memory of the layout stay where they
are; mesh, collectives, reduction, update step and rule are built again. Replicas that train alone between
meetings keep the round that they are in, which ends without the lost one. Where ranks hold parts of the
state and keep copies of those of their neighbours (`parallel.buddy_copies`), the task and the session are
built again for the new number of ranks, and the state comes from the copies. Under other strategies the job
continues from a snapshot (`Session.restore_shared`) or a checkpoint.

Invariant: afterwards all members have the same step and the same state, even if some had completed a step
that others had not; new members receive the state from old ones.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group_collectives import all_gather_texts
from paceline.data.work import MicroBatchWork
from paceline.errors import CommunicationError, PacelineError, StrategyError, format_count
from paceline.job.cluster import Cluster
from paceline.job.cpu_count import find_cores
from paceline.job.epochs import waiting_processes
from paceline.job.launcher_reports import has_raised
from paceline.job.mesh import Mesh
from paceline.observe.rank_activity import leave_request
from paceline.observe.step_stats import StepStats
from paceline.parallel.buddy_copies import BuddyCopies, as_held_by_one
from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.session_context import Components
from paceline.parallel.state_transfer import StateSnapshot, gather_whole, share_snapshot
from paceline.recipe.recipe import Recipe, max_sharers
from paceline.recipe.recovery import (
    keeps_copies,
    partial_state_reasons,
    strategy_for_members,
    trains_in_rounds,
)
from paceline.recipe.support import resolve_strategy
from paceline.recipe.tables import ElasticRecipe
from paceline.session.arguments import TaskLike
from paceline.session.build import build_rule_parts, build_session
from paceline.session.callback import Callback
from paceline.session.session import Session
from paceline.session.start_rank import build_task, choose_device
from paceline.state.slot import InMemorySource
from paceline.state.train_state import TrainState
from paceline.sync.diloco import DiLoCo
from paceline.task import Task
from paceline.tuning.hardware_defaults import choose_threads

TaskBuilder = Callable[[], Task]
"""Builds the task again, in the same process."""


def change_members(
    session: Session,
    seconds: float | None = None,
    rebuild_task: TaskBuilder | None = None,
    *,
    admits: bool = True,
) -> None:
    """Continue with the remaining members and those that have asked to join; changes the session.

    Every remaining rank calls it, between two rounds or after a communication error inside a round, whose
    incomplete step is dropped. Then `Session.rounds` continues.

    Args:
        seconds: how long to wait for living ranks that do not call; None: `runtime.deadline_seconds`.
        rebuild_task: needed where ranks hold parts of the state.
        admits: whether processes that wait to join are admitted; equal on all ranks.
    Raises:
        StrategyError: no rank has the whole state, or the strategy does not fit the remaining ranks.
        CommunicationError: the others have continued without this rank, or cannot be reached; or what a lost
            rank held is in no copy.
    """
    if session.copies is None or rebuild_task is None:
        require_renewable(session)
    session.cluster.abort()  # ends every wait inside a collective of this epoch, also on other ranks
    session.close_rule()
    session.abort()
    if session.copies is not None and rebuild_task is not None:
        # Also every wait for a message in the memory of a host: nothing of the layout is used again.
        session.copies.close()
        session.session_base.layout.close()
    limit = session.recipe.runtime.deadline_seconds if seconds is None else seconds
    cluster = session.cluster.renew(limit, admits=admits)
    if session.copies is None or rebuild_task is None:
        _rebuild(session, cluster)
    else:
        _rebuild_from_copies(session, session.copies, cluster, rebuild_task())


class MembersWaitError(CommunicationError):
    """Processes wait to join the job, which ends the present epoch of its members."""


class JoinRequests:
    """The requests of processes that wait to join, as rank 0 sees them.

    Args:
        seconds: interval between two looks into the store of the job.
    """

    def __init__(self, session: Session, seconds: float = 0.2) -> None:
        self._session, self._seconds, self._next_at = session, seconds, 0.0
        self._waiting: list[int] = []

    def check(self) -> None:
        """Raise an error if a process waits, on rank 0 and between two rounds; looks at most once a while.

        Replicas that train alone between meetings all raise it, so that none is in a round.

        Raises:
            MembersWaitError: `continue_after_loss` admits it; the other ranks see their next collective fail.
        """
        session = self._session
        if not session.is_elastic or session.cluster.membership is None:
            return
        if isinstance(session.rule, DiLoCo) and session.cluster.world_size > 1:
            # The number travels with the next meeting, which tells all replicas of the same round.
            session.rule.count_waiting = self._count
            waiting, is_waited_for = self._waiting, session.rule.num_waiting > 0
        else:
            waiting = self._look() if session.is_first else []
            is_waited_for = bool(waiting)
        if is_waited_for:
            names = f"process {', '.join(map(str, waiting))}" if waiting else "a process"
            raise MembersWaitError(f"{names} joins", next_step="nothing: the job continues with it")

    def _count(self) -> int:
        self._waiting = self._look() if self._session.is_first else []
        return len(self._waiting)

    def _look(self) -> list[int]:
        """Return the numbers of the processes that wait, or none if the last look was a moment ago."""
        now = time.monotonic()
        if now < self._next_at:
            return []
        self._next_at = now + self._seconds
        return waiting_processes(self._session.cluster.connected)


class RankLeavesError(PacelineError):
    """This rank was asked to leave the job, which the others continue."""


class LeaveRequest:
    """The request of a user that this rank leaves the job, which is a file of the run folder.

    Args:
        run_dir: None: nobody can ask.
        seconds: interval between two looks.
    """

    def __init__(self, session: Session, run_dir: Path | None, seconds: float = 0.2) -> None:
        self._session, self._seconds, self._next_at = session, seconds, 0.0
        self._path = None if run_dir is None else leave_request(run_dir, socket.gethostname(), os.getpid())

    def check(self) -> None:
        """Raise an error between two rounds if this rank was asked to leave; looks at most once a while.

        Raises:
            RankLeavesError: it was, and the others can continue without it.
        """
        now = time.monotonic()
        if self._path is None or not self._session.is_elastic or now < self._next_at:
            return
        self._next_at = now + self._seconds
        if self._path.exists():
            self._path.unlink(missing_ok=True)
            raise RankLeavesError(f"process {os.getpid()} was asked to leave the job")


def leave_job(session: Session) -> None:
    """Leave the job between two rounds; the other ranks notice it at once and continue.

    Their step that has begun is repeated, with the samples of this rank divided among them.
    """
    membership = session.cluster.connected
    session.close_rule()
    # The others wait in collectives for this rank: they fail now, and then nobody waits for its vote.
    membership.store.set(f"{membership.continuation_key}/{membership.number}", "")
    membership.abort()
    membership.store.close()


def end_waits_for_lost(session: Session) -> None:
    """End the collectives of this epoch if the store counts a member as lost; any thread can call it."""
    membership = session.cluster.membership
    if membership is not None and not membership.store.lost().isdisjoint(membership.members):
        membership.abort()


@dataclass(frozen=True)
class MemberChange:
    """A change of the members of a job that has happened; equal on all of them.

    Args:
        lost, joined: numbers of the processes that left and joined; a process keeps its number.
        has_new_first: rank 0, which writes the files, is another process now.
    """

    lost: tuple[int, ...]
    joined: tuple[int, ...]
    has_new_first: bool


def continue_after_loss(
    session: Session, error: CommunicationError, rebuild_task: TaskBuilder | None = None
) -> MemberChange:
    """Continue with the remaining members after an error inside a round or between two; collective.

    Args:
        error: raised again if it is not the consequence of a lost member.
        rebuild_task: see `change_members`.
    Raises:
        CommunicationError: all members are still there, or a lost one had raised an error of its own, which
            another process would raise again.
        StrategyError: fewer than `elastic.min_processes` are left.
    """
    membership = session.cluster.membership
    if not session.is_elastic or membership is None:
        raise error
    before, store = membership.members, membership.store
    # A process that joins gets no share of a round that has begun: it waits for the next one.
    admits = isinstance(error, MembersWaitError) or not trains_in_rounds(session.recipe)
    change_members(session, rebuild_task=rebuild_task, admits=admits)
    after = session.cluster.connected.members
    lost = tuple(number for number in before if number not in after)
    joined = tuple(number for number in after if number not in before)
    # Nobody is lost if the launcher of another node has ended after its ranks, and with it the store.
    if not lost and not joined and session.cluster.connected.store is store:
        raise error
    if any(has_raised(session.cluster.error_dir, number) for number in lost):
        raise error
    least = session.recipe.elastic.min_processes
    if len(after) < least:
        # No error of communication: the launcher would continue without this rank as well.
        raise StrategyError(
            f"{format_count(len(after), 'process')} of {len(before)} are left, fewer than {least}",
            where="elastic.min_processes",
            next_step="--resume RUN continues from the newest checkpoint with more of them",
        ) from error
    return MemberChange(lost, joined, has_new_first=before[0] != after[0])


def prepare_new_member(
    recipe: Recipe,
    task: Task,
    device: torch.device,
    warn: Callable[[str], None],
    stop_requested: Callable[[], bool] = lambda: False,
) -> Session:
    """Build the session of a process that is about to join a job; `join_as_member` makes it a member.

    Args:
        recipe: of the run, as its folder keeps it: with what was chosen on the first machines filled in.
        stop_requested: returns whether this process was asked to stop.
    """
    components = Components(whole=partial(_with_overlap, ReplicatedRunner))
    strategy = recipe.strategy.replace(replicas=1)
    single = recipe.replace(strategy=strategy)
    return build_session(
        single,
        task,
        Cluster.single(),
        device,
        components=components,
        warn=warn,
        fresh=False,
        stop_requested=stop_requested,
    )


@contextmanager
def joining(
    recipe: Recipe,
    cluster: Cluster,
    task: TaskLike | None,
    base_dir: Path | None,
    *,
    stop_requested: Callable[[], bool],
    callbacks: Sequence[Callback],
) -> Iterator[Session]:
    """Return a context manager around the session of this process, which joins a running job.

    Args:
        recipe: as the run folder keeps it.
        cluster: of this process, with its number in the job as `global_rank`.
        task, base_dir, stop_requested, callbacks: as in `paceline.session.start_rank.join`.
    """
    device = choose_device(recipe.runtime.device, cluster.local_rank, cluster.local_world_size)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(choose_threads(recipe, cluster.local_world_size, find_cores()).number)
    try:
        cluster.enter_phase("building the task to join", recipe.runtime.setup_deadline_seconds)
        built = build_task(recipe, task, base_dir)
        waits = "waiting to join the others"
        if keeps_copies(recipe):
            cluster.enter_phase(waits, recipe.runtime.deadline_seconds)
            session = join_with_copies(recipe, built, cluster, device, stop_requested, callbacks)
        else:
            session = prepare_new_member(recipe, built, device, lambda text: None, stop_requested)
            session.add_callbacks(callbacks)
            cluster.enter_phase(waits, recipe.runtime.deadline_seconds)
            join_as_member(session, cluster)
        try:
            yield session
        finally:
            session.close()
    finally:
        torch.set_num_threads(num_threads)
    session.cluster.disconnect()


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
    _rebuild(session, cluster.join(session.runner.sharded_model.device.type, limit), is_new=True)


def join_with_copies(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    stop_requested: Callable[[], bool] = lambda: False,
    callbacks: Sequence[Callback] = (),
) -> Session:
    """Become a member of a running job whose ranks hold parts of the state; returns the session.

    Args:
        recipe: of the run.
        task: built anew in this process.
        cluster: of this process, with its number in the job as `global_rank`.
    Raises:
        DeadlineError: the members did not accept this process in time.
    """
    joined = cluster.join(device.type, recipe.runtime.deadline_seconds)
    session = _build_for_members(recipe, task, joined, device, stop_requested)
    session.add_callbacks(callbacks)
    _take_from_copies(session, None, joined.connected.members)
    return session


def _build_for_members(
    recipe: Recipe,
    task: Task,
    cluster: Cluster,
    device: torch.device,
    stop_requested: Callable[[], bool],
    into: Session | None = None,
) -> Session:
    """Build the session of this rank for the present members; collective."""
    of_members = recipe.with_strategy(strategy_for_members(recipe.strategy, cluster.world_size))
    if not keeps_copies(of_members):  # a rank that is alone holds all of the state
        of_members = of_members.model_copy(update={"elastic": ElasticRecipe()})
    session = build_session(
        of_members,
        task,
        cluster,
        device,
        stop_requested=stop_requested,
        fresh=False,
        into=into,
    )
    # Later members follow from the strategy of the run, and not from that of the present ones.
    session.recipe = session.recipe.model_copy(
        update={"strategy": recipe.strategy, "elastic": recipe.elastic}
    )
    if session.copies is None:
        session.copies = BuddyCopies(session.mesh.world, cluster.connected.members, session.net)
    return session


def _rebuild_from_copies(session: Session, copies: BuddyCopies, cluster: Cluster, task: Task) -> None:
    """Build a session for the present members in place of one whose ranks hold parts; collective."""
    context, recipe = session.session_base.context, session.recipe
    reported, recorded_step = session.reported, session.recorded_step
    stop_requested = context.rule_inputs.stop_requested
    _build_for_members(recipe, task, cluster, context.device, stop_requested, into=session)
    session.is_elastic, session.reported, session.recorded_step = True, reported, recorded_step
    _take_from_copies(session, copies, cluster.connected.members)


def _take_from_copies(session: Session, copies: BuddyCopies | None, members: Sequence[int]) -> None:
    """Load the state of the newest step of which all members have copies; collective.

    Args:
        copies: of this rank; None: it is new.
        members: numbers of the processes that continue.
    Raises:
        CommunicationError: some part of the state is in no copy.
    """
    world, net, last = session.mesh.world, session.net, session.reported[1]
    local = {
        "steps": None if copies is None else copies.steps,
        "last": None if last is None else vars(last),
    }
    found = [json.loads(text) for text in all_gather_texts(json.dumps(local), world, net)]
    copied = [set(one["steps"]) for one in found if one["steps"] is not None]
    steps = set.intersection(*copied)
    if not steps:
        raise CommunicationError(
            "a rank was lost before its neighbour had a copy of its part of the state",
            next_step="resume from the newest checkpoint",
        )
    step, source = max(steps), next(i for i, one in enumerate(found) if one["steps"] is not None)
    parts, common = ([], []) if copies is None else copies.contribution(step, members)
    pieces = [piece for part in parts for piece in part.pieces]
    pieces += as_held_by_one(common) if world.rank == source else []
    whole = gather_whole(pieces, world, net)
    values = [part.scalars for part in parts]
    scalars: dict[str, Any] = {}
    for text in all_gather_texts(json.dumps(values), world, net):
        for value in json.loads(text):
            # Each rank has the step counts of the parameters that it updates.
            scalars = scalars or value
            scalars["optimizer"].update(value["optimizer"])
    session.restore(whole, scalars)
    session.reported, session.interrupted_at = (step, None), None
    _share_last_round(session, [one["last"] for one in found], step)


def require_renewable(session: Session) -> None:
    """Raise unless every replica of the session has the whole state.

    Raises:
        StrategyError: the model is partitioned, or replicas differ.
    """
    conflicts = partial_state_reasons(session.recipe.with_strategy(session.strategy))
    if session.session_base.rank_gather.is_open:
        conflicts.append("paceline.gather")
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


def _rebuild(session: Session, cluster: Cluster, *, is_new: bool = False) -> None:
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
    old_rule, old_work = session.rule, session.work
    session.skip_buffer_warning()
    extra_states = _take_extra_states(session.state)
    session.parts = build_rule_parts(session.session_base, session.task, session.state)
    for install in session.reinstall_hooks:
        install()
    # Averages and the like were built anew with their parts, and get their old values back.
    for name, tensors in extra_states.items():
        keeper, source = session.state.extra_states[name], InMemorySource(tensors)
        keeper.load(source.read(keeper.wanted(source.shapes)))
    interrupted = old_rule.interrupted_round if isinstance(old_rule, DiLoCo) else None
    if interrupted is not None and isinstance(session.rule, DiLoCo):
        session.rule.continue_round(interrupted)
        # The step that all have agreed on; the loop of the rule sets it again.
        session.state.step = interrupted.local_round.first
    _catch_up(session, old_work, is_new=is_new)


def _take_extra_states(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Copy and remove the state of all keepers but model and optimizer, which are about to be built again."""
    copies = {
        name: {piece.slot.name: piece.tensor.clone() for piece in keeper.pieces()}
        for name, keeper in state.extra_states.items()
    }
    state.extra_states.clear()
    return copies


def _share_last_round(session: Session, records: Sequence[dict[str, Any] | None], step: int) -> None:
    """Take over the record of the last round from a rank that has one, for the files of the run."""
    found = [record for record in records if record is not None and record["step"] == step - 1]
    if found:
        session.reported = session.reported[0], StepStats(**found[0])


def _catch_up(session: Session, old_work: MicroBatchWork, *, is_new: bool) -> None:
    """Give ranks that are behind the state of the first rank that is not; collective.

    Args:
        old_work: the share of this rank before the change, in which a round ends that others have begun.
    """
    world, net, device = session.mesh.world, session.net, session.runner.sharded_model.device
    done, last = session.reported
    local = {
        "step": session.state.step,
        "compute": session.recipe.precision.compute,
        # A process that joins has nothing to repeat.
        "done": None if is_new else done,
        "last": None if last is None else vars(last),
        "in round": isinstance(session.rule, DiLoCo) and session.rule.interrupted_round is not None,
    }
    members = [json.loads(text) for text in all_gather_texts(json.dumps(local), world, net)]
    formats = [member["compute"] for member in members]
    if len(set(formats)) > 1:
        raise StrategyError(
            f"ranks compute in different number formats: {formats}",
            next_step="start a joining process with the recipe that the run folder keeps",
        )
    steps = [member["step"] for member in members]
    # Where some ranks have not done what is due after a step, all of them do it again.
    done = min((member["done"] for member in members if member["done"] is not None), default=max(steps))
    session.interrupted_at = done if done < max(steps) else None
    _share_last_round(session, [member["last"] for member in members], max(steps))
    if isinstance(session.rule, DiLoCo) and not local["in round"] and any(m["in round"] for m in members):
        session.rule.keep_share(old_work)
    if len(set(steps)) == 1:
        return
    # Some ranks may have completed a step in which others saw the communication fail.
    able = [rank for rank, m in enumerate(members) if m["step"] == max(steps) and not m["in round"]]
    if not able:
        raise CommunicationError(
            "no rank has the state with which its round began",
            next_step="resume from the newest checkpoint",
        )
    source, state = able[0], session.state
    snapshot = StateSnapshot(state.step, state.tensors(), state.scalars()) if world.rank == source else None
    shared = share_snapshot(snapshot, world, net, device, source)
    if state.step < steps[source]:
        session.restore(*shared)
