"""What the ranks of a session do together between two rounds, where the job goes on without one that is lost.

Invariant: it is done on all that are left, or they do it again (`commit`); who goes on has done it.
Under a rule that needs all ranks it is done once, and an error ends the job.

The session: everything one rank needs to train, put together, and the iteration over its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from paceline.comm.group_collectives import all_gather_texts, broadcast_text
from paceline.comm.net import Net
from paceline.comm.race_detector import CommChecks
from paceline.data.work import BatchReader, MicroBatch, MicroBatchWork, TrainingFeed
from paceline.errors import CommunicationError
from paceline.job.cluster import Cluster
from paceline.job.commit import CommitProtocol
from paceline.job.launcher_reports import TRAINING, TRAINING_FOR_SERVER
from paceline.job.mesh import Mesh
from paceline.observe.step_stats import StepStats
from paceline.parallel.model_layout import SessionBase
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import EventQueue
from paceline.parallel.sharded_model import ShardedModel
from paceline.parallel.state_transfer import (
    StateSnapshot,
    gather_whole,
    share_snapshot,
    take_snapshot,
    whole_model,
)
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.session.callback import Callback
from paceline.session.rule_switch import RULE_SWITCHES_KEY, RuleSwitches
from paceline.state.train_state import TrainState
from paceline.sync.sync_rule import SurvivingRule, SyncRule
from paceline.sync.update import UpdateStep
from paceline.sync.weight_average import WeightAverage
from paceline.task import Task, finish_metrics

T = TypeVar("T")


def repeat_until_agreed(session: Session, attempt: Callable[[], T]) -> T:
    """Do something together; collective. Where a worker of a server is lost in it, it is done again.

    Args:
        session: its mesh is that of those who are left afterwards.
        attempt: collective over that mesh, which may be another one when it is called again.
    Raises:
        CommunicationError: it failed, and nobody is lost, or somebody is without whom nothing goes on.
    """
    if not any(rule.left for rule in session.loss_tolerant_rules):
        return attempt()
    session.commit = session.commit or CommitProtocol(session.cluster.connected, session.net.deadline_seconds)
    left = _remaining_ranks(session)
    while True:
        found, failure = _attempt(session, attempt, left)
        done, still = session.commit.vote(left, done=failure is None)
        for rule in session.loss_tolerant_rules:
            rule.left = still
        if done:
            return cast("T", found)
        if still == left or not set(range(session.strategy.servers)) <= set(still):
            raise failure or CommunicationError(
                "another rank could not do its part between two rounds",
                next_step="look at the first rank that ended: it is the cause",
            )
        left = still


def drop_lost_ranks(session: Session) -> None:
    """A round is over: go on with those that the rule has not lost; collective where it has lost some."""
    if _remaining_ranks(session) != session.mesh.world.ranks:
        repeat_until_agreed(session, lambda: None)


def gather_from_all(session: Session, make: Callable[[], str]) -> list[str]:
    """A text of every rank, made when it is known who is left, by place in the mesh; see `repeat_until_agreed`."""
    return repeat_until_agreed(session, lambda: all_gather_texts(make(), session.mesh.world, session.net))


def share_with_all(session: Session, text: str) -> str:
    """The text of rank 0 on every rank; see `repeat_until_agreed`."""
    device = session.runner.sharded_model.device
    return repeat_until_agreed(session, lambda: broadcast_text(text, session.mesh.world, session.net, device))


def sum_over_ranks(session: Session, value: float) -> float:
    """The sum of a number of every rank; see `repeat_until_agreed`."""

    def attempt() -> float:
        mine = torch.tensor(value, dtype=torch.float64, device=session.runner.sharded_model.device)
        return float(session.net.all_reduce(mine, session.mesh.world).wait())

    return repeat_until_agreed(session, attempt)


def _attempt(
    session: Session, attempt: Callable[[], T], left: tuple[int, ...]
) -> tuple[T | None, CommunicationError | None]:
    """Do it among those that are left; or why it failed, which it then does on all of them."""
    try:
        session.mesh = session.mesh.surviving_mesh(left)
        return attempt(), None
    except CommunicationError as error:
        session.cluster.abort()
        return None, error


def _remaining_ranks(session: Session) -> tuple[int, ...]:
    """The ranks of the mesh that the rule has not lost."""
    found = session.mesh.world.ranks
    for rule in session.loss_tolerant_rules:
        found = tuple(rank for rank in found if rank in (rule.left or found))
    return found


def _has_meta_tensors(sharded_model: ShardedModel) -> bool:
    return any(t.is_meta for t in (*sharded_model.model.parameters(), *sharded_model.model.buffers()))


def _do_nothing(*args: Any, **options: Any) -> None:
    """One rule for the whole run, and nobody reads the state."""


@dataclass
class Session:
    """One rank of a training job. Build it with `build_session`.

    Args:
        strategy: the recipe's, with its replicas filled in.
        feed: what it trains on.
        runner: the model as this rank holds it.
        update_step: makes updates.
        rule: owns the loop.
        debugging: looks at every round, where the recipe asks for it.
        notes: steps that were left out, and why; `fit` hands them to the sinks.
        closers: what `close` calls, and whoever makes anew what hangs on the rule or the members.
        exit_callbacks: what only `close` calls.
        loss_tolerant_rules: the rule, where it goes on without some ranks.
        average: of the weights; None: the recipe asks for none. `average_after_rounds`: it follows rounds.
        callbacks: what `fit` calls; see `listen`.
        session_base: what `renew` makes the rest from; None: it cannot.
        enter: has the session run under the rule of a step; see `switching`.
        reinstall_hooks: put into the update step again what others than its constructor have put there.
        settle: waits until nothing reads the state any more.
        stop_reason: why a callback wants the run to end; empty: it does not.
        commit: the votes of `agreed`; made at the first of them.
    """

    recipe: Recipe
    strategy: Strategy
    cluster: Cluster
    mesh: Mesh
    net: Net
    task: Task
    state: TrainState
    runner: ModelRunner
    feed: TrainingFeed
    update_step: UpdateStep
    rule: SyncRule
    debugging: CommChecks
    notes: EventQueue = field(default_factory=EventQueue)
    closers: list[Callable[[], None]] = field(default_factory=list)
    exit_callbacks: list[Callable[[], None]] = field(default_factory=list)
    loss_tolerant_rules: list[SurvivingRule] = field(default_factory=list)
    average: WeightAverage | None = None
    average_after_rounds: bool = False
    callbacks: list[Callback] = field(default_factory=list)
    stop_reason: str = ""
    enter: Callable[..., None] = field(default_factory=lambda: _do_nothing)
    reinstall_hooks: list[Callable[[], None]] = field(default_factory=list)
    settle: Callable[[], None] = field(default_factory=lambda: _do_nothing)
    session_base: SessionBase | None = None
    commit: CommitProtocol | None = None

    def listen(self, callbacks: Sequence[Callback]) -> None:
        """Have callbacks called by `fit`, and their state in checkpoints; before anything is restored."""
        for callback in callbacks:
            self.state.keep(f"{type(callback).__name__}.{len(self.callbacks)}", callback)
            self.callbacks.append(callback)
            callback.on_build(self)

    def stop(self, reason: str) -> None:
        """End the run after the present round, on all ranks; for callbacks."""
        self.stop_reason = reason

    def __post_init__(self) -> None:
        self.turns = RuleSwitches(self.recipe.strategy.sync, self.notes.add)
        if self.turns.waits:
            self.state.keep(RULE_SWITCHES_KEY, self.turns)

    def close(self) -> None:
        """Release what the strategy holds, and its process groups; the session cannot train afterwards."""
        self.release()
        while self.exit_callbacks:
            self.exit_callbacks.pop()()
        self.mesh.give_back()

    def release(self) -> None:
        """Release what hangs on the rule and the members, which is about to be made anew."""
        while self.closers:
            self.closers.pop()()

    @property
    def full_strategy(self) -> Strategy:
        """The strategy with all rules of the run, and its replicas filled in."""
        now, asked = self.strategy, self.recipe.strategy
        replicas = (now.replicas or 1) + now.servers - asked.servers
        return now.replace(sync=asked.sync, servers=asked.servers, replicas=replicas)

    @property
    def doing(self) -> str:
        """What its launcher is told that it does; see `phase`."""
        return TRAINING_FOR_SERVER if self.strategy.rule.needs_server else TRAINING

    @property
    def num_steps(self) -> int:
        """Length of the run; `state.step` says how far it is."""
        return self.feed.num_steps

    @property
    def work(self) -> MicroBatchWork:
        """The micro-batches of this rank."""
        return self.feed.work

    @property
    def loader(self) -> BatchReader:
        """Reads the training data."""
        return self.feed.loader

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.cluster.global_rank == 0

    def rounds(self) -> Iterator[StepStats]:
        """Train from the state's step to the end of the run, yielding after every round of the rule.

        Between two rounds the state is consistent: it may be saved, evaluated or left there. After an error
        `abort` makes it so.
        """
        while self.state.step < self.num_steps:
            self.enter(self.state.step)
            self.cluster.enter_phase(self.doing)
            last = yield from self._rounds()
            if last:
                return

    def _rounds(self) -> Generator[StepStats, None, bool]:
        """The rounds of one rule; returns whether the run is to end."""
        before = self.state.step
        end = self.turns.phase(before).end
        feed = self.feed if end is None else replace(self.feed, num_steps=min(end, self.num_steps))
        rounds = self.rule.rounds(feed, self.runner, self.update_step)
        for stats in self.debugging.rounds(rounds):
            if self.average is not None and self.average_after_rounds:
                self.average.follow(self.state.step - before)
            turns = self.turns.waits and self.turns.passed(
                stats, self.state.step - before, self.notes.fresh()
            )
            before = self.state.step
            drop_lost_ranks(self)
            yield self.finished(stats)
            if stats.stops:
                return True
            if turns:
                cast(
                    "Generator[StepStats, None, None]", rounds
                ).close()  # and the stream, which may read ahead
                break
        return False

    def finished(self, stats: StepStats) -> StepStats:
        """With the metrics as they are reported, and the rate of every parameter group."""
        groups = enumerate(self.state.optimizer.param_groups)
        rates = {str(group.get("name", i)): float(group["lr"]) for i, group in groups if "lr" in group}
        metrics = finish_metrics(self.task, stats.loss, stats.num_items, stats.metrics)
        return stats.told(metrics, rates)

    def abort(self) -> None:
        """Drop the half step in which an error left `rounds`: calling `rounds` again does that step anew."""
        self.rule.abort()
        self.runner.abort()

    def snapshot(self) -> StateSnapshot:
        """The whole state as it is between two rounds, the same for every layout; collective."""
        return take_snapshot(self.state, self.mesh, self.net)

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Go on from a snapshot, taken under this or another strategy or number of ranks; collective."""
        self.prepare_restore(scalars)
        self.state.load(tensors, scalars)

    def prepare_restore(self, scalars: Mapping[str, Any]) -> None:
        """Have the session run under the rule of a state that is about to be loaded; collective."""
        self.turns.load_state_dict(scalars.get("others", {}).get(RULE_SWITCHES_KEY, {}))
        self.enter(int(scalars["step"]), carries=False)

    def take_over(self, snapshot: StateSnapshot | None) -> None:
        """Go on where another session stopped, under a new number of ranks; collective.

        Args:
            snapshot: of the session that stopped, on rank 0; other ranks may be new and have none.
        """
        shared = share_snapshot(snapshot, self.mesh.world, self.net, self.runner.sharded_model.device)
        self.restore(*shared)

    def local_whole_model(self) -> nn.Module | None:
        """The model, if this rank holds all of it."""
        sharded_model = self.runner.sharded_model
        whole = all(one.kept and one.computes.is_whole for one in sharded_model.held.values())
        return sharded_model.model if whole and not _has_meta_tensors(sharded_model) else None

    def complete(self) -> nn.Module:
        """The whole model on this rank; collective. If a rank holds all of it, that is the model itself."""
        found, sharded_model = self.local_whole_model(), self.runner.sharded_model
        if found is not None:
            return found
        pieces = [piece for piece in self.state.pieces() if piece.slot.name.startswith("model/")]
        pieces += self.state.nonpersistent_buffers()
        return whole_model(
            sharded_model.model, gather_whole(pieces, self.mesh.inside, self.net), sharded_model.device
        )

    def averaged(self) -> AbstractContextManager[None]:
        """Inside of the block ranks compute with the average of the weights, if there is one; collective."""
        return nullcontext() if self.average is None else self.average.in_place(self.mesh.world)

    def sum(self, value: float) -> float:
        """Add up a number of every rank; collective, equal on all. Wire: one all_reduce of 8 bytes."""
        return sum_over_ranks(self, value)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches from the state's step to the end of the run."""
        for step in range(self.state.step, self.num_steps):
            yield from self.work.micro_batches(step)
