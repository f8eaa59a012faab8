"""One update of the oracle from the state of the strategy, and how sensitive it is to rounding.

Conditioning: the oracle repeats the update with slightly changed inputs, so the bound of its result follows
from the user's own optimizer.

Rounding noise: if the two sides run different kernels on a term (a matrix product that ranks share,
statistics over all ranks), a gradient that is zero except for rounding has no digit in common on both sides,
and its size says nothing about its error. The oracle computes such gradients again with every parameter
changed by one rounding in a random direction: what differs is what rounding leaves undecided.
Source: Vignes 2004, Discrete Stochastic Arithmetic for Validating Results of Numerical Software (the CESTAC
method).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.data.work import MicroBatch
from paceline.session.session import Session
from paceline.state.train_state import TrainState
from paceline.sync.every_step import gradient_scale
from paceline.verification.error_bounds import largest_magnitude, unit_roundoff
from paceline.verification.oracle import (
    Oracle,
    StepTotals,
    Tensors,
    as_reals,
    copy_optimizer_attributes,
)


@dataclass(frozen=True)
class UpdateConditioning:
    """An update of the oracle that can be repeated from the same state.

    Args:
        state: state of the oracle; `measure` leaves it as `before` and `scalars` describe.
        before, scalars: tensors and numbers of the state at the beginning of the update.
        gradients: gradients after division and clipping, by name.
    """

    oracle: Oracle
    state: TrainState
    before: Mapping[str, Tensor]
    scalars: Mapping[str, Any]
    gradients: Tensors

    def measure(self, update: int) -> dict[str, float]:
        """Return the largest change of each tensor of the state, per relative change of the inputs."""
        attributes = copy_optimizer_attributes(self.oracle.optimizer, "state", "param_groups", "defaults")
        options = [_group_options(group) for group in self.oracle.optimizer.param_groups]
        unchanged = self._after(update, 0.0, 0.0, options)
        # Large enough that the change is not lost in the rounding of the gradients.
        delta = max([2.0**-12, *(8 * unit_roundoff(g) for g in self.gradients.values())])
        sensitivities = dict.fromkeys(unchanged, 0.0)
        # In both directions, since one of them can cancel in a moment of the optimizer.
        for state_change in (delta, -delta):
            vars(self.oracle.optimizer).update(copy.deepcopy(attributes))
            changed = self._after(update, delta, state_change, options)
            for name, value in unchanged.items():
                change = as_reals(changed[name]).to(torch.float64) - as_reals(value).to(torch.float64)
                sensitivities[name] = max(sensitivities[name], largest_magnitude(change) / delta)
        self._start(0.0, options)
        vars(self.oracle.optimizer).update(attributes)
        return sensitivities

    def _after(
        self, update: int, gradient_change: float, state_change: float, options: list[dict[str, Any]]
    ) -> dict[str, Tensor]:
        self._start(state_change, options)
        for name, p in self.oracle.model.named_parameters():
            p.grad = self.gradients[name] * (1.0 + gradient_change) if name in self.gradients else None
        self.oracle.update(update)
        return {name: t.detach().clone() for name, t in self.state.tensors().items()}

    def _start(self, state_change: float, options: list[dict[str, Any]]) -> None:
        tensors = {
            name: t * (1.0 + state_change) if _is_moment(name, t) else t for name, t in self.before.items()
        }
        self.state.load(tensors, self.scalars)
        for group, first in zip(self.oracle.optimizer.param_groups, options, strict=True):
            group.update(copy.deepcopy(first))


def _is_moment(name: str, t: Tensor) -> bool:
    """Return whether a tensor of the state is computed from gradients: no parameter and no counter."""
    inexact = t.dtype.is_floating_point or t.dtype.is_complex
    return name.startswith("optimizer/") and inexact and not name.endswith("/step")


def _group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


_DRAWS = 3


def measure_rounding_noise(
    oracle: Oracle, micro_batches: tuple[MicroBatch, ...], scale: float, sums: Tensors, roundoff: float
) -> dict[str, float]:
    """Return the largest change of each summed gradient under other roundings, by name.

    Args:
        oracle: in the state from which `sums` were computed; restored afterwards.
        scale: factor of the loss in backward.
        sums: summed gradients without other roundings.
        roundoff: unit roundoff of the arithmetic; parameters of a coarser dtype have their own.
    """
    noise = dict.fromkeys(sums, 0.0)
    generator = torch.Generator().manual_seed(0)
    parameters = dict(oracle.model.named_parameters())
    originals = {name: p.detach().clone() for name, p in parameters.items()}
    for _ in range(_DRAWS):
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(_move_by_roundoff(originals[name], roundoff, generator))
        for name, g in oracle.accumulate(micro_batches, scale).gradients.items():
            if name in sums:
                noise[name] = max(noise[name], largest_magnitude(g - sums[name]))
    with torch.no_grad():
        for name, p in parameters.items():
            # Copied back, not changed back: a second multiplication would round again.
            p.copy_(originals[name])
    return noise


def _move_by_roundoff(value: Tensor, roundoff: float, generator: torch.Generator) -> Tensor:
    """Return the values, each changed by two unit roundoffs up or down."""
    draws = torch.randint(2, value.shape, generator=generator).to(value.device)
    return value * (1 + 2 * max(roundoff, unit_roundoff(value)) * (2 * draws - 1).to(value.real.dtype))


@dataclass
class ReferenceUpdate:
    """The oracle's results of one update, on rank 0.

    Args:
        before, scalars: tensors and numbers of the state at the beginning of the update.
        sums: sums of loss, count, gradients and buffers over all shards.
        norm: norm of the mean gradient before the clip; set by `finish`.
        final: gradients after division and clipping; set by `finish`.
        moved: change of each tensor per relative error of the gradients, by name; set by `finish`.
        noise: rounding noise of each gradient; empty unless it was measured.
    """

    before: Mapping[str, Tensor]
    scalars: Mapping[str, Any]
    sums: StepTotals
    norm: float = 0.0
    final: Tensors = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)

    def measure_noise(
        self, oracle: Oracle, state: TrainState, scale: float, roundoff: float, *, anew: bool
    ) -> None:
        """Measure rounding noise, for ranks that compute a shard together.

        Args:
            oracle, state: in the state before the update.
            scale: factor of the loss in backward.
            roundoff: unit roundoff of the arithmetic.
            anew: compute the sums again, since an own loop that starts anew can return other losses.
        """
        micro_batches = oracle.work.micro_batches(state.step)
        sums = oracle.accumulate(micro_batches, scale) if anew else self.sums
        self.noise = measure_rounding_noise(oracle, micro_batches, scale, sums.gradients, roundoff)

    def finish(self, oracle: Oracle, state: TrainState, sums: Mapping[str, Tensor], update: int) -> None:
        """Divide, clip and update with the gradients that rank 0 really had, so that errors do not add up.

        Args:
            state: state of the oracle.
            sums: those gradients, by parameter.
            update: number of the update, for the schedule.
        """
        oracle.end_buffers(oracle.buffers(), self.sums.buffers)
        buffers = oracle.buffers()
        self.norm = oracle.set_gradients({name: g.clone() for name, g in sums.items()}, self.sums.count)
        self.final = {n: p.grad.clone() for n, p in oracle.model.named_parameters() if p.grad is not None}
        if not oracle.ordered:
            self.moved = UpdateConditioning(oracle, state, self.before, self.scalars, self.final).measure(
                update
            )
            self.moved |= {f"model/{n}": largest_magnitude(change) for n, change in self.sums.buffers.items()}
        # `measure` has loaded the buffers from before the update.
        oracle.set_buffers(buffers)
        for name, p in oracle.model.named_parameters():
            p.grad = self.final[name].clone() if name in self.final else None
        oracle.update(update)
        self.final = {n: p.grad for n, p in oracle.model.named_parameters() if p.grad is not None}


def loss_scale_of(session: Session, state: TrainState) -> float:
    """Return the factor of the loss in backward for a state."""
    return gradient_scale(session.work, state, max(1, session.task.num_tokens_per_sample))
