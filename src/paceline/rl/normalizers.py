"""Normalizers of observations and rewards: state of a run, merged in the order of the groups.

The moments are constant within an iteration, and are updated from all of its rows, group by group. So they do
not depend on the number of ranks. Evaluations use them and do not change them.

Invariant: actor and learner normalize an observation with the same moments and the same operations, so it has
the same bits for both. Returns that are reported are those of the environment.
Source: Chan et al. 1983, Algorithms for Computing the Sample Variance, The American Statistician 37(3);
Engstrom et al. 2020, Implementation Matters in Deep Policy Gradients, arXiv:2005.12729, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.recipe.rl_recipe import RLRecipe
from paceline.state.slot import SlotIndex, TensorPiece, TensorSlot

_LARGEST = 10.0  # normalized values are clipped to this
_SMALLEST_VARIANCE = 1e-8


class RunningMoments:
    """Count, mean and variance of all values so far.

    Args:
        shape: of a value.
    Attributes:
        count: of values.
        mean: float64 of that shape.
        squares: sum of squared distances from the mean, float64 of that shape.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count, self.mean, self.squares = 0, np.zeros(shape), np.zeros(shape)

    @property
    def deviation(self) -> NDArray[np.float64]:
        """Return the standard deviation; 1 before there are values."""
        if not self.count:
            return np.ones_like(self.mean)
        return np.sqrt(self.squares / self.count + _SMALLEST_VARIANCE)

    def merge(self, values: NDArray[Any]) -> None:
        """Add values, [N, ...]."""
        values = values.astype(np.float64)
        number, mean = len(values), values.mean(0)
        squares, distance = np.square(values - mean).sum(0), mean - self.mean
        total = self.count + number
        self.mean = self.mean + distance * number / total
        self.squares = self.squares + squares + np.square(distance) * self.count * number / total
        self.count = total


class Normalizers:
    """The normalizers of a run; those that the recipe does not name change nothing.

    Args:
        settings: the table `[rl]`.
        observation: shape of an observation.
    """

    def __init__(self, settings: RLRecipe, observation: tuple[int, ...]) -> None:
        self._names, self._gamma = settings.normalize, settings.gamma
        self._observations, self._returns = RunningMoments(observation), RunningMoments(())
        self._discounted = np.zeros(settings.envs)

    def observations(self, observations: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return observations, float32 [N, ...], with mean 0 and deviation 1."""
        if "observations" not in self._names:
            return observations
        mean = self._observations.mean.astype(np.float32)
        scale = (1 / self._observations.deviation).astype(np.float32)
        return np.clip((observations - mean) * scale, -_LARGEST, _LARGEST)

    def rewards(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return rewards, float64, divided by the deviation of discounted returns."""
        if "rewards" not in self._names:
            return rewards
        return np.clip(rewards / self._returns.deviation, -_LARGEST, _LARGEST)

    def follow_rewards(
        self, rewards: Sequence[NDArray[np.float64]], ended: Sequence[NDArray[np.bool_]]
    ) -> None:
        """Update with the rewards of an iteration, [T, G] by group; before its rewards are normalized."""
        if "rewards" not in self._names:
            return
        size = rewards[0].shape[1]
        for group, (reward, ends) in enumerate(zip(rewards, ended, strict=True)):
            present = self._discounted[group * size : (group + 1) * size]
            sums = np.zeros(reward.shape)
            for step in range(len(reward)):
                sums[step] = present[:] = self._gamma * present + reward[step]
                present[ends[step]] = 0.0
            self._returns.merge(sums.reshape(-1))

    def follow_observations(self, observations: Sequence[NDArray[np.float32]]) -> None:
        """Update with the observations of an iteration, [T, G, ...] by group; after they are normalized."""
        if "observations" in self._names:
            for values in observations:
                self._observations.merge(values.reshape(-1, *values.shape[2:]))

    def pieces(self) -> list[TensorPiece]:
        """Return the moments, which all ranks hold."""
        if not self._names:
            return []
        tensors = {"discounted": torch.from_numpy(self._discounted.copy())}
        for name, moments in (("observations", self._observations), ("returns", self._returns)):
            tensors[f"{name}/count"] = torch.tensor([moments.count])
            tensors[f"{name}/mean"] = torch.from_numpy(np.array(moments.mean))
            tensors[f"{name}/squares"] = torch.from_numpy(np.array(moments.squares))
        return [TensorPiece(TensorSlot.whole(name, value), value) for name, value in tensors.items()]

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        return dict.fromkeys(shapes, ())

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `pieces` returned; a state of weights alone has none of it."""
        if "discounted" not in tensors:
            return
        self._discounted = tensors["discounted"].numpy().copy()
        for name, moments in (("observations", self._observations), ("returns", self._returns)):
            moments.count = int(tensors[f"{name}/count"])
            moments.mean = tensors[f"{name}/mean"].numpy().copy()
            moments.squares = tensors[f"{name}/squares"].numpy().copy()
