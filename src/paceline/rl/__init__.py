"""Reinforcement learning: environments in groups, whose rows are the data of a training run.

A group of environments is a virtual shard: it is stepped, and its policy computed, in one fixed shape on
whatever rank it is. Every number that is drawn is keyed. So the rows of an iteration, and the weights, are
the same on any number of ranks. The learner is a session: the rows are its data, and (epoch, minibatch) of
PPO is their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.rl.dqn import Transitions as Transitions
    from paceline.rl.dqn import dqn_loss as dqn_loss
    from paceline.rl.experience_store import ExperienceFifo as ExperienceFifo
    from paceline.rl.experience_store import ExperienceStore as ExperienceStore
    from paceline.rl.experience_store import SumTree as SumTree
    from paceline.rl.played_episodes import Returns as Returns
    from paceline.rl.played_episodes import play as play
    from paceline.rl.policy import ActorCritic as ActorCritic
    from paceline.rl.policy import distribution as distribution
    from paceline.rl.ppo import ppo_loss as ppo_loss
    from paceline.rl.rl_task import Task as Task
    from paceline.rl.rollouts import Rows as Rows

_HOMES = {
    "ActorCritic": "policy",
    "ExperienceFifo": "experience_store",
    "ExperienceStore": "experience_store",
    "SumTree": "experience_store",
    "Transitions": "dqn",
    "dqn_loss": "dqn",
    "Returns": "played_episodes",
    "Rows": "rollouts",
    "Task": "rl_task",
    "distribution": "policy",
    "play": "played_episodes",
    "ppo_loss": "ppo",
}
__all__ = [
    "ActorCritic",
    "ExperienceFifo",
    "ExperienceStore",
    "Returns",
    "Rows",
    "SumTree",
    "Task",
    "Transitions",
    "distribution",
    "dqn_loss",
    "play",
    "ppo_loss",
]


def __getattr__(name: str) -> Any:
    # On first use: the command line names this package, and needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.rl' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"paceline.rl.{_HOMES[name]}"), name)
