"""Environments in groups of fixed size, with keyed resets, and faults that are named.

An environment is reset in the step in which its episode ends, with the key of (seed, environment, episode).
The observation after the last step of an episode is the final one; the next row begins with the observation
after the reset, so there is no row without a transition.

Invariant: what an environment does depends only on its number, the seed, and its actions.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import MissingExtraError, TaskError
from paceline.state.keys import key
from paceline.tasks.task_registry import find_build

MakeEnvironment = Callable[[], Any]
_SEED_BITS = 31  # some environments pass their seed to NumPy's legacy generator


class SpaceShapes(NamedTuple):
    """The spaces of an environment.

    Args:
        observation: shape of an observation, which becomes float32.
        dtype: of the observations that the environment returns.
        num_actions: number of discrete actions; 0: actions are a box.
        first_action: the smallest discrete action.
        low, high: bounds of a box of actions, float32 [D].
        max_steps: the time limit of an episode.
    """

    observation: tuple[int, ...]
    dtype: str
    num_actions: int
    first_action: int
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    max_steps: int

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Return the shape of an action: () for discrete ones, [D] for a box."""
        return () if self.num_actions else self.low.shape


def find_environment(spec: str | MakeEnvironment, base_dir: Path) -> MakeEnvironment:
    """Return the function that makes an environment.

    Args:
        spec: a Gymnasium id, "file.py:make", or that function.
        base_dir: folder to which the file is relative.
    Raises:
        MissingExtraError: Gymnasium is not installed.
        TaskError: there is no such environment.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError(
            "reinforcement learning needs Gymnasium, which is not installed",
            next_step="pip install 'paceline[rl]'",
        ) from error
    if callable(spec):
        return spec
    if ".py:" in spec:
        return find_build(spec, base_dir, makes="gymnasium.Env")
    try:
        gymnasium.spec(spec)
    except gymnasium.error.Error as error:
        raise TaskError(
            f"there is no environment {spec!r}: {str(error).splitlines()[0]}",
            where="rl.env",
            next_step='name a Gymnasium id such as "CartPole-v1", or your own: "file.py:make"',
        ) from error
    return lambda: gymnasium.make(spec, disable_env_checker=True)


def describe_spaces(environment: Any) -> SpaceShapes:
    """Return the spaces of an environment.

    Raises:
        TaskError: it has no time limit, or a space that is not supported; says what to do.
    """
    from gymnasium.spaces import Box

    seen = environment.observation_space
    if not isinstance(seen, Box):
        raise TaskError(
            f"the observations are {type(seen).__name__}, and a policy needs numbers of one shape",
            where="rl.env",
            next_step="wrap the environment in gymnasium.wrappers.FlattenObservation",
        )
    max_steps = _time_limit(environment)
    if not max_steps:
        raise TaskError(
            "the environment has no time limit, so an episode might never end",
            where="rl.env",
            next_step="wrap it in gymnasium.wrappers.TimeLimit(env, max_episode_steps=...)",
        )
    return SpaceShapes(seen.shape, str(seen.dtype), *_describe_actions(environment.action_space), max_steps)


def _describe_actions(space: Any) -> tuple[int, int, NDArray[np.float32], NDArray[np.float32]]:
    """Return number and first of discrete actions, and the bounds of a box."""
    from gymnasium.spaces import Box, Discrete

    if isinstance(space, Discrete):
        empty = np.zeros(0, dtype=np.float32)
        return int(space.n), int(space.start), empty, empty
    if isinstance(space, Box) and len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating):
        return 0, 0, space.low.astype(np.float32), space.high.astype(np.float32)
    raise TaskError(
        f"the actions are {space}, and only discrete ones and a box of floats in one dimension are supported",
        where="rl.env",
        next_step="wrap the environment so that it takes such actions",
    )


def _time_limit(environment: Any) -> int:
    """Return the steps after which an episode is truncated; 0: there is no limit."""
    from gymnasium.wrappers import TimeLimit

    inner = environment
    while inner is not None:
        if isinstance(inner, TimeLimit):
            return int(inner._max_episode_steps)
        inner = getattr(inner, "env", None)
    spec = getattr(environment, "spec", None)
    return int(getattr(spec, "max_episode_steps", None) or 0)


def reset_seed(seed: int, purpose: str, environment: int, episode: int) -> int:
    """Return the seed of a reset, keyed by what it is for."""
    return key(seed, purpose, environment, episode) >> (63 - _SEED_BITS)


class EnvironmentHangError(TaskError):
    """A step or a reset that has not returned in time.

    It is no `DeadlineError`, which says that another rank is gone: the other ranks would wait for this one.
    """


@dataclass
class StepTimer:
    """A limit for the time of one step of an environment, which a signal interrupts.

    Args:
        seconds: limit of one step or reset; 0: none.
    Attributes:
        count: calls of environments so far.
        present: what the call that runs is doing; empty: none runs.
    """

    seconds: float
    count: int = 0
    present: str = ""
    _last_count: int = -1

    def begin(self) -> None:
        """Begin to look at calls."""
        self._last_count = -1

    def require_progress(self) -> None:
        """Check that another call runs than when this was called last.

        Raises:
            EnvironmentHangError: it is the same call.
        """
        if self.present and self.count == self._last_count:
            raise EnvironmentHangError(
                f"{self.present} has not returned for {self.seconds:g} s",
                where="rl.env",
                next_step="find what it waits for, or raise runtime.deadline_seconds",
            )
        self._last_count = self.count

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Interrupt a call in the block that takes too long; in the main thread only."""
        if not self.seconds or threading.current_thread() is not threading.main_thread():
            yield
            return
        began = time.monotonic()
        self.begin()

        def check(number: int, frame: FrameType | None) -> None:
            self.require_progress()

        # Twice as often as the limit, so that a call is interrupted after one to one and a half of it.
        handler = signal.signal(signal.SIGALRM, check)
        other, interval = signal.setitimer(signal.ITIMER_REAL, self.seconds, self.seconds / 2)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if other:  # a timer that was running before, as that of a test
                passed = time.monotonic() - began
                signal.setitimer(signal.ITIMER_REAL, max(0.001, other - passed), interval)


