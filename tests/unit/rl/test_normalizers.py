"""Normalizers: the moments of all values, in the order of groups, and constant where they are evaluated."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.recipe.rl_recipe import RLRecipe
from paceline.rl.normalizers import Normalizers, RunningMoments


def test_merged_moments_are_those_of_all_values() -> None:
    draws = np.random.default_rng(0)
    parts = [draws.normal(3.0, 2.0, (number, 2)).astype(np.float32) for number in (5, 1, 40)]
    moments = RunningMoments((2,))
    for part in parts:
        moments.merge(part)
    everything = np.concatenate(parts).astype(np.float64)
    assert moments.count == 46
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.deviation, everything.std(0), rtol=1e-6)


def test_rewards_are_divided_by_the_deviation_of_discounted_returns_that_end_with_episodes() -> None:
    """Two groups of one environment; by hand, with a discount of one half."""
    settings = RLRecipe(
        envs=2, shards=2, total_steps=128, normalize=("rewards",), ppo={"gamma": 0.5, "minibatches": 1}
    )
    normalizers = Normalizers(settings, (1,))
    rewards = [np.array([[1.0], [1.0], [1.0]]), np.array([[2.0], [0.0], [4.0]])]
    ended = [np.array([[False], [True], [False]]), np.zeros((3, 1), dtype=bool)]
    assert normalizers.rewards(rewards[0]) is not rewards[0]  # before any: divided by 1
    np.testing.assert_array_equal(normalizers.rewards(rewards[0]), rewards[0])
    normalizers.follow_rewards(rewards, ended)
    returns = [1.0, 1.5, 1.0, 2.0, 1.0, 4.5]  # the second one ended an episode
    np.testing.assert_allclose(normalizers.rewards(rewards[1]), rewards[1] / np.std(returns), rtol=1e-6)
    # The next iteration continues where the open episodes stand.
    normalizers.follow_rewards([x[:1] for x in rewards], [x[:1] for x in ended])
    np.testing.assert_allclose(normalizers._returns.mean, np.mean([*returns, 1.5, 4.25]), rtol=1e-12)


def test_what_the_recipe_does_not_name_is_unchanged_and_no_state() -> None:
    normalizers = Normalizers(RLRecipe(), (3,))
    values = np.ones((2, 3), dtype=np.float32)
    normalizers.follow_observations([values[None]])
    normalizers.follow_rewards([np.ones((1, 2))], [np.zeros((1, 2), dtype=bool)])
    assert normalizers.observations(values) is values and normalizers.pieces() == []


def test_large_values_are_clipped_and_state_is_loaded_with_the_same_bits() -> None:
    settings = RLRecipe(total_steps=2048, normalize=("observations", "rewards"))
    normalizers, again = Normalizers(settings, (1,)), Normalizers(settings, (1,))
    draws = np.random.default_rng(1)
    values = draws.normal(size=(4, 32, 1)).astype(np.float32)
    normalizers.follow_observations([values])
    assert normalizers.observations(np.array([[1e6]], dtype=np.float32)) == pytest.approx(10.0)
    again.load({piece.slot.name: piece.tensor for piece in normalizers.pieces()})
    np.testing.assert_array_equal(again.observations(values[0]), normalizers.observations(values[0]))
