"""Policies: a module of policy and value, the distributions of actions, and keyed noise.

An action is the argmax of logits plus Gumbel noise, or a mean plus a deviation times normal noise. The noise
is a hash of (seed, environment, step), so an action depends on no stream of random numbers.

Invariant: actor and learner compute log-probabilities with the same function, row by row.
Source of the hash: Steele et al. 2014, Fast Splittable Pseudorandom Number Generators (SplitMix64).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import TaskError
from paceline.rl.environments import SpaceShapes
from paceline.state.keys import key

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_HALF_LOG_TAU = 0.9189385332046727  # log(2 pi) / 2
PolicyOutput = Any
"""Logits, float32 [N, A]; or (mean, deviation) of a box of actions, float32 [N, D] each."""


def keyed_uniforms(
    seed: int, purpose: str, environments: range, steps: range, width: int
) -> NDArray[np.float64]:
    """Return numbers in (0, 1) that are functions of (seed, purpose, environment, step), and of nothing else.

    Returns:
        float64 [len(steps), len(environments), width].
    """
    keys = np.array([key(seed, purpose, number) for number in environments], dtype=np.uint64)
    first, last = steps.start * width, steps.stop * width
    counters = np.arange(first, last, dtype=np.uint64).reshape(len(steps), 1, width)
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        words = keys[None, :, None] + (counters + np.uint64(1)) * _GOLDEN
        words = (words ^ (words >> np.uint64(30))) * _MIX[0]
        words = (words ^ (words >> np.uint64(27))) * _MIX[1]
        words ^= words >> np.uint64(31)
    return cast("NDArray[np.float64]", ((words >> np.uint64(11)) + 0.5) * 2.0**-53)


class ActionDistribution(Protocol):
    """How actions follow from the outputs of a policy.

    Attributes:
        num_uniforms: numbers in (0, 1) that an action takes.
    """

    num_uniforms: int

    def noise(self, uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the noise of actions, [T, N, ...], from uniform numbers [T, N, num_uniforms]."""

    def sample(self, output: PolicyOutput, noise: NDArray[np.float64] | None) -> NDArray[Any]:
        """Return an action for each row: int64 [N], or float32 [N, D]; the most likely one without noise."""

    def log_prob(self, output: PolicyOutput, action: Tensor) -> Tensor:
        """Return the logarithm of the probability of each row's action, float32 [N]."""

    def entropy(self, output: PolicyOutput) -> Tensor:
        """Return the entropy of each row, float32 [N]."""

    def join(self, outputs: list[PolicyOutput]) -> PolicyOutput:
        """Concatenate outputs along their rows."""


class Categorical:
    """The distribution of discrete actions, from logits.

    Args:
        num_actions: A.
    """

    def __init__(self, num_actions: int) -> None:
        self.num_uniforms = num_actions

    def noise(self, uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return Gumbel noise, [T, N, A]."""
        return -np.log(-np.log(uniforms))

    def sample(self, output: PolicyOutput, noise: NDArray[np.float64] | None) -> NDArray[Any]:
        logits = output.numpy()
        return (logits if noise is None else logits + noise).argmax(1)

    def log_prob(self, output: PolicyOutput, action: Tensor) -> Tensor:
        return F.log_softmax(output.float(), 1).gather(1, action[:, None]).squeeze(1)

    def entropy(self, output: PolicyOutput) -> Tensor:
        log_probs = F.log_softmax(output.float(), 1)
        return -(log_probs.exp() * log_probs).sum(1)

    def join(self, outputs: list[PolicyOutput]) -> PolicyOutput:
        return torch.cat(outputs)


class Gaussian:
    """The distribution of a box of actions: independent normal numbers, clipped when they are taken.

    Args:
        num_dimensions: D.
    """

    def __init__(self, num_dimensions: int) -> None:
        self.num_uniforms = 2 * num_dimensions

    def noise(self, uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return normal noise, [T, N, D], by the method of Box and Muller."""
        radius, angle = np.split(uniforms, 2, axis=2)
        return np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)

    def sample(self, output: PolicyOutput, noise: NDArray[np.float64] | None) -> NDArray[Any]:
        mean, deviation = (x.numpy() for x in output)
        return (mean if noise is None else mean + deviation * noise).astype(np.float32)

    def log_prob(self, output: PolicyOutput, action: Tensor) -> Tensor:
        mean, deviation = output
        distance = (action - mean) / deviation
        return (-0.5 * distance.square() - deviation.log() - _HALF_LOG_TAU).sum(1)

    def entropy(self, output: PolicyOutput) -> Tensor:
        return (output[1].log() + 0.5 + _HALF_LOG_TAU).sum(1)

    def join(self, outputs: list[PolicyOutput]) -> PolicyOutput:
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def distribution(spaces: SpaceShapes) -> ActionDistribution:
    """Return the distribution of the actions of an environment."""
    return Categorical(spaces.num_actions) if spaces.num_actions else Gaussian(len(spaces.low))


class ActorCritic(nn.Module):
    """A policy and a value of the same observation.

    Args:
        policy: returns logits [N, A], or (mean, deviation) [N, D]; without `value` a pair with the value.
        value: returns the value of each observation, [N] or [N, 1].
    """

    def __init__(self, policy: nn.Module, value: nn.Module | None = None) -> None:
        super().__init__()
        self.policy, self.value = policy, value

    def forward(self, observation: Tensor) -> tuple[PolicyOutput, Tensor]:
        """Return the output of the policy and the values [N] of observations [N, ...]."""
        output = self.policy(observation)
        if self.value is None:
            if not (isinstance(output, tuple) and len(output) == 2):
                raise TaskError(
                    "the policy returns no pair, and the task has no value module",
                    where="paceline.rl.Task(policy=...)",
                    next_step="return (logits, value) from the policy, or pass value=",
                )
            output, value = output
        else:
            value = self.value(observation)
        return output, value.reshape(len(observation))


class GaussianHead(nn.Module):
    """A mean that a network returns, with a learned deviation that does not depend on the observation.

    Args:
        mean: returns [N, D].
        num_dimensions: D.
    """

    def __init__(self, mean: nn.Module, num_dimensions: int) -> None:
        super().__init__()
        self.mean, self.log_deviation = mean, nn.Parameter(torch.zeros(num_dimensions))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation, [N, D] each."""
        mean = self.mean(observation)
        return mean, self.log_deviation.exp().expand_as(mean)


def tanh_network(num_inputs: int, hidden: tuple[int, ...], num_outputs: int, gain: float) -> nn.Sequential:
    """Return a network with tanh between its layers and orthogonal weights, flat over its inputs.

    Args:
        gain: of the last layer; the others have sqrt(2).
    """
    widths = (num_inputs, *hidden, num_outputs)
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        layer = nn.Linear(inputs, outputs)
        is_last = number == len(widths) - 2
        nn.init.orthogonal_(layer.weight, gain if is_last else 2**0.5)
        nn.init.zeros_(layer.bias)
        layers += [layer] if is_last else [layer, nn.Tanh()]
    return nn.Sequential(*layers)
