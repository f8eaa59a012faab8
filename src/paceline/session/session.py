"""The session of one rank: model, state, data and sync rule, and the iteration over the rounds of training.

A session has two kinds of parts. `SessionBase` (context, model layout) and the state last as long as the
session; `RuleParts` depend on the sync rule and on the members of the job, and are built again when either
changes.

Between two rounds the state is consistent, so ranks evaluate, save and vote there. Under rules that
continue without a lost worker of a server, every such collective goes through `repeat_until_agreed`:
either all remaining ranks have completed it, or all of them repeat it. Under the other rules it runs once,
and an error ends the job.

This module does not decide when to evaluate or save (`fit_loop`), and does not build anything (`build`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from paceline.job.launcher_reports import TRAINING, TRAINING_ELASTIC, TRAINING_FOR_SERVER
from paceline.job.mesh import Mesh
from paceline.observe.step_stats import StepStats
from paceline.optim.reduce_on_plateau import PLATEAU_KEY, ReduceOnPlateau
from paceline.parallel.batch_gather import RankGather
from paceline.parallel.buddy_copies import BuddyCopies
from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.model_layout import ModelLayout
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.session_context import SessionContext
from paceline.parallel.state_transfer import (
    StateSnapshot,
    gather_over_mesh,
    share_snapshot,
    take_snapshot,
    whole_model,
)
from paceline.privacy.private_sum import PrivateSum
from paceline.recipe.recipe import Recipe
from paceline.recipe.strategy import Strategy
from paceline.session.callback import Callback
from paceline.session.model_guard import (
    ModelGuard,
    keep_storages,
    named_tensors,
    require_rule_without_copies,
    require_same_tensors,
    write_pieces,
)
from paceline.session.rule_switch import RULE_SWITCHES_KEY, RuleSwitches
from paceline.session.start_warnings import find_unruled_buffers, unruled_buffers_warning
from paceline.state.slot import TensorPiece
from paceline.state.train_state import TrainState
from paceline.sync.bad_value_locator import LossRecorder
from paceline.sync.sync_rule import SurvivingRule, SyncRule
from paceline.sync.update import UpdateStep
from paceline.sync.weight_average import WeightAverage
from paceline.task import Loss, Task, finish_metrics

T = TypeVar("T")


class EventQueue:
    """Queue of events that happen beside the steps (a lost rank, a switch of rules), for the sinks."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Mapping[str, Any]]] = []
        self._new: dict[str, Mapping[str, Any]] = {}

    def add(self, name: str, record: Mapping[str, Any]) -> None:
        """Append an event with its record."""
        self._events.append((name, record))
        self._new[name] = record

    def new_by_name(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the last record of each name since the previous call, whatever `take` has returned."""
        records, self._new = self._new, {}
        return records

    def take(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return all events since the previous call, in their order."""
        events, self._events = self._events, []
        return events


@dataclass(frozen=True)
class SessionBase:
    """Parts of a session that outlive its sync rules.

    Args:
        context: arguments of the constructors; replaced when the rule or the members change.
        layout: the placed model.
        loss_recorder: records every loss, so that a bad value can be located.
        rank_gather: gathers rows of all ranks for a loss that calls `paceline.gather`.
        guard: of what callbacks change in the model.
    """

    context: SessionContext
    layout: ModelLayout
    loss_recorder: LossRecorder
    rank_gather: RankGather
    guard: ModelGuard


@dataclass
class RuleParts:
    """Parts of a session that are built again when the sync rule or the members change.

    Args:
        strategy: of the present rule, with its replicas filled in.
        feed: the micro-batches of this rank, their loader and the length of the run.
        update_step: applies one update to the parameters of this rank.
        rule: the sync rule, which owns the loop over micro-batches.
        close_callbacks: called when the rule or the members change, and by `Session.close`.
        loss_tolerant_rules: the rule, if it continues without some ranks; else empty.
        comm_checks: debug checks around every round.
        average: moving average of the weights, if the recipe asks for one.
        average_after_rounds: the average is updated after rounds, not by the update step.
    """

    strategy: Strategy
    cluster: Cluster
    mesh: Mesh
    feed: TrainingFeed
    update_step: UpdateStep
    rule: SyncRule
    close_callbacks: list[Callable[[], None]]
    loss_tolerant_rules: list[SurvivingRule]
    comm_checks: CommChecks
    average: WeightAverage | None = None
    average_after_rounds: bool = False


def repeat_until_agreed(session: Session, attempt: Callable[[], T]) -> T:
    """Run a collective function; repeat it on the remaining ranks if a worker is lost in it.

    Args:
        session: its mesh is afterwards that of the remaining ranks.
        attempt: collective over the session's mesh, which may have shrunk when it is called again.
    Raises:
        CommunicationError: it failed although no rank is lost, or a rank is lost that the rule needs.
    """
    rules = session.parts.loss_tolerant_rules
    if not any(rule.left for rule in rules):
        return attempt()
    session.commit = session.commit or CommitProtocol(session.cluster.connected, session.net.deadline_seconds)
    remaining = _remaining_ranks(session)
    while True:
        result, failure = _attempt(session, attempt, remaining)
        # A rank may have returned before another one was lost, so success counts only if all ranks vote
        # for it.
        done, still_connected = session.commit.vote(remaining, done=failure is None)
        for rule in rules:
            rule.left = still_connected
        if done:
            return cast("T", result)
        if still_connected == remaining or not set(range(session.strategy.servers)) <= set(still_connected):
            raise failure or CommunicationError(
                "another rank failed between two rounds",
                next_step="read the error of the rank that ended first: it is the cause",
            )
        remaining = still_connected


def drop_lost_ranks(session: Session) -> None:
    """Shrink the mesh to the ranks that the rule has not lost; collective if it has lost any."""
    if _remaining_ranks(session) != session.mesh.world.ranks:
        repeat_until_agreed(session, lambda: None)


def gather_from_all(session: Session, make: Callable[[], str]) -> list[str]:
    """Return the text of every rank, in the order of the mesh; collective.

    Args:
        make: returns this rank's text; called again, on the smaller mesh, if a rank is lost.
    """
    return repeat_until_agreed(session, lambda: all_gather_texts(make(), session.mesh.world, session.net))


def share_with_all(session: Session, text: str) -> str:
    """Return the text of rank 0 on every rank; collective."""
    device = session.runner.sharded_model.device
    return repeat_until_agreed(session, lambda: broadcast_text(text, session.mesh.world, session.net, device))


def _attempt(
    session: Session, attempt: Callable[[], T], remaining: tuple[int, ...]
) -> tuple[T | None, CommunicationError | None]:
    """Run `attempt` on the remaining ranks; on failure make it fail on all of them and return the error."""
    try:
        session.parts.mesh = session.mesh.surviving_mesh(remaining)
        return attempt(), None
    except CommunicationError as error:
        session.cluster.abort()  # wakes ranks that still wait inside the collective, so that they vote too
        return None, error


def _remaining_ranks(session: Session) -> tuple[int, ...]:
    """Return the ranks of the mesh that the rule has not lost."""
    ranks = session.mesh.world.ranks
    for rule in session.parts.loss_tolerant_rules:
        ranks = tuple(rank for rank in ranks if rank in (rule.left or ranks))
    return ranks


def _do_nothing(*args: Any, **options: Any) -> None:
    """Stand in for `Session.enter_rule` before it is set, and for `wait_for_save` without a saver."""


@dataclass
class Session:
    """One rank of a training job, built by `build_session`.

    Args:
        recipe: with the strategy as the user wrote it.
        state: model, optimizer and counters; what a checkpoint holds.
        runner: forward and backward of the model as this rank holds it.
        events: events beside the steps (a skipped step, a lost rank); `fit` passes them to the sinks.
        session_base: what the parts of another rule are built from.
        parts: what depends on the present rule and members.
        callbacks: called by `fit`; see `add_callbacks`.
        stop_reason: why a callback of this rank wants the run to end; empty: it does not.
        enter_rule: switches to the rule that is active at a step.
        reinstall_hooks: called after new `parts` were built, to install hooks in the new update step.
        wait_for_save: waits until a background save no longer reads the state.
        commit: votes of `repeat_until_agreed`; made at the first of them.
        is_elastic: `fit` continues on the remaining ranks when others are lost.
        reported: the step up to which `fit` has done what was due, and the last round that it has reported.
        recorded_step: the last step whose record the sinks of this rank have received.
        interrupted_at: step from which on that is to be repeated, after a change of members; None: nothing.
        copies: of the state in the memory of neighbours, renewed before every step; None: there are none.
        generation_trials: which forwards `paceline.generate` uses, by their settings; kept by `serving`.
    """

    recipe: Recipe
    task: Task
    state: TrainState
    runner: ModelRunner
    events: EventQueue
    session_base: SessionBase
    parts: RuleParts
    callbacks: list[Callback] = field(default_factory=list)
    stop_reason: str = ""
    enter_rule: Callable[..., None] = field(default_factory=lambda: _do_nothing)
    reinstall_hooks: list[Callable[[], None]] = field(default_factory=list)
    wait_for_save: Callable[[], None] = field(default_factory=lambda: _do_nothing)
    commit: CommitProtocol | None = None
    is_elastic: bool = False
    reported: tuple[int, StepStats | None] = (0, None)
    recorded_step: int = -1
    interrupted_at: int | None = None
    copies: BuddyCopies | None = None
    generation_trials: dict[object, Any] = field(default_factory=dict)
    rule_switches: RuleSwitches = field(init=False)
    _unruled_buffers: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.rule_switches = RuleSwitches(self.recipe.strategy.sync, self.events.add)
        if self.rule_switches.depends_on_events:
            self.state.keep(RULE_SWITCHES_KEY, self.rule_switches)
        several = self.session_base.context.shards > 1
        model = self.runner.sharded_model.model
        self._unruled_buffers = find_unruled_buffers(model, self.task) if several else frozenset[str]()

    @property
    def strategy(self) -> Strategy:
        """The strategy of the present rule, with its replicas filled in."""
        return self.parts.strategy

    @property
    def full_strategy(self) -> Strategy:
        """The strategy with all rules of the run, and its replicas filled in."""
        present, configured = self.strategy, self.recipe.strategy
        replicas = (present.replicas or 1) + present.servers - configured.servers
        return present.replace(sync=configured.sync, servers=configured.servers, replicas=replicas)

    @property
    def cluster(self) -> Cluster:
        """The processes of the job as this rank is connected to them."""
        return self.parts.cluster

    @property
    def mesh(self) -> Mesh:
        """The groups of ranks, without those that were lost."""
        return self.parts.mesh

    @property
    def net(self) -> Net:
        """Collectives of this rank, with a deadline and a ledger of what was sent."""
        return self.session_base.context.net

    @property
    def feed(self) -> TrainingFeed:
        """The training data of this rank."""
        return self.parts.feed

    @property
    def update_step(self) -> UpdateStep:
        """Applies one update; callbacks may add to its `parts`."""
        return self.parts.update_step

    @property
    def rule(self) -> SyncRule:
        """The present sync rule."""
        return self.parts.rule

    @property
    def average(self) -> WeightAverage | None:
        """Moving average of the weights, if the recipe asks for one."""
        return self.parts.average

    @property
    def plateau(self) -> ReduceOnPlateau | None:
        """The reductions of the rate by evaluations, if the recipe asks for them."""
        return cast("ReduceOnPlateau | None", self.state.stateful_objects.get(PLATEAU_KEY))

    @property
    def private(self) -> PrivateSum | None:
        """The noise of the sums of the run, and what it has released; None: it has none."""
        return self.session_base.context.rule_inputs.private

    @property
    def num_steps(self) -> int:
        """Length of the run in steps; `state.step` counts those that are done."""
        return self.feed.num_steps

    @property
    def work(self) -> MicroBatchWork:
        """The micro-batches of this rank."""
        return self.feed.work

    @property
    def loader(self) -> BatchReader:
        """Reader of the training data."""
        return self.feed.loader

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes files and prints to the console."""
        return self.cluster.global_rank == 0

    @property
    def launcher_phase(self) -> str:
        """The phase that is reported to the launcher while this session trains; see `Cluster.enter_phase`."""
        if self.strategy.sync_spec.needs_server:
            return TRAINING_FOR_SERVER
        return TRAINING_ELASTIC if self.is_elastic and self.cluster.world_size > 1 else TRAINING

    def add_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Register callbacks with `fit` and their state with checkpoints, before anything is restored."""
        for callback in callbacks:
            self.state.keep(f"{type(callback).__name__}.{len(self.callbacks)}", callback)
            self.callbacks.append(callback)
            callback.on_build(self)

    def run_callbacks(self, call: Callable[[Callback], None]) -> None:
        """Run a call on every callback.

        Raises:
            TaskError: they have changed the model in a way that this layout cannot follow.
        """
        if self.callbacks:
            with self.guard.watched():
                for callback in self.callbacks:
                    call(callback)

    def stop(self, reason: str) -> None:
        """End the run after the present round, on all ranks; for callbacks."""
        self.stop_reason = reason

    def close(self) -> None:
        """Release threads, connections and process groups; the session cannot train afterwards."""
        self.close_rule()
        if self.copies is not None:
            self.copies.close()
        self.session_base.layout.close()
        self.mesh.give_back()

    def close_rule(self) -> None:
        """Release what `parts` hold, before they are built again."""
        while self.parts.close_callbacks:
            self.parts.close_callbacks.pop()()

    def rounds(self) -> Iterator[StepStats]:
        """Train from the state's step to the end of the run, yielding after every round of the rule.

        Between two rounds the state is consistent: it may be saved, evaluated or left as it is. After an
        error `abort` makes it so.
        """
        while self.state.step < self.num_steps:
            self.enter_rule(self.state.step)
            self.cluster.enter_phase(self.launcher_phase)
            is_over = yield from self._rounds_of_rule()
            if is_over:
                return

    def _rounds_of_rule(self) -> Generator[StepStats, None, bool]:
        """Train under the present rule until the next one begins; return whether the run is to end."""
        step_before, parts = self.state.step, self.parts
        end = self.rule_switches.phase(step_before).end
        feed = self.feed if end is None else replace(self.feed, num_steps=min(end, self.num_steps))
        rounds = parts.rule.rounds(feed, self.runner, parts.update_step)
        self.guard.check()
        self._renew_copies()
        for stats in parts.comm_checks.rounds(rounds):
            num_steps = self.state.step - step_before
            if parts.average is not None and parts.average_after_rounds:
                parts.average.follow(num_steps)
            switches = self.rule_switches.depends_on_events and self.rule_switches.record_round(
                stats, num_steps, self.events.new_by_name()
            )
            step_before = self.state.step
            if parts.loss_tolerant_rules:
                drop_lost_ranks(self)
            if self._unruled_buffers:
                self._warn_of_unruled_buffers()
            self.runner.buffers.keep_step()
            yield self.with_reported_metrics(stats)
            self.guard.check()
            self._renew_copies()
            if stats.stops:
                return True
            if switches:
                # Also closes the stream of batches, whose workers may have read ahead for this rule.
                cast("Generator[StepStats, None, None]", rounds).close()
                break
        return False

    def _renew_copies(self) -> None:
        """Copy the state with which the next step begins to the neighbour of this rank; collective.

        After callbacks, evaluations and saves, which may have changed it.
        """
        if self.copies is not None and self.state.step < self.num_steps:
            self.copies.update(self.state)

    def _warn_of_unruled_buffers(self) -> None:
        """Warn of buffers that the first round has changed without a rule of the task; collective."""
        unruled, self._unruled_buffers = self._unruled_buffers, frozenset[str]()
        local = [name for name in self.runner.buffers.changed if name in unruled]
        texts = gather_from_all(self, lambda: "\n".join(local))
        names = list(dict.fromkeys(name for text in texts for name in text.splitlines()))
        if names:
            context = self.session_base.context
            context.warn(unruled_buffers_warning(names, context.shards))

    def skip_buffer_warning(self) -> None:
        """Do not warn of unruled buffers: after a change of members, ranks differ in whether they have."""
        self._unruled_buffers = frozenset[str]()

    def with_reported_metrics(self, stats: StepStats) -> StepStats:
        """Return the stats with the metrics of the task and the learning rate of every parameter group."""
        groups = enumerate(self.state.optimizer.param_groups)
        rates = {str(group.get("name", i)): float(group["lr"]) for i, group in groups if "lr" in group}
        metrics = finish_metrics(self.task, stats.loss, stats.num_items, stats.metrics)
        return stats.with_metrics(metrics, rates)

    def abort(self) -> None:
        """Drop the incomplete step in which an error left `rounds`; `rounds` then repeats that step."""
        self.rule.abort()
        self.runner.abort()

    def snapshot(self) -> StateSnapshot:
        """Return the whole state as it is between two rounds, the same under every layout; collective."""
        return take_snapshot(self.state, self.mesh, self.net)

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Load a snapshot that was taken under this or another strategy or number of ranks; collective."""
        self.prepare_restore(scalars)
        with self.guard.suspended():
            self.state.load(tensors, scalars)

    def prepare_restore(self, scalars: Mapping[str, Any]) -> None:
        """Switch to the sync rule of a state that is about to be loaded; collective."""
        self.rule_switches.load_state_dict(scalars.get("others", {}).get(RULE_SWITCHES_KEY, {}))
        self.enter_rule(int(scalars["step"]), carries_state=False)

    def restore_shared(self, snapshot: StateSnapshot | None) -> None:
        """Load a snapshot that only rank 0 has, for example under a new number of ranks; collective.

        Args:
            snapshot: of the session that stopped, on rank 0; None on the others.
        """
        shared = share_snapshot(snapshot, self.mesh.world, self.net, self.runner.sharded_model.device)
        self.restore(*shared)

    def local_whole_model(self) -> nn.Module | None:
        """Return the model if this rank holds all of it, else None."""
        sharded_model = self.runner.sharded_model
        return sharded_model.model if sharded_model.is_whole else None

    def complete(self) -> nn.Module:
        """Return the whole model on this rank, which is the model itself if it is whole; collective.

        It is for reading: otherwise it is a copy, and a callback that writes to it ends the run. To write to
        the weights, use `weights`.
        """
        local, is_on_servers = self.local_whole_model(), self.runner.sharded_model.is_on_servers
        if local is None:
            model = self._gathered_copy()
            self.guard.watch_copy(model)
            return model
        # Servers need the workers in their gather, which have the whole model themselves.
        if is_on_servers:
            gather_over_mesh(self._model_pieces(), self.mesh, self.net)
        return local

    def _gathered_copy(self) -> nn.Module:
        sharded_model = self.runner.sharded_model
        whole = gather_over_mesh(self._model_pieces(), self.mesh, self.net)
        return whole_model(sharded_model.model, whole, sharded_model.device)

    def _model_pieces(self) -> list[TensorPiece]:
        """Return the parts of all parameters and buffers that this rank holds."""
        pieces = [piece for piece in self.state.pieces() if piece.slot.name.startswith("model/")]
        return pieces + self.state.nonpersistent_buffers()

    @contextmanager
    def weights(self) -> Iterator[nn.Module]:
        """Return a context manager that yields the whole model, and keeps what is written to it; collective.

        Every rank enters it between two steps, as in a callback, and must write the same: a moving average in
        a target network, a clip of the weights. Gradients are off inside. Values are written to the present
        parameters and buffers; new ones are not adopted.

        Raises:
            StrategyError: the sync rule has other copies of the weights, which would not get the change.
            TaskError: a tensor was replaced by one of another name or shape.
        Wire: nothing if this rank holds the whole model, else as `complete`.
        """
        require_rule_without_copies(self.rule, self.strategy)
        self.wait_for_save()  # a save in the background still reads what is written below
        local, storages = self.local_whole_model(), self.guard.storages()
        with self.guard.suspended(), torch.no_grad():
            model = local if local is not None else self._gathered_copy()
            before = dict(named_tensors(model))
            yield model
            require_same_tensors(before, model)
            keep_storages(storages)
            if local is None:
                write_pieces(self._model_pieces(), model)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a context manager inside of which ranks use the averaged weights, if any; collective."""
        if self.average is None:
            yield
            return
        with self.guard.suspended(), self.average.in_place(self.mesh.world):
            yield

    @property
    def guard(self) -> ModelGuard:
        """Guard of what callbacks change in the model."""
        return self.session_base.guard

    def sum(self, value: float) -> float:
        """Return the sum of a number over all ranks; collective.

        Wire: one all_reduce of 8 bytes.
        """

        def attempt() -> float:
            local = torch.tensor(value, dtype=torch.float64, device=self.runner.sharded_model.device)
            return float(self.net.all_reduce(local, self.mesh.world).wait())

        return repeat_until_agreed(self, attempt)

    def losses_of_step(self) -> Callable[[], Iterable[Loss]]:
        """Read this rank's micro-batches of the present step; return a function that yields their losses.

        It is for an optimizer that evaluates the loss in its update; each call runs the forwards again.
        """
        micro_batches = self.work.micro_batches(self.state.step)
        with self.feed.open(micro_batches) as stream:
            loaded = [next(stream) for _ in micro_batches]

        def run() -> Iterator[Loss]:
            yield from cast(ReplicatedRunner, self.runner).repeat(loaded)
            self.session_base.loss_recorder.take()  # these losses belong to no step

        return run

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches from the state's step to the end of the run."""
        for step in range(self.state.step, self.num_steps):
            yield from self.work.micro_batches(step)
