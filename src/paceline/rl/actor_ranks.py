"""Actors that are ranks of their own: rank 0 learns, and the others play its tickets (`sync=actors`).

A ticket is one iteration of one group, with the number of the policy that plays it. The learner sends each
actor a policy once, and hands a ticket to whichever actor is idle; an actor keeps the environments of the
groups that it has played. A group moves to another actor, which replays its open episodes, if its actor is
lost, or if that is expected to be faster than to wait for it. A round is the steps up to the next one at
which all ranks need the state; at its end the actors receive the weights.

Invariant: the rows of a ticket are those of (policy, open episodes, iteration), so they do not depend on
which actor has it; no ticket is handed out whose policy would be older than `rl.age` when its rows are used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.comm.channel.channel_builders import connect_first_ranks
from paceline.comm.channel.message_channel import ChannelMessage, MessageChannel
from paceline.data.task_data import build_order
from paceline.data.work import MicroBatchWork, TrainingFeed
from paceline.errors import CommunicationError, DeadlineError, DivergenceError, TaskError
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_layout import ModelLayout
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.rl.actors import OpenGroup
from paceline.rl.group_rollout import GroupColumns, read_groups
from paceline.rl.policy_versions import PolicyVersion
from paceline.session.session import Session
from paceline.state.train_state import TrainState
from paceline.sync.every_step import build_every_step_rule
from paceline.sync.server.parameter_server import WorkerTable
from paceline.sync.server.parameter_transfer import (
    load_buffers,
    load_server_values,
    own_values,
    server_values,
)
from paceline.sync.server.server_policies import WorkTicket
from paceline.sync.sync_rule import SyncRule, internal_rule_error
from paceline.sync.update import UpdateStep
from paceline.task import Task

if TYPE_CHECKING:
    from paceline.rl.rollouts import OpenEpisodes, Rollouts

LEARNER_RANK = 0


def build_actors_rule(context: SessionContext, layout: ModelLayout, state: TrainState) -> SyncRule:
    """Build the rule of this rank: rank 0 takes the steps of one process, and the others play."""
    world = context.mesh.world
    channel = connect_first_ranks(context, 1)
    context.close_callbacks.append(channel.close)
    rule: ActorsRule
    if world.rank == LEARNER_RANK:
        alone = replace(context, mesh=context.mesh.surviving_mesh((LEARNER_RANK,)))
        actor_table = ActorTable(channel, world.ranks[1:], context)
        rule = LearnerRule(build_every_step_rule(alone, layout, state), actor_table, context)
    else:
        rule = ActorRule(channel, context)
    context.rule_inputs.loss_tolerant_rules.append(rule)
    return rule


def build_learner_work(context: SessionContext, task: Task) -> MicroBatchWork:
    """Build the micro-batches of the learner, which are all of them; actors run none."""
    recipe = context.recipe
    return context.components.work(build_order(recipe, task), context.shards, recipe.seed, 0, 1)


class ActorsRule:
    """The base of the rules of learner and actors.

    Attributes:
        learns: this is the learner.
        left: the ranks that were not lost at the end of the last round; empty before the first.
    """

    learns: bool
    left: tuple[int, ...] = ()

    def attach(self, rollouts: Rollouts, around: Callable[[SyncRule], SyncRule]) -> None:
        """Let the rule make rows, or play, with the environments of a task."""
        raise NotImplementedError

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """Train, or play, to the end of the run; see `SyncRule.rounds`."""
        raise NotImplementedError

    def abort(self) -> None:
        """Drop what an error has interrupted."""


# ------------------------------------------------------------------ the learner


class ActorTable:
    """The actors as the learner sees them: which are left, idle, or at work, and messages with them.

    Args:
        channel: to all actors.
        ranks: of the actors.
        context: of this rank.
    """

    def __init__(self, channel: MessageChannel, ranks: Sequence[int], context: SessionContext) -> None:
        self._channel, self._context = channel, context
        self._deadline = context.net.deadline_seconds
        self.workers = WorkerTable(ranks)
        self.workers.begin(time.monotonic())
        self._next_heartbeat = -math.inf
        self.forget: Callable[[int], None] = lambda rank: None  # what else is known of a lost actor

    def send(
        self,
        rank: int,
        kind: str,
        fields: Mapping[str, Any],
        tensors: Sequence[Tensor] = (),
        *,
        lasts: bool = False,
    ) -> None:
        """Send an actor a message in the background. `lasts`: its tensors do not change until it was sent."""
        try:
            message = ChannelMessage(kind, fields, tensors, is_immutable=lasts)
            self._channel.send(rank, message, self._deadline)
        except CommunicationError as error:
            self._lose(rank, error.what)

    def receive(self, seconds: float) -> ChannelMessage | None:
        """Return the next message of an actor; None: there is none in time, or an actor was lost instead.

        Raises:
            CommunicationError: no actor is left.
        """
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._deadline / 2
            for rank in self.workers.left:
                self.send(rank, "wait", {})
        self.workers.require(1)
        due = self.workers.deadlines(self._channel.last_activity, self._deadline)
        try:
            waits = seconds, self._next_heartbeat - now, *(expires - now for expires in due.values())
            return self._channel.receive(max(0.0, min(waits)))
        except CommunicationError as error:
            if error.peer is not None:
                self._lose(error.peer, error.what)
            elif not isinstance(error, DeadlineError):
                raise
            for rank, expires in due.items():
                if expires <= time.monotonic() and rank in self.workers.left:
                    self._lose(rank, f"rank {rank} has sent nothing for {self._deadline:g} s")
            return None

    def flush(self) -> None:
        """Wait until all actors have received everything, so that a collective can follow."""
        is_flushed = False
        while not is_flushed:
            try:
                is_flushed = self._channel.flush(self._deadline / 2)
            except CommunicationError as error:
                if error.peer is None:
                    raise
                self._lose(error.peer, error.what)

    def _lose(self, rank: int, why: str) -> None:
        """Continue without an actor; its groups are played by others."""
        if rank not in self.workers.left:
            return
        self.workers.mark_lost(rank, why)
        self._channel.drop(rank)
        self.forget(rank)
        record = {"rank": rank, "reason": why, "workers_left": len(self.workers.left)}
        self._context.note("lost", {"step": self._context.net.step, **record})


class RemoteActors:
    """The actors of a run in which rank 0 learns; see `Actors`.

    Args:
        rollouts: of the learner.
        actor_table: the other ranks.
    """

    def __init__(self, rollouts: Rollouts, actor_table: ActorTable, open_episodes: OpenEpisodes) -> None:
        self._rollouts, self._table = rollouts, actor_table
        self._table.forget = self._forget
        self._ahead = open_episodes  # as after the rows that have arrived, which may be later ones
        self._next: list[int] = []  # by group: the iteration that is played next
        self._results: dict[tuple[int, int], GroupColumns] = {}
        self._holder: dict[int, int] = {}  # by group: the actor whose environments stand where it goes on
        self._playing: dict[int, int] = {}  # by group: the actor that has its ticket
        self._sent: dict[int, set[int]] = {}  # by actor: policies that it has
        self._seconds: dict[int, float] = {}  # by actor: of its last ticket
        self._begun: set[int] = set()  # groups whose environments do not stand at their first reset
        self._session: Session | None = None
        self._limit = -1

    def collect(
        self, session: Session, iteration: int, present: PolicyVersion
    ) -> tuple[list[GroupColumns], dict[str, float]]:
        """Hand out tickets, and wait for the rows of an iteration; see `Actors.collect`.

        Raises:
            TaskError: an environment raised, hung, or returned a value that is not finite.
            DivergenceError: an actor has played with other weights than the learner has sent.
            CommunicationError: no actor is left.
        Wire: for each actor the weights once an iteration; for each group its rows.
        """
        began, settings, self._session = time.perf_counter(), self._rollouts.settings, session
        self._prepare(session, iteration)
        self._limit = min(present.iteration + settings.age, settings.num_iterations - 1)
        self._hand_out()
        wanted = [(iteration, group) for group in range(settings.shards)]
        while not all(place in self._results for place in wanted):
            self.pump(math.inf)
        groups = [self._results.pop(place) for place in wanted]
        arrived = time.perf_counter()
        groups = self._rollouts.under_learner(groups, iteration, session)
        return groups, {
            "policy and environments": arrived - began,
            "exchange": time.perf_counter() - arrived,
        }

    def pump(self, seconds: float = 0.0) -> None:
        """Receive what has arrived, after waiting for the first message, and hand out tickets."""
        while (message := self._table.receive(seconds)) is not None:
            seconds = 0.0
            self._receive(message)
        self._hand_out()

    def close(self) -> None:
        """Do nothing: the environments are those of the actors."""

    def _prepare(self, session: Session, iteration: int) -> None:
        """Begin with the open episodes of the state, before the first iteration and after a resume."""
        rollouts, episodes = self._rollouts, self._rollouts.episodes
        if episodes.repeats < 0:
            rollouts.note_repeats(rollouts.repeats_episodes() if rollouts.settings.check else "", session)
        if self._next and not episodes.is_restored:
            return
        self._ahead.copy_from(episodes)
        self._next = [iteration] * rollouts.settings.shards
        self._results.clear()
        self._holder.clear()
        episodes.is_restored = False

    def _receive(self, message: ChannelMessage) -> None:
        rank, fields = message.sender, message.fields
        answered = self._table.workers.record_answer(rank)
        if message.kind == "fault":
            raise TaskError(fields["what"], where=fields["where"], next_step=fields["next_step"])
        if answered is None:  # the actor is ready for its first ticket
            return
        ticket, _ = answered
        self._playing.pop(ticket.part)
        version = self._rollouts.versions.of(ticket.step)
        if fields["sha"] != version.sha.hex():
            raise DivergenceError(
                f"rank {rank} has played iteration {ticket.step} with other weights than rank 0 has sent",
                next_step="resume from the last checkpoint; look for what changes weights on that rank",
            )
        (data,) = message.tensors
        (columns,) = read_groups(bytearray(data.numpy().data), self._rollouts.player.empty_columns())
        self._results[ticket.step, ticket.part] = columns
        self._ahead.follow_group(ticket.part, columns)
        self._holder[ticket.part], self._next[ticket.part] = rank, ticket.step + 1
        self._seconds[rank] = fields["seconds"]
        self._begun.add(ticket.part)
        if fields["renewed"] and self._session is not None:
            self._rollouts.warn_of_new_episodes(self._session)

    def _hand_out(self) -> None:
        for rank in self._table.workers.idle:
            group = self._choose(rank)
            if group is not None:
                self._send_ticket(rank, group)

    def _choose(self, rank: int) -> int | None:
        """Return the group that an idle actor plays next: its own, one without an actor, or a slow one's."""
        free = [
            group
            for group, iteration in enumerate(self._next)
            if group not in self._playing and iteration <= self._limit
        ]
        free.sort(key=lambda group: (self._next[group], group))
        for holder in (rank, None):
            for group in free:
                if self._holder.get(group) == holder:
                    return group
        return next((group for group in free if self._is_faster(rank, group, free)), None)

    def _is_faster(self, rank: int, group: int, free: Sequence[int]) -> bool:
        """Return whether an idle actor is expected to play a group of another one before that one would."""
        holder, settings = self._holder[group], self._rollouts.settings
        if rank not in self._seconds or holder not in self._seconds:
            return False
        replayed = sum(map(len, self._open_group(group).actions)) / (settings.group_size * settings.steps)
        waiting = sum(self._holder.get(other) == holder for other in free) + (
            holder in self._playing.values()
        )
        return self._seconds[rank] * (1 + replayed) < self._seconds[holder] * waiting

    def _open_group(self, group: int) -> OpenGroup:
        opened = self._ahead.open_group(group, self._rollouts.settings.group_size)
        return opened._replace(is_restored=opened.is_restored or group in self._begun)

    def _send_ticket(self, rank: int, group: int) -> None:
        """Send an actor a ticket, after the policy if it has it not, and the open episodes if they move."""
        iteration, table = self._next[group], self._table
        version = self._rollouts.versions.of(iteration)
        if not iteration - self._rollouts.settings.age <= version.iteration <= iteration:
            raise internal_rule_error(f"iteration {iteration} has a policy of iteration {version.iteration}")
        if version.iteration not in self._sent.setdefault(rank, set()):
            self._sent[rank].add(version.iteration)
            self._send_policy(rank, version)
        fields: dict[str, Any] = {"iteration": iteration, "group": group, "policy": version.iteration}
        tensors: list[Tensor] = []
        if self._holder.get(group) != rank:
            opened = self._open_group(group)
            taken = [action for actions in opened.actions for action in actions]
            fields |= {
                "episodes": opened.episodes,
                "lengths": [len(actions) for actions in opened.actions],
                "repeats": opened.repeats,
                "is_restored": opened.is_restored,
            }
            tensors = [torch.from_numpy(np.array(x)) for x in (taken, opened.observation)]
        table.workers.assign_ticket(rank, WorkTicket(iteration, group), version.updates, time.monotonic())
        self._playing[group] = rank
        table.send(rank, "ticket", fields, tensors)

    def _send_policy(self, rank: int, version: PolicyVersion) -> None:
        weights = version.model.state_dict()
        moments = {piece.slot.name: piece.tensor for piece in version.normalizers.pieces()}
        fields = {
            "number": version.iteration,
            "oldest": version.iteration - self._rollouts.settings.age,
            "updates": version.updates,
            "weights": [*weights],
            "normalizers": [*moments],
        }
        # With an age of 0 they are those of the learner, which changes them.
        lasts = self._rollouts.settings.age > 0
        self._table.send(rank, "policy", fields, [*weights.values(), *moments.values()], lasts=lasts)

    def _forget(self, rank: int) -> None:
        """Forget what a lost actor has; others replay the open episodes of its groups."""
        self._playing = {group: other for group, other in self._playing.items() if other != rank}
        self._holder = {group: other for group, other in self._holder.items() if other != rank}
        self._seconds.pop(rank, None)
        self._sent.pop(rank, None)


