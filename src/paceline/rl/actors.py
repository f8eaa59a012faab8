"""Actors: who plays the groups of environments of an iteration, and with which weights.

Every rank plays a block of groups, and then all ranks gather the rows of all of them. With `rl.age = 0` a
rank plays between two updates. With an age a thread plays the iterations ahead while the rank learns. With
lanes each lane is a thread that plays a part of the block.

Invariant: the rows of a group are those of (version, open episodes, iteration), whichever process plays it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.work import split_evenly
from paceline.errors import DivergenceError
from paceline.models.training_mode import evaluating
from paceline.recipe.recipe import Recipe
from paceline.rl.environments import (
    EnvironmentGroup,
    MakeEnvironment,
    SpaceShapes,
    StepTimer,
)
from paceline.rl.group_rollout import (
    GroupColumns,
    PolicyForward,
    empty_columns,
    play_group,
    read_groups,
)
from paceline.rl.policy import ActionDistribution
from paceline.rl.policy_versions import PolicyVersion
from paceline.session.session import Session, share_with_all

if TYPE_CHECKING:
    from paceline.rl.rollouts import Rollouts

UNKNOWN, REPEATS, DIFFERS = -1, 1, 0
"""Whether an environment repeats an episode, given the reset and the actions."""
Noise = Callable[[range, range], NDArray[np.float64]]
"""Function that returns the noise of the actions of some environments in some of their steps."""


class OpenGroup(NamedTuple):
    """The open episodes of a group, from which it can be played on any process.

    Args:
        episodes: number of the present episode of each environment.
        actions: those taken in it, by environment.
        observation: the present one, float32 [G, ...].
        repeats: whether the environment repeats an episode.
        is_restored: they have begun elsewhere, so that they are replayed.
    """

    episodes: Sequence[int]
    actions: Sequence[Sequence[Any]]
    observation: NDArray[np.float32]
    repeats: int
    is_restored: bool


class GroupPlayer:
    """The environments of one process, or of one of its lanes.

    Args:
        recipe: of the run.
        make: makes an environment.
        spaces: of each environment.
        actions: the distribution of its actions.
        noise: of actions.
    Attributes:
        timer: limits the time of a step.
        groups: that are open here, by number.
    """

    def __init__(
        self,
        recipe: Recipe,
        make: MakeEnvironment,
        spaces: SpaceShapes,
        actions: ActionDistribution,
        noise: Noise,
    ) -> None:
        self._recipe, self._make, self._spaces = recipe, make, spaces
        self._actions, self._noise = actions, noise
        # The other ranks wait for a step that hangs, and should hear of it before they give up.
        self.timer = StepTimer(recipe.runtime.deadline_seconds / 2)
        self.groups: dict[int, EnvironmentGroup] = {}

    def open(self, number: int, opened: OpenGroup) -> int:
        """Bring a group to its open episodes; return how many had to begin anew instead."""
        self.close_group(number)
        size = self._recipe.rl.group_size
        group = EnvironmentGroup(number, size, self._make, self._spaces, self._recipe.seed, self.timer)
        self.groups[number] = group
        return sum(_place(group, index, opened) for index in range(size))

    def play(self, number: int, iteration: int, version: PolicyVersion, device: torch.device) -> GroupColumns:
        """Play an iteration of a group that is open here."""
        settings, group, columns = self._recipe.rl, self.groups[number], self.empty_columns()
        steps = range(iteration * settings.steps, (iteration + 1) * settings.steps)
        environments = range(group.first, group.first + settings.group_size)
        forward = PolicyForward(version.model, device, version.normalizers)
        with torch.no_grad():
            play_group(group, forward, self._actions, self._noise(environments, steps), columns)
        return columns

    def play_all(self, iteration: int, version: PolicyVersion, device: torch.device) -> list[GroupColumns]:
        """Play an iteration of all groups that are open here, in their order."""
        return [self.play(number, iteration, version, device) for number in self.groups]

    def empty_columns(self) -> GroupColumns:
        """Return the columns of a group before it is played."""
        settings = self._recipe.rl
        return empty_columns(
            settings.steps,
            settings.group_size,
            self._spaces,
            keeps_final=settings.algorithm == "dqn" or settings.corrects_age,
            is_older=settings.corrects_age,
        )

    def close_group(self, number: int) -> None:
        """Close a group, if it is open here."""
        if number in self.groups:
            self.groups.pop(number).close()

    def close(self) -> None:
        """Close all groups."""
        for number in [*self.groups]:
            self.close_group(number)


def _place(group: EnvironmentGroup, index: int, opened: OpenGroup) -> bool:
    """Bring an environment to its open episode; return whether it had to begin a new one instead."""
    number, actions = opened.episodes[index], opened.actions[index]
    if not opened.is_restored:
        group.begin(index, number)
        return False
    if opened.repeats == REPEATS:
        group.begin(index, number, actions)
        if np.array_equal(opened.observation[index], group.observation[index]):
            return False
    elif not len(actions):
        # An environment that repeats nothing may differ in its reset, too.
        group.begin(index, number)
        return not np.array_equal(opened.observation[index], group.observation[index])
    group.begin(index, number + 1)
    return True


class Actors(Protocol):
    """The source of the rows of an iteration."""

    def collect(
        self, session: Session, iteration: int, present: PolicyVersion
    ) -> tuple[list[GroupColumns], dict[str, float]]:
        """Return the columns of all groups in their order, and seconds by what they were spent on.

        Args:
            iteration: all iterations before it were collected.
            present: the version with the weights of the learner.
        """

    def close(self) -> None:
        """End what plays, and close the environments of this process."""


class RankActors:
    """The actors of a run in which every rank acts and learns.

    Args:
        rollouts: of this rank.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        others = range(1, rollouts.recipe.strategy.lanes)
        self._players = [rollouts.player, *(rollouts.new_player() for _ in others)]  # by lane
        self._threads: list[ActorThread] = []

    def collect(
        self, session: Session, iteration: int, present: PolicyVersion
    ) -> tuple[list[GroupColumns], dict[str, float]]:
        """Play the groups of this rank, or take what its threads have played, and gather all; collective.

        Raises:
            TaskError: an environment raised, hung, or returned a value that is not finite.
            DivergenceError: ranks have acted with different weights.
        Wire: one ragged all_gather of the rows of all groups.
        """
        rollouts, version = self._rollouts, self._rollouts.versions.of(iteration)
        began = time.perf_counter()
        self._prepare(session)
        device = session.runner.sharded_model.device
        if rollouts.settings.age:
            groups = self._in_threads(session, iteration, present)
        elif len(self._players) > 1:
            with evaluating(version.model):
                groups = self._in_threads(session, iteration, present)
        else:
            (player,) = self._players
            with player.timer.watching(), evaluating(version.model):
                groups = player.play_all(iteration, version, device)
        parts = [np.frombuffer(columns.to_bytes(), dtype=np.uint8) for columns in groups]
        played = time.perf_counter()
        blocks = _gather_blocks(np.concatenate([np.frombuffer(version.sha, np.uint8), *parts]), session)
        size, like = len(version.sha), self._players[0].empty_columns()
        _require_same_weights([block[:size].tobytes() for block in blocks], session.state.step)
        gathered = [columns for block in blocks for columns in read_groups(block[size:].tobytes(), like)]
        seconds = {"policy and environments": played - began, "exchange": time.perf_counter() - played}
        return gathered, seconds

    def _in_threads(self, session: Session, iteration: int, present: PolicyVersion) -> list[GroupColumns]:
        """Let the threads play as far as there are weights for; return the columns of an iteration."""
        rollouts, device = self._rollouts, session.runner.sharded_model.device
        settings, versions = rollouts.settings, rollouts.versions
        if not self._threads:
            self._threads = [
                ActorThread(partial(player.play_all, device=device), player.timer, iteration)
                for player in self._players
            ]
        for number in range(
            self._threads[0].next_iteration,
            min(present.iteration + settings.age + 1, settings.num_iterations),
        ):
            for thread in self._threads:
                thread.request(number, versions.of(number))
        groups = [columns for thread in self._threads for columns in thread.take(iteration)]
        return rollouts.under_learner(groups, iteration, session)

    def close(self) -> None:
        """End the threads, and close the environments of this rank."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.close()
        for player in self._players:
            player.close()

    def _prepare(self, session: Session) -> None:
        """Make the environments of this rank, and bring them to where the open episodes stand; collective."""
        rollouts, episodes, world = self._rollouts, self._rollouts.episodes, session.mesh.world
        if episodes.repeats == UNKNOWN:
            result = ""
            if rollouts.settings.check and session.is_first:
                result = rollouts.repeats_episodes()
            rollouts.note_repeats(share_with_all(session, result) if rollouts.settings.check else "", session)
        if any(player.groups for player in self._players) and not episodes.is_restored:
            return
        self.close()
        block, size = rollouts.group_block(world.rank, world.size), rollouts.settings.group_size
        renewed = 0
        for lane, player in enumerate(self._players):
            with player.timer.watching():
                for index in split_evenly(len(block), len(self._players), lane):
                    renewed += player.open(block[index], episodes.open_group(block[index], size))
        if episodes.is_restored and session.sum(float(renewed)):
            rollouts.warn_of_new_episodes(session)
        episodes.is_restored = False


class ActorThread:
    """A thread that plays iterations one after another.

    Args:
        play: plays an iteration of its groups with a version.
        timer: of the environments.
        first: the first iteration.
    Attributes:
        next_iteration: that is not requested yet.
    """

    def __init__(
        self,
        play: Callable[[int, PolicyVersion], list[GroupColumns]],
        timer: StepTimer,
        first: int,
    ) -> None:
        self._play, self._timer, self.next_iteration = play, timer, first
        self._requests: SimpleQueue[tuple[int, PolicyVersion] | None] = SimpleQueue()
        self._results: dict[int, Future[list[GroupColumns]]] = {}
        self._is_closed = False
        # Not waited for at the exit of the process, which a step that hangs would prevent.
        self._thread = threading.Thread(target=self._run, name="actor", daemon=True)
        self._thread.start()

    def request(self, iteration: int, version: PolicyVersion) -> None:
        """Let the thread play the next iteration, after those that were requested before."""
        self._results[iteration] = Future()
        self.next_iteration = iteration + 1
        self._requests.put((iteration, version))

    def take(self, iteration: int) -> list[GroupColumns]:
        """Return the columns of an iteration, once they are played.

        Raises:
            TaskError: an environment raised, hung, or returned a value that is not finite.
        """
        result = self._results[iteration]
        self._timer.begin()
        while not result.done():
            # A signal would interrupt this thread, and not the one that is in the step.
            _wait(result, self._timer.seconds / 2 or None)
            self._timer.require_progress()
        del self._results[iteration]
        return result.result()

    def close(self) -> None:
        """End the thread after the iteration that it plays."""
        self._is_closed = True
        self._requests.put(None)
        self._thread.join(2 * self._timer.seconds or None)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None and not self._is_closed:
            iteration, version = request
            with _Outcome(self._results[iteration]) as outcome:
                outcome.result.set_result(self._play(iteration, version))


class _Outcome:
    """A context manager that passes an error to whoever waits for a result."""

    def __init__(self, result: Future[list[GroupColumns]]) -> None:
        self.result = result

    def __enter__(self) -> _Outcome:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self.result.set_exception(error)
        return True


def _wait(result: Future[Any], seconds: float | None) -> None:
    """Wait until a result is there, at most for some seconds."""
    is_done = threading.Event()
    result.add_done_callback(lambda _: is_done.set())
    is_done.wait(seconds)


def _gather_blocks(block: NDArray[np.uint8], session: Session) -> list[NDArray[np.uint8]]:
    """Return the bytes of every rank, by rank; lengths may differ."""
    device = session.runner.sharded_model.device
    gathered = session.net.all_gather(torch.from_numpy(block).to(device), session.mesh.world).wait()
    return [x.cpu().numpy() for x in gathered]


def _require_same_weights(hashes: Sequence[bytes], step: int) -> None:
    """Raise a DivergenceError if a rank has acted with other weights than rank 0."""
    others = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if others:
        raise DivergenceError(
            f"ranks {others} have acted with other weights than rank 0 at step {step}",
            next_step="resume from the last checkpoint; set debug.comm_checks to find what differs first",
        )
