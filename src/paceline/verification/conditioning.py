"""How far the result of an update moves when its inputs do, measured with the oracle's own optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.state import TrainState
from paceline.verification.compare import largest, unit_of
from paceline.verification.oracle import Oracle
from paceline.verification.plain_buffers import Tensors
from paceline.verification.plain_norm import reals


@dataclass(frozen=True)
class Conditioning:
    """One update of the oracle, to be made several times from the same state.

    Args:
        state: the oracle's; after `measure` it is as `before` and `scalars` say.
        gradients: as the optimizer gets them, by name.
    """

    oracle: Oracle
    state: TrainState
    before: Mapping[str, Tensor]
    scalars: Mapping[str, Any]
    gradients: Tensors

    def measure(self, update: int) -> dict[str, float]:
        """By name of a tensor of the state: its largest change, over the relative change of the inputs."""
        own = _own_attributes(self.oracle.optimizer)
        options = [_options(group) for group in self.oracle.optimizer.param_groups]
        nothing = self._after(update, 0.0, 0.0, options)
        delta = max([2.0**-12, *(8 * unit_of(g) for g in self.gradients.values())])
        found = dict.fromkeys(nothing, 0.0)
        for of_state in (delta, -delta):
            vars(self.oracle.optimizer).update(copy.deepcopy(own))
            changed = self._after(update, delta, of_state, options)
            for name, value in nothing.items():
                change = reals(changed[name]).to(torch.float64) - reals(value).to(torch.float64)
                found[name] = max(found[name], largest(change) / delta)
        self._start(0.0, options)
        vars(self.oracle.optimizer).update(own)
        return found

    def _after(
        self, update: int, of_gradient: float, of_state: float, options: list[dict[str, Any]]
    ) -> dict[str, Tensor]:
        self._start(of_state, options)
        for name, p in self.oracle.model.named_parameters():
            p.grad = self.gradients[name] * (1.0 + of_gradient) if name in self.gradients else None
        self.oracle.update(update)
        return {name: t.detach().clone() for name, t in self.state.tensors().items()}

    def _start(self, of_state: float, options: list[dict[str, Any]]) -> None:
        tensors = {
            name: t * (1.0 + of_state) if _is_moment(name, t) else t for name, t in self.before.items()
        }
        self.state.load(tensors, self.scalars)
        for group, first in zip(self.oracle.optimizer.param_groups, options, strict=True):
            group.update(copy.deepcopy(first))


def _is_moment(name: str, t: Tensor) -> bool:
    """Whether it is made of gradients: not a parameter, and not a counter."""
    inexact = t.dtype.is_floating_point or t.dtype.is_complex
    return name.startswith("optimizer/") and inexact and not name.endswith("/step")


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps beside its state and groups: a generator, a counter."""
    known = ("state", "param_groups", "defaults")
    found = {name: value for name, value in vars(optimizer).items() if name not in known}
    return copy.deepcopy({name: value for name, value in found.items() if not name.startswith("_")})


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})