class EnvironmentCall:
    """A call of an environment: its time is limited, and an error in it is named.

    Args:
        timer: learns what is running.
        place: the environment, its episode and its step.
    """

    def __init__(self, timer: StepTimer, place: str) -> None:
        self._timer, self._place = timer, place

    def __enter__(self) -> None:
        self._timer.present = self._place
        self._timer.count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.present = ""
        if isinstance(error, Exception) and not isinstance(error, EnvironmentHangError):
            raise TaskError(
                f"{self._place} raised {type(error).__name__}: {error}",
                where="rl.env",
                next_step="repair the environment; `paceline train --resume RUN` continues from the last"
                " checkpoint",
            ) from error


class EnvironmentGroup:
    """A group of environments, stepped one after another.

    Args:
        number: of the group.
        size: environments of a group.
        make: makes an environment.
        spaces: of each of them.
        seed: of the run.
        timer: limits the time of a call.
        purpose: of the episodes, a part of the keys of their resets.
    Attributes:
        observation: present observations, float32 [size, ...].
        episode: number of the present episode of each environment.
    """

    def __init__(
        self,
        number: int,
        size: int,
        make: MakeEnvironment,
        spaces: SpaceShapes,
        seed: int,
        timer: StepTimer,
        *,
        purpose: str = "reset",
    ) -> None:
        self._purpose = purpose
        self.number, self.spaces, self._seed, self._timer = number, spaces, seed, timer
        self.first = number * size
        self._environments = [make() for _ in range(size)]
        self.observation = np.zeros((size, *spaces.observation), dtype=np.float32)
        self.episode = [0] * size
        self._steps = [0] * size

    def begin(self, index: int, episode: int, actions: Sequence[Any] = ()) -> None:
        """Begin an episode of an environment, and repeat its first actions.

        Args:
            index: of the environment in the group.
            episode: its number, from which the reset follows.
            actions: that were taken in it.
        """
        self._reset(index, episode)
        for action in actions:
            observation, _, terminated, truncated, _ = self._call(index, "step", self._to_space(action))
            if terminated or truncated:
                raise self._wrong(index, "ended an episode that was open when it was saved")
            self.observation[index] = observation
            self._steps[index] += 1

    def step(
        self,
        actions: NDArray[Any],
        reward: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        chosen: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.float32] | None:
        """Step all environments, and reset those whose episode has ended.

        Args:
            actions: int64 [size], or float32 [size, D].
            reward, terminated, truncated: [size], filled.
            chosen: the environments that are stepped, bool [size]; None: all.
        Returns:
            If an episode has ended, the observations before its reset, float32 [size, ...]. Else None.
        """
        final: NDArray[np.float32] | None = None
        for index in range(len(self._environments)) if chosen is None else np.flatnonzero(chosen).tolist():
            observation, reward[index], ends, is_cut, _ = self._call(
                index, "step", self._to_space(actions[index])
            )
            self.observation[index] = observation
            self._steps[index] += 1
            terminated[index], truncated[index] = ends, is_cut
        ended = terminated | truncated
        if ended.any():
            final = self.observation.copy()
            self._require_numbers(reward)  # before the reset, which would hide the observation
            for index in np.flatnonzero(ended).tolist():
                self._reset(index, self.episode[index] + 1)
        else:
            self._require_numbers(reward)
        return final

    def close(self) -> None:
        """Close all environments."""
        for environment in self._environments:
            environment.close()

    def _reset(self, index: int, episode: int) -> None:
        self.episode[index], self._steps[index] = episode, 0
        seed = reset_seed(self._seed, self._purpose, self.first + index, episode)
        observation, _ = self._call(index, "reset", seed)
        self.observation[index] = observation

    def _to_space(self, action: Any) -> Any:
        if self.spaces.num_actions:
            return int(action) + self.spaces.first_action
        return np.clip(np.asarray(action, dtype=np.float32), self.spaces.low, self.spaces.high)

    def _call(self, index: int, method: str, argument: Any) -> Any:
        environment = self._environments[index]
        with EnvironmentCall(self._timer, self._place(index, method)):
            return environment.reset(seed=argument) if method == "reset" else environment.step(argument)

    def _require_numbers(self, reward: NDArray[np.float64]) -> None:
        """Raise a TaskError if a reward or an observation is not finite."""
        if np.isfinite(reward).all() and np.isfinite(self.observation).all():
            return
        for index, value in enumerate(reward):
            for name, values in (("observation", self.observation[index]), ("reward", value)):
                if not np.isfinite(values).all():
                    raise self._wrong(index, f"returned a {name} that is not finite")

    def _place(self, index: int, method: str) -> str:
        number = self.first + index
        where = f"environment {number} (group {self.number}), episode {self.episode[index]}"
        return f"{where}, reset" if method == "reset" else f"{where}, step {self._steps[index]}"

    def _wrong(self, index: int, what: str) -> TaskError:
        number = self.first + index
        return TaskError(
            f"environment {number} (group {self.number}), episode {self.episode[index]}, step"
            f" {self._steps[index]}: {what}",
            where="rl.env",
            next_step="repair the environment, or wrap it in one that checks what it returns",
        )


def repeats_episodes(make: MakeEnvironment, spaces: SpaceShapes, seed: int) -> bool:
    """Play an episode twice with the same reset and actions, and return whether both are equal."""
    first, second = (_play_keyed(make, spaces, seed) for _ in range(2))
    return first == second


def _play_keyed(make: MakeEnvironment, spaces: SpaceShapes, seed: int) -> list[bytes]:
    """Play an episode with keyed random actions; return every result as bytes."""
    environment = make()
    draws = np.random.Generator(np.random.Philox(key=key(seed, "check")))
    observation, _ = environment.reset(seed=reset_seed(seed, "check", 0, 0))
    results, is_over = [np.asarray(observation).tobytes()], False
    for _ in range(spaces.max_steps):
        if is_over:
            break
        action: Any = (
            int(draws.integers(spaces.num_actions)) + spaces.first_action
            if spaces.num_actions
            else np.clip(draws.standard_normal(len(spaces.low)), spaces.low, spaces.high).astype(np.float32)
        )
        observation, reward, terminated, truncated, _ = environment.step(action)
        is_over = bool(terminated or truncated)
        results.append(np.asarray(observation).tobytes() + repr((float(reward), is_over)).encode())
    environment.close()
    return results
