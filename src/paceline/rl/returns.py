"""Returns and generalized advantage estimates of rows in the order of time, with correct ends of episodes.

An episode ends in one of two ways. Where it terminated, nothing comes after it: the value of the next state
is zero. Where a time limit truncated it, the next state has the value of the final observation, which is not
that of the next row: there another episode begins. A step that is both has terminated. No advantage is
carried over the end of an episode.

All functions take arrays with time first, [T, N], for N environments, and compute in float64.
Source: Schulman et al. 2016, arXiv:1506.02438, equation 16; Pardo et al. 2018, arXiv:1712.00378, section 3;
for rows of an older policy Espeholt et al. 2018, arXiv:1802.01561, section 4.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def next_values(
    values: Floats,
    last: Floats,
    final: Floats,
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return the value of the state after each step, float64 [T, N].

    Args:
        values: of the state before each step, [T, N].
        last: of the state after the last step, where the episode goes on, [N].
        final: of the final observation, where an episode was truncated, [T, N]; not read elsewhere.
        terminated, truncated: whether, and how, the episode ended with the step, [T, N].
    """
    after = np.concatenate([values[1:], last[None]]).astype(np.float64)
    after = np.where(truncated, final, after)
    return np.where(terminated, 0.0, after)


def gae(
    reward: Floats,
    values: Floats,
    after: Floats,
    ended: NDArray[np.bool_],
    gamma: float,
    decay: float,
) -> NDArray[np.float64]:
    """Return the generalized advantage estimates, float64 [T, N].

    Args:
        reward: of each step, [T, N].
        values: of the state before it.
        after: of the state after it (`next_values`).
        ended: whether the episode ended with it.
        gamma: discount of a step.
        decay: lambda; 1: the return minus the value, 0: the error of one step.
    """
    errors = reward.astype(np.float64) + gamma * after - values
    advantages = np.zeros(errors.shape)
    following = np.zeros(errors.shape[1])
    for step in reversed(range(len(errors))):
        following = errors[step] + gamma * decay * ~ended[step] * following
        advantages[step] = following
    return advantages


def vtrace(
    reward: Floats,
    values: Floats,
    after: Floats,
    ended: NDArray[np.bool_],
    importance: Floats,
    gamma: float,
    decay: float,
) -> NDArray[np.float64]:
    """Return the advantages of rows of an older policy by V-trace, float64 [T, N]; with the value: a target.

    Where the policies are equal they are those of `gae`. With lambda = 1 they are those of the paper; with a
    smaller one the next state counts with a mixture of its target and its value, as in `gae`.

    Args:
        reward, values, after, ended, gamma, decay: as for `gae`, with values of the present policy.
        importance: probability of each action under the present policy over that of the actor, [T, N]; it is
            clipped to 1, in the error of its own step (rho) and in what later errors count for it (c).
    Source: Espeholt et al. 2018, IMPALA, arXiv:1802.01561, equation 1 and remark 2.
    """
    rho = np.minimum(importance, 1.0).astype(np.float64)
    errors = rho * (reward.astype(np.float64) + gamma * after - values)
    advantages = np.zeros(errors.shape)
    following = np.zeros(errors.shape[1])
    for step in reversed(range(len(errors))):
        following = errors[step] + gamma * decay * rho[step] * ~ended[step] * following
        advantages[step] = following
    return advantages


def normalized(advantages: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return advantages with mean 0 and deviation 1 over all rows of an iteration, on all ranks."""
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)
