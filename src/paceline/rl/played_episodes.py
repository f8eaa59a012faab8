"""Playing: the returns of a policy over keyed episodes that it was not trained on, greedy and sampled.

All episodes are played side by side, with one forward for all of them, so an episode's actions do not
depend on when the others end. Resets are keyed by (seed, "play", episode), other keys than those of training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike

import numpy as np
import torch

from paceline.errors import TaskError
from paceline.models.training_mode import evaluating
from paceline.rl.environments import EnvironmentGroup, StepTimer
from paceline.rl.group_rollout import PolicyForward
from paceline.rl.policy import keyed_uniforms
from paceline.rl.rollout_rounds import RolloutRounds
from paceline.session.arguments import TaskLike
from paceline.session.saved_run import OpenedRun, open_run

_CONFIDENCE = 1.96  # of a normal distribution, for 95 %
NUM_EPISODES = 100


@dataclass(frozen=True)
class Returns:
    """The undiscounted returns of some episodes.

    Args:
        values: of each episode.
        lengths: in steps.
    """

    values: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Return the mean."""
        return float(np.mean(self.values))

    @property
    def margin(self) -> float:
        """Return half the width of the 95 % confidence interval of the mean; NaN for one episode."""
        if len(self.values) < 2:
            return math.nan
        return float(_CONFIDENCE * np.std(self.values, ddof=1) / math.sqrt(len(self.values)))

    def __str__(self) -> str:
        return (
            f"{self.mean:.2f} +- {self.margin:.2f} (95 %), {min(self.values):g} to {max(self.values):g} in"
            f" {len(self.values)} episodes"
        )


@dataclass(frozen=True)
class PlayedEpisodes:
    """The returns of a policy with its most likely actions, and with sampled ones.

    Args:
        checkpoint: name of the checkpoint of the weights.
        step: updates before it.
    """

    checkpoint: str
    step: int
    greedy: Returns
    sampled: Returns


def play(
    run: str | PathLike[str], task: TaskLike | str | None = None, *, episodes: int = NUM_EPISODES
) -> PlayedEpisodes:
    """Play keyed episodes with the weights of a run.

    Args:
        run: its folder, or a checkpoint in it.
        task: in place of the task of its recipe, as in `paceline.open_run`.
        episodes: number of episodes with greedy, and again with sampled actions.
    Raises:
        TaskError: the run has no environments.
    """
    with open_run(run, task) as opened:
        return play_opened(opened, episodes)


def play_opened(opened: OpenedRun, episodes: int = NUM_EPISODES) -> PlayedEpisodes:
    """Play keyed episodes with the weights of a run that is open; collective, and equal on every rank."""
    session = opened.session
    greedy, sampled = (_play(opened, episodes, samples=samples) for samples in (False, True))
    return PlayedEpisodes(opened.checkpoint, session.state.step, greedy, sampled)


def _play(opened: OpenedRun, episodes: int, *, samples: bool) -> Returns:
    session, rule = opened.session, opened.session.rule
    if not isinstance(rule, RolloutRounds):
        raise TaskError("the run has no environments", next_step="evaluate it with `paceline evaluate`")
    rollouts = rule.rollouts
    spaces, seed = rollouts.spaces, rollouts.recipe.seed
    timer = StepTimer(rollouts.recipe.runtime.deadline_seconds)
    group = EnvironmentGroup(0, episodes, rollouts.make, spaces, seed, timer, purpose="play")
    total, length = np.zeros(episodes), np.zeros(episodes, dtype=np.int64)
    is_open, model = np.ones(episodes, dtype=bool), session.complete()
    forward = PolicyForward(model, session.runner.sharded_model.device, rollouts.normalizers)
    with session.averaged(), timer.watching(), evaluating(model), torch.no_grad():
        for index in range(episodes):
            group.begin(index, 0)
        for step in range(spaces.max_steps):
            output, _ = forward(group.observation)
            noise = None
            if samples:
                width = rollouts.actions.num_uniforms
                uniforms = keyed_uniforms(seed, "play", range(episodes), range(step, step + 1), width)
                noise = rollouts.actions.noise(uniforms)[0]
            action = rollouts.actions.sample(output, noise)
            reward, ends = np.zeros(episodes), np.zeros((2, episodes), dtype=bool)
            group.step(action, reward, ends[0], ends[1], is_open)
            total[is_open] += reward[is_open]
            length[is_open] += 1
            is_open &= ~ends.any(0)
            if not is_open.any():
                break
    group.close()
    return Returns(tuple(total.tolist()), tuple(length.tolist()))
