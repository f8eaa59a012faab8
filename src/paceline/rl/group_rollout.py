"""The rollout of a group: the columns that it fills, and the same rows under the policy of the learner.

A group is stepped, and its policy computed, in one fixed shape, on whatever process it is.

Invariant: columns are a function of the weights, the normalizers, the noise and the open episodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.rl.environments import EnvironmentGroup, SpaceShapes
from paceline.rl.normalizers import Normalizers
from paceline.rl.policy import ActionDistribution, PolicyOutput


class GroupColumns(NamedTuple):
    """What a group returns of an iteration: T steps of G environments."""

    observation: NDArray[np.float32]  # (T, G, ...)
    action: NDArray[Any]  # (T, G) int64, or (T, G, D) float32
    log_prob: NDArray[np.float32]  # (T, G)
    value: NDArray[np.float32]  # (T, G)
    reward: NDArray[np.float64]  # (T, G)
    terminated: NDArray[np.bool_]  # (T, G)
    truncated: NDArray[np.bool_]  # (T, G)
    final: NDArray[np.float32]  # (T, G) value of the final observation, where one was truncated
    last: NDArray[np.float32]  # (1, G) value of the observation after the last step
    after: NDArray[np.float32]  # (1, G, ...) that observation
    final_observation: NDArray[np.float32]  # (T, G, ...) where one has ended; (0, G, ...): not kept
    importance: NDArray[np.float64]  # (T, G) probability under the learner over the actor's; (0, G): one

    def to_bytes(self) -> bytes:
        """Return all columns as bytes, whose number depends on the shapes only."""
        return b"".join(np.ascontiguousarray(column).tobytes() for column in self)


def empty_columns(
    steps: int, size: int, spaces: SpaceShapes, *, keeps_final: bool = False, is_older: bool = False
) -> GroupColumns:
    """Return columns of zeros.

    Args:
        steps, size: T and G.
        spaces: of an environment.
        keeps_final: there is room for final observations.
        is_older: the actor may be older than the learner, so that rows have an importance.
    """
    by_step, action = (steps, size), np.int64 if spaces.num_actions else np.float32
    return GroupColumns(
        observation=np.zeros((*by_step, *spaces.observation), dtype=np.float32),
        action=np.zeros((*by_step, *spaces.action_shape), dtype=action),
        log_prob=np.zeros(by_step, dtype=np.float32),
        value=np.zeros(by_step, dtype=np.float32),
        reward=np.zeros(by_step),
        terminated=np.zeros(by_step, dtype=bool),
        truncated=np.zeros(by_step, dtype=bool),
        final=np.zeros(by_step, dtype=np.float32),
        last=np.zeros((1, size), dtype=np.float32),
        after=np.zeros((1, size, *spaces.observation), dtype=np.float32),
        final_observation=np.zeros((steps * keeps_final, size, *spaces.observation), dtype=np.float32),
        importance=np.ones((steps * is_older, size)),
    )


def read_groups(data: bytes | bytearray, like: GroupColumns) -> list[GroupColumns]:
    """Return the columns of several groups, which have followed each other as bytes."""
    groups, offset = list[GroupColumns](), 0
    while offset < len(data):
        columns = []
        for column in like:
            end = offset + column.nbytes
            columns.append(np.frombuffer(data[offset:end], dtype=column.dtype).reshape(column.shape))
            offset = end
        groups.append(GroupColumns(*columns))
    return groups


class PolicyForward:
    """The forward of a policy on observations of one shape, without gradients.

    Args:
        normalizers: of the run, which are not changed.
    """

    def __init__(self, model: nn.Module, device: torch.device, normalizers: Normalizers) -> None:
        self._model, self._device, self._normalizers = model, device, normalizers

    def __call__(self, observation: NDArray[np.float32]) -> tuple[PolicyOutput, Tensor]:
        """Return the output of the policy and the values, on the CPU."""
        normalized = torch.from_numpy(self._normalizers.observations(observation))
        output, value = self._model(normalized.to(self._device))
        moved = tuple(x.cpu() for x in output) if isinstance(output, tuple) else output.cpu()
        return moved, value.cpu()


def play_group(
    group: EnvironmentGroup,
    forward: PolicyForward,
    actions: ActionDistribution,
    noise: NDArray[np.float64],
    columns: GroupColumns,
) -> None:
    """Step a group through an iteration.

    Args:
        group: continues from its present observations.
        forward: the policy.
        actions: the distribution of its actions.
        noise: of all actions, [T, G, ...].
        columns: filled.
    """
    outputs = []
    for step in range(len(noise)):
        columns.observation[step] = group.observation
        output, value = forward(group.observation)
        outputs.append(output)
        columns.value[step] = value.numpy()
        columns.action[step] = actions.sample(output, noise[step])
        terminated, truncated = columns.terminated[step], columns.truncated[step]
        final = group.step(columns.action[step], columns.reward[step], terminated, truncated)
        if final is not None and len(columns.final_observation):
            columns.final_observation[step] = final
        if final is not None and (truncated & ~terminated).any():
            # The whole group in one forward, whichever of its environments were truncated: a shape of its own
            # would have other bits.
            columns.final[step] = np.where(truncated, forward(final)[1].numpy(), 0.0)
    columns.last[0] = forward(group.observation)[1].numpy()
    columns.after[0] = group.observation
    action = torch.from_numpy(columns.action).flatten(0, 1)
    log_prob = actions.log_prob(actions.join(outputs), action)
    columns.log_prob[:] = log_prob.reshape(columns.log_prob.shape).numpy()


def under_learner(columns: GroupColumns, forward: PolicyForward, actions: ActionDistribution) -> GroupColumns:
    """Return the rows of an older policy with values and log-probabilities of the learner's.

    Args:
        columns: of the actor, with final observations.
        forward: the policy with the weights from which the learner begins the iteration.
        actions: the distribution of actions.
    """
    steps, size = columns.reward.shape
    output, value = forward(columns.observation.reshape(steps * size, *columns.observation.shape[2:]))
    log_prob = actions.log_prob(output, torch.from_numpy(columns.action).flatten(0, 1)).numpy()
    is_cut = columns.truncated & ~columns.terminated
    final = np.zeros_like(columns.final)
    if is_cut.any():
        # All of them in one forward: a shape that follows from the ends would have other bits.
        after = forward(columns.final_observation.reshape(steps * size, *columns.after.shape[2:]))[1]
        final = np.where(is_cut, after.numpy().reshape(steps, size), final)
    difference = log_prob.reshape(steps, size).astype(np.float64) - columns.log_prob
    return columns._replace(
        value=value.numpy().reshape(steps, size),
        log_prob=log_prob.reshape(steps, size),
        final=final,
        last=forward(columns.after[0])[1].numpy()[None],
        importance=np.exp(difference),
    )
