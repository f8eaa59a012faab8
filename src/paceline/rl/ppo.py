"""Proximal policy optimization: the clipped loss, as a sum over rows and their number.

Source: Schulman et al. 2017, arXiv:1707.06347, equations 7 and 9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.recipe.rl_recipe import PPORecipe
from paceline.rl.policy import ActionDistribution
from paceline.task import Loss

if TYPE_CHECKING:
    from paceline.rl.rollouts import Rows

RowsLoss = Callable[[nn.Module, "Rows"], Loss]
NOT_EQUAL = "_not_equal"
"""Rows whose log-probability has other bits than the actor's; not reported as a metric."""


def ppo_loss(settings: PPORecipe, actions: ActionDistribution) -> RowsLoss:
    """Return the loss of PPO.

    Args:
        settings: the table `[rl.ppo]`.
        actions: the distribution of the environment's actions.
    """

    def loss(model: nn.Module, rows: Rows) -> Loss:
        output, value = model(rows.observation)
        log_prob = actions.log_prob(output, rows.action)
        log_ratio = log_prob - rows.log_prob
        ratio, low, high = log_ratio.exp(), 1 - settings.clip, 1 + settings.clip
        gain = torch.minimum(ratio * rows.advantage, ratio.clamp(low, high) * rows.advantage)
        squared_error = (value - rows.target).square()
        total = (settings.value * squared_error - gain).sum()
        entropy = actions.entropy(output).sum()
        if settings.entropy:
            total = total - settings.entropy * entropy
        with torch.no_grad():
            metrics = {
                "policy_loss": -gain.sum(),
                "value_loss": squared_error.sum(),
                "entropy": entropy.detach(),
                "kl": (ratio - 1 - log_ratio).sum(),
                "clipped": ((ratio < low) | (ratio > high)).sum(),
                NOT_EQUAL: (log_prob != rows.log_prob).sum(),
            }
        return Loss(total, len(value), metrics)

    return loss