class LearnerRule(ActorsRule):
    """The rule of rank 0: it takes the steps of one process on the rows of the actors.

    Args:
        inner: takes the steps.
        actor_table: the other ranks.
        context: of this rank.
    """

    learns = True

    def __init__(self, inner: SyncRule, actor_table: ActorTable, context: SessionContext) -> None:
        self.inner, self._table, self._context = inner, actor_table, context
        self._pump: Callable[[], None] = lambda: None

    def attach(self, rollouts: Rollouts, around: Callable[[SyncRule], SyncRule]) -> None:
        actors = RemoteActors(rollouts, self._table, rollouts.new_episodes())
        rollouts.actors, self._pump = actors, actors.pump
        self.inner = around(self.inner)

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        state = update_step.state
        inner = cast("Generator[StepStats, None, None]", self.inner.rounds(feed, runner, update_step))
        with closing(inner):
            while state.step < feed.num_steps:
                pause, steps = feed.next_pause(state.step), list[StepStats]()
                while state.step < pause and not (steps and steps[-1].stops):
                    self._pump()
                    steps.append(next(inner))
                stats = _joined(steps)
                self._end_round(stats, runner, state)
                yield stats

    def abort(self) -> None:
        self.inner.abort()

    def _end_round(self, stats: StepStats, runner: ModelRunner, state: TrainState) -> None:
        """Send all actors the weights and the record, and wait until they have them."""
        self.left = (LEARNER_RANK, *self._table.workers.left)
        fields = {
            "stats": asdict(stats),
            "step": state.step,
            "version": state.num_updates,
            "scale": asdict(state.scale),
            "left": self.left,
        }
        tensors = [*runner.buffers.values(), *own_values(runner.sharded_model).values()]
        for rank in self._table.workers.left:
            self._table.send(rank, "round", fields, tensors)
        self._table.flush()


