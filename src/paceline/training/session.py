"""The session: everything one rank needs to train, put together, and the iteration over its steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor, nn

from paceline.cluster import Cluster
from paceline.comm import Net
from paceline.commit import Commit
from paceline.data import Feed, MicroBatch, Reader, Work
from paceline.layout import Holding, Placed
from paceline.layout.whole import Snapshot, gather_whole, share_snapshot, take_snapshot, whole_model
from paceline.mesh import Mesh
from paceline.observe import Stats
from paceline.phase import SERVED, TRAINING
from paceline.recipe import Recipe, Strategy
from paceline.state import TrainState
from paceline.sync import Rule, UpdateStep
from paceline.sync.average import Average
from paceline.sync.rule import Outliving
from paceline.task import Task, finish_metrics
from paceline.training.agreed import regroup, total
from paceline.training.arrange import Notes
from paceline.training.callback import Callback
from paceline.training.debugging import Debugging
from paceline.training.layouts import Grounds
from paceline.training.turns import KEPT_AS, Turns


def _has_gaps(holding: Holding) -> bool:
    return any(t.is_meta for t in (*holding.model.parameters(), *holding.model.buffers()))


def _stay(*args: Any, **options: Any) -> None:
    """One rule for the whole run, and nobody reads the state."""


@dataclass
class Session:
    """One rank of a training job. Build it with `build_session`.

    Args:
        strategy: the recipe's, with its replicas filled in.
        feed: what it trains on.
        placed: the model as this rank holds it.
        update_step: makes updates.
        rule: owns the loop.
        debugging: looks at every round, where the recipe asks for it.
        notes: steps that were left out, and why; `fit` hands them to the sinks.
        closers: what `close` calls, and whoever makes anew what hangs on the rule or the members.
        leavers: what only `close` calls.
        presence: the rule, where it goes on without some ranks.
        average: of the weights; None: the recipe asks for none. `averages_rounds`: it follows rounds.
        callbacks: what `fit` calls; see `listen`.
        grounds: what `renew` makes the rest from; None: it cannot.
        enter: has the session run under the rule of a step; see `switching`.
        puts: put into the update step again what others than its constructor have put there.
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
    placed: Placed
    feed: Feed
    update_step: UpdateStep
    rule: Rule
    debugging: Debugging
    notes: Notes = field(default_factory=Notes)
    closers: list[Callable[[], None]] = field(default_factory=list)
    leavers: list[Callable[[], None]] = field(default_factory=list)
    presence: list[Outliving] = field(default_factory=list)
    average: Average | None = None
    averages_rounds: bool = False
    callbacks: list[Callback] = field(default_factory=list)
    stop_reason: str = ""
    enter: Callable[..., None] = field(default_factory=lambda: _stay)
    puts: list[Callable[[], None]] = field(default_factory=list)
    settle: Callable[[], None] = field(default_factory=lambda: _stay)
    grounds: Grounds | None = None
    commit: Commit | None = None

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
        self.turns = Turns(self.recipe.strategy.sync, self.notes.add)
        if self.turns.waits:
            self.state.keep(KEPT_AS, self.turns)

    def close(self) -> None:
        """Release what the strategy holds, and its process groups; the session cannot train afterwards."""
        self.release()
        while self.leavers:
            self.leavers.pop()()
        self.mesh.give_back()

    def release(self) -> None:
        """Release what hangs on the rule and the members, which is about to be made anew."""
        while self.closers:
            self.closers.pop()()

    @property
    def whole_strategy(self) -> Strategy:
        """The strategy with all rules of the run, and its replicas filled in."""
        now, asked = self.strategy, self.recipe.strategy
        replicas = (now.replicas or 1) + now.servers - asked.servers
        return now.replace(sync=asked.sync, servers=asked.servers, replicas=replicas)

    @property
    def doing(self) -> str:
        """What its launcher is told that it does; see `phase`."""
        return SERVED if self.strategy.rule.needs_server else TRAINING

    @property
    def num_steps(self) -> int:
        """Length of the run; `state.step` says how far it is."""
        return self.feed.num_steps

    @property
    def work(self) -> Work:
        """The micro-batches of this rank."""
        return self.feed.work

    @property
    def loader(self) -> Reader:
        """Reads the training data."""
        return self.feed.loader

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.cluster.global_rank == 0

    def rounds(self) -> Iterator[Stats]:
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

    def _rounds(self) -> Generator[Stats, None, bool]:
        """The rounds of one rule; returns whether the run is to end."""
        before = self.state.step
        end = self.turns.phase(before).end
        feed = self.feed if end is None else replace(self.feed, num_steps=min(end, self.num_steps))
        rounds = self.rule.rounds(feed, self.placed, self.update_step)
        for stats in self.debugging.rounds(rounds):
            if self.average is not None and self.averages_rounds:
                self.average.follow(self.state.step - before)
            turns = self.turns.waits and self.turns.passed(
                stats, self.state.step - before, self.notes.fresh()
            )
            before = self.state.step
            regroup(self)
            yield self.finished(stats)
            if stats.stops:
                return True
            if turns:
                cast("Generator[Stats, None, None]", rounds).close()  # and the stream, which may read ahead
                break
        return False

    def finished(self, stats: Stats) -> Stats:
        """With the metrics as they are reported, and the rate of every parameter group."""
        groups = enumerate(self.state.optimizer.param_groups)
        rates = {str(group.get("name", i)): float(group["lr"]) for i, group in groups if "lr" in group}
        metrics = finish_metrics(self.task, stats.loss, stats.num_items, stats.metrics)
        return stats.told(metrics, rates)

    def abort(self) -> None:
        """Drop the half step in which an error left `rounds`: calling `rounds` again does that step anew."""
        self.rule.abort()
        self.placed.abort()

    def snapshot(self) -> Snapshot:
        """The whole state as it is between two rounds, the same for every layout; collective."""
        return take_snapshot(self.state, self.mesh, self.net)

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Go on from a snapshot, taken under this or another strategy or number of ranks; collective."""
        self.make_ready(scalars)
        self.state.load(tensors, scalars)

    def make_ready(self, scalars: Mapping[str, Any]) -> None:
        """Have the session run under the rule of a state that is about to be loaded; collective."""
        self.turns.load_state_dict(scalars.get("others", {}).get(KEPT_AS, {}))
        self.enter(int(scalars["step"]), carries=False)

    def take_over(self, snapshot: Snapshot | None) -> None:
        """Go on where another session stopped, under a new number of ranks; collective.

        Args:
            snapshot: of the session that stopped, on rank 0; other ranks may be new and have none.
        """
        shared = share_snapshot(snapshot, self.mesh.world, self.net, self.placed.holding.device)
        self.restore(*shared)

    def holding_all(self) -> nn.Module | None:
        """The model, if this rank holds all of it."""
        holding = self.placed.holding
        whole = all(one.kept and one.computes.is_whole for one in holding.held.values())
        return holding.model if whole and not _has_gaps(holding) else None

    def complete(self) -> nn.Module:
        """The whole model on this rank; collective. If a rank holds all of it, that is the model itself."""
        found, holding = self.holding_all(), self.placed.holding
        if found is not None:
            return found
        pieces = [piece for piece in self.state.pieces() if piece.slot.name.startswith("model/")]
        pieces += self.state.unsaved_buffers()
        return whole_model(holding.model, gather_whole(pieces, self.mesh.inside, self.net), holding.device)

    def averaged(self) -> AbstractContextManager[None]:
        """Inside of the block ranks compute with the average of the weights, if there is one; collective."""
        return nullcontext() if self.average is None else self.average.in_place(self.mesh.world)

    def sum(self, value: float) -> float:
        """Add up a number of every rank; collective, equal on all. Wire: one all_reduce of 8 bytes."""
        return total(self, value)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches from the state's step to the end of the run."""
        for step in range(self.state.step, self.num_steps):
            yield from self.work.micro_batches(step)
