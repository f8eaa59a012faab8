"""The task of reinforcement learning: environments, a policy and a value, as a `paceline.Task`.

The data of the task are the rows of an iteration, and their order is that of PPO's (epoch, minibatch).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from paceline import task as plain_task
from paceline.data.sample_order import KeyedOrder, SampleIndices
from paceline.errors import RecipeError, TaskError
from paceline.recipe.recipe import Recipe
from paceline.recipe.rl_recipe import RLRecipe
from paceline.recipe.validation import RecipeTable
from paceline.rl.dqn import QNetwork, Replay, Transitions, dqn_loss, empty_transitions
from paceline.rl.environments import MakeEnvironment, SpaceShapes, describe_spaces, find_environment
from paceline.rl.policy import (
    ActorCritic,
    GaussianHead,
    distribution,
    tanh_network,
)
from paceline.rl.ppo import RowsLoss, ppo_loss
from paceline.rl.rollout_rounds import attach
from paceline.rl.rollouts import Rollouts, Rows, empty_rows
from paceline.task import Loss
from paceline.tasks.task_options import Widths, read_options

_NARROW_LAST_LAYER = 0.01


@dataclass(frozen=True)
class MinibatchOrder:
    """The rows of each minibatch: a new keyed permutation of an iteration's rows in each epoch of PPO.

    Args:
        rows: the order of rows, whose passes are the epochs of all iterations.
    """

    rows: KeyedOrder

    about = ""
    steps_per_epoch = 0  # the rows change, so there are no passes over the data

    def fingerprint(self) -> str:
        """Return nothing: the recipe determines the order."""
        return ""

    def batch_size(self, step: int) -> int:
        """Return the number of rows of a minibatch."""
        return self.rows.batch_size(step)

    def batch(self, step: int, part: range | None = None) -> SampleIndices:
        """Return the indices of the rows of a minibatch, or of a part of it."""
        return self.rows.batch(step, part)


def Task(
    *,
    policy: nn.Module,
    value: nn.Module | None = None,
    env: str | MakeEnvironment | None = None,
    loss: RowsLoss | None = None,
    base_dir: Path | None = None,
    **settings: Any,
) -> plain_task.Task:
    """Return the task of a policy that learns from environments.

    Args:
        policy: returns logits [N, A], or (mean, deviation) [N, D], for observations [N, ...]; without `value`
            a pair of that and the value. With algorithm = "dqn": the value of each action [N, A].
        value: returns the value of each observation, [N] or [N, 1]; left out with algorithm = "dqn".
        env: a Gymnasium id, "file.py:make", or a function that makes an environment; None: `rl.env` of the
            recipe. Every rank makes its own.
        loss: `loss(model, rows) -> Loss` with `Rows`, or with `Transitions` for algorithm = "dqn"; None: that
            of the recipe's algorithm.
        base_dir: folder to which a file is relative; None: the working directory.
        settings: further fields of `paceline.Task`, such as `tensor` or `optimizer`.
    """
    return plain_task.Task(
        model=ActorCritic(policy, value),
        data=(),
        loss=_unfinished_loss,
        for_recipe=partial(_complete, env, loss, base_dir or Path.cwd()),
        **settings,
    )


def _unfinished_loss(model: nn.Module, batch: Any) -> Loss:
    raise TaskError("the task is not complete", next_step="train it with paceline.train")


def _complete(
    env: str | MakeEnvironment | None,
    loss: RowsLoss | None,
    base_dir: Path,
    task: plain_task.Task,
    recipe: Recipe,
) -> plain_task.Task:
    """Return the task with the rows and their order, for one recipe."""
    settings = recipe.rl
    if not settings.total_steps:
        raise RecipeError(
            "the task has environments, and the recipe does not say for how many steps they run",
            where="rl.total_steps",
            next_step="add [rl] with total_steps = 100_000 to the recipe, in place of steps and epochs",
        )
    make = find_environment(_one_environment(env, settings), base_dir)
    sample = make()
    spaces = describe_spaces(sample)
    sample.close()
    if settings.algorithm == "dqn":
        return _complete_dqn(replace(task, model=_q_network(task.model)), recipe, make, spaces, loss)
    data, actions = empty_rows(settings.num_rows, spaces), distribution(spaces)
    rollouts = Rollouts(recipe, make, spaces, actions, Rows(*data.tensors), task.model)
    order = KeyedOrder(settings.num_rows, settings.minibatch_rows, recipe.seed, shuffle=recipe.batch.shuffle)
    return replace(
        task,
        data=data,
        loss=partial(_loss_of_batch, Rows, loss or ppo_loss(settings.ppo, actions)),
        order=MinibatchOrder(order),
        for_recipe=_keep,
        attach=partial(_attach_and_warn, rollouts),
    )


def _complete_dqn(
    task: plain_task.Task,
    recipe: Recipe,
    make: MakeEnvironment,
    spaces: SpaceShapes,
    loss: RowsLoss | None,
) -> plain_task.Task:
    """Return the task with the rows of an update, which are drawn before it."""
    size = recipe.rl.dqn.batch
    data = empty_transitions(size, spaces)
    replay = Replay(recipe, make, spaces, task.model, data)
    return replace(
        task,
        data=data,
        loss=partial(_loss_of_batch, Transitions, loss or dqn_loss(replay.target)),
        order=MinibatchOrder(KeyedOrder(size, size, recipe.seed, shuffle=False)),
        for_recipe=_keep,
        attach=partial(_attach_and_warn, replay),
    )


def _q_network(model: nn.Module) -> QNetwork:
    """Return the Q-network of a task."""
    if isinstance(model, ActorCritic) and model.value is None:
        return QNetwork(model.policy)
    raise TaskError(
        "DQN takes no value module: that of an observation is the largest value of an action",
        where="paceline.rl.Task(value=...)",
        next_step="leave value out; policy returns the value of each action, [N, A]",
    )


def _keep(task: plain_task.Task, recipe: Recipe) -> plain_task.Task:
    return task


def _one_environment(env: str | MakeEnvironment | None, settings: RLRecipe) -> str | MakeEnvironment:
    if env is None and settings.env is None:
        raise RecipeError(
            "neither the recipe nor the task names an environment",
            where="rl.env",
            next_step='set rl.env = "CartPole-v1", or pass env= to paceline.rl.Task',
        )
    if env is not None and settings.env is not None and env != settings.env:
        raise RecipeError(
            f"the recipe names the environment {settings.env!r}, and the task another one",
            where="rl.env",
            next_step="remove one of them",
        )
    return env if env is not None else str(settings.env)


def _loss_of_batch(rows: type[Any], loss: RowsLoss, model: nn.Module, batch: Any) -> Loss:
    return loss(model, rows(*batch))


def _attach_and_warn(rollouts: Rollouts, session: Any) -> None:
    context, dtype = session.session_base.context, rollouts.spaces.dtype
    if context.trains and dtype != "float32":
        context.warn(f"observations of {dtype} are converted to float32 once, when they are made")
    attach(rollouts, session)


class RLOptions(RecipeTable):
    """Options of the task `rl`: two networks with tanh between their layers."""

    hidden: Widths = (64, 64)


def build(recipe: Recipe, base_dir: Path, **options: Any) -> plain_task.Task:
    """Build the task `rl` with a policy for the environment of the recipe; see `RLOptions`."""
    chosen = read_options(RLOptions, options)
    env = _one_environment(None, recipe.rl)
    sample = find_environment(env, base_dir)()
    spaces = describe_spaces(sample)
    sample.close()
    is_dqn = recipe.rl.algorithm == "dqn"
    # The generator is seeded by the run, so these weights are the same on every rank.
    return Task(
        policy=_policy(spaces, chosen.hidden),
        value=None if is_dqn else tanh_network(prod(spaces.observation), chosen.hidden, 1, 1.0),
        env=env,
        base_dir=base_dir,
        tensor={} if is_dqn else _tensor_plan(spaces, len(chosen.hidden)),
    )


def _policy(spaces: SpaceShapes, hidden: tuple[int, ...]) -> nn.Module:
    num_inputs = prod(spaces.observation)
    if spaces.num_actions:
        return tanh_network(num_inputs, hidden, spaces.num_actions, _NARROW_LAST_LAYER)
    num_dimensions = len(spaces.low)
    mean = tanh_network(num_inputs, hidden, num_dimensions, _NARROW_LAST_LAYER)
    return GaussianHead(mean, num_dimensions)


def _tensor_plan(spaces: SpaceShapes, num_hidden: int) -> dict[str, str]:
    """Return how tensor=N splits the networks: pairs of layers, the first of them by its outputs."""
    policy = "policy" if spaces.num_actions else "policy.mean"
    plan: dict[str, str] = {}
    for name in (policy, "value"):
        for pair in range(num_hidden // 2):
            # Each layer is followed by its tanh, and before the first one there is nn.Flatten.
            plan |= {f"{name}.{4 * pair + 1}": "column", f"{name}.{4 * pair + 3}": "row"}
    return plan