def _joined(steps: Sequence[StepStats]) -> StepStats:
    """Return the record of a round: that of its last step, with sums and means over all of them."""
    last, items = steps[-1], sum(step.num_items for step in steps) or 1.0

    def mean(values: Sequence[float]) -> float:
        return sum(v * step.num_items for v, step in zip(values, steps, strict=True)) / items

    return replace(
        last,
        loss=mean([step.loss for step in steps]),
        metrics={name: mean([step.metrics[name] for step in steps]) for name in last.metrics},
        num_samples=sum(step.num_samples for step in steps),
        num_items=sum(step.num_items for step in steps),
        seconds=sum(step.seconds for step in steps),
        phases={name: sum(step.phases[name] for step in steps) for name in last.phases},
    )


# ------------------------------------------------------------------ the actors


class ActorRule(ActorsRule):
    """The rule of an actor: it plays what its tickets say.

    Args:
        channel: to the learner.
        context: of this rank.
    """

    learns = False

    def __init__(self, channel: MessageChannel, context: SessionContext) -> None:
        self._channel, self._context = channel, context
        self._rollouts: Rollouts | None = None
        self._policies: dict[int, PolicyVersion] = {}

    def attach(self, rollouts: Rollouts, around: Callable[[SyncRule], SyncRule]) -> None:
        self._rollouts = rollouts

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        state, phases = update_step.state, self._context.phases
        # The learner owns the optimizer. A loaded copy would get old here, and ranks would seem to differ.
        state.optimizer.state.clear()
        self._send("ready", {})
        while state.step < feed.num_steps:
            phases.take()
            while (message := self._receive()).kind != "round":
                if message.kind == "policy":
                    self._read_policy(message, runner.sharded_model.device)
                elif message.kind == "ticket":
                    phases.begin("forward")
                    self._play(message, runner.sharded_model.device)
            yield self._adopt(message, runner, state)

    def _receive(self) -> ChannelMessage:
        self._context.phases.begin("communication")
        return self._channel.receive(self._context.net.deadline_seconds)

    def _send(self, kind: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        message = ChannelMessage(kind, fields, tensors, is_immutable=True)
        self._channel.send(LEARNER_RANK, message, self._context.net.deadline_seconds)

    @property
    def _environments(self) -> Rollouts:
        if self._rollouts is None:
            raise TaskError(
                "sync=actors needs a task with environments",
                where="strategy.sync",
                next_step='set task = "rl", or build the task with paceline.rl.Task',
            )
        return self._rollouts

    def _read_policy(self, message: ChannelMessage, device: torch.device) -> None:
        """Keep a policy, and drop those that no ticket will name."""
        fields, tensors = message.fields, message.tensors
        count = len(fields["weights"])
        version = self._environments.versions.read(
            fields["number"],
            fields["updates"],
            dict(zip(fields["weights"], tensors[:count], strict=True)),
            dict(zip(fields["normalizers"], tensors[count:], strict=True)),
        )
        version.model.to(device)
        kept = {number: old for number, old in self._policies.items() if number >= fields["oldest"]}
        self._policies = kept | {version.iteration: version}

    def _play(self, message: ChannelMessage, device: torch.device) -> None:
        """Play a ticket, and send its rows, or the error of an environment."""
        fields, rollouts, began = message.fields, self._environments, time.perf_counter()
        player, version = rollouts.player, self._policies[fields["policy"]]
        renewed = 0
        try:
            with player.timer.watching():
                if message.tensors:
                    renewed = player.open(fields["group"], _read_open_group(message))
                columns = player.play(fields["group"], fields["iteration"], version, device)
        except TaskError as error:
            fault = {"what": error.what, "where": error.where, "next_step": error.next_step}
            self._send("fault", fault)
            return
        seconds = time.perf_counter() - began
        answer = {"seconds": seconds, "renewed": renewed, "sha": version.sha.hex()}
        data = torch.from_numpy(np.frombuffer(columns.to_bytes(), dtype=np.uint8).copy())
        self._send("rows", answer, [data])

    def _adopt(self, message: ChannelMessage, runner: ModelRunner, state: TrainState) -> StepStats:
        """Load the state that the learner sent; return its record with the times of this rank."""
        fields = message.fields
        values = load_buffers(message.tensors, runner)
        load_server_values(values, server_values(runner.sharded_model, 0))
        state.step, state.num_updates = fields["step"], fields["version"]
        state.scale = replace(state.scale, **fields["scale"])
        self.left = tuple(fields["left"])
        seconds, phases = self._context.phases.take()
        return replace(StepStats(**fields["stats"]), seconds=seconds, phases=phases)


def _read_open_group(message: ChannelMessage) -> OpenGroup:
    fields = message.fields
    taken, observation = (tensor.numpy() for tensor in message.tensors)
    ends = np.cumsum(fields["lengths"]).tolist()
    actions = [list(taken[end - n : end]) for n, end in zip(fields["lengths"], ends, strict=True)]
    return OpenGroup(fields["episodes"], actions, observation, fields["repeats"], fields["is_restored"])
