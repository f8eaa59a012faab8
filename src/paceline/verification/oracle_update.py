"""How far the result of an update moves when its inputs do, measured with the oracle's own optimizer.

How far the rounding of a micro-batch's own arithmetic moves a gradient, measured.

Where both sides run other kernels on a term (a matrix product that is cut among ranks, statistics over all
ranks), a gradient that is zero but for rounding has no digit in common on the two sides, and its own size
says nothing about its error. So the oracle computes it again, with every parameter moved by one rounding in a
direction that is drawn: what changes is what rounding leaves undecided.
Source: Vignes 2004, Discrete Stochastic Arithmetic for Validating Results of Numerical Software (the CESTAC
method).

What the oracle computes in an update of a strategy, from the bits that the strategy starts from.
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
from paceline.verification.oracle import Oracle, StepTotals, Tensors, as_reals, moved


@dataclass(frozen=True)
class UpdateConditioning:
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
        options = [_group_options(group) for group in self.oracle.optimizer.param_groups]
        nothing = self._after(update, 0.0, 0.0, options)
        delta = max([2.0**-12, *(8 * unit_roundoff(g) for g in self.gradients.values())])
        found = dict.fromkeys(nothing, 0.0)
        for of_state in (delta, -delta):
            vars(self.oracle.optimizer).update(copy.deepcopy(own))
            changed = self._after(update, delta, of_state, options)
            for name, value in nothing.items():
                change = as_reals(changed[name]).to(torch.float64) - as_reals(value).to(torch.float64)
                found[name] = max(found[name], largest_magnitude(change) / delta)
        self._start(0.0, options)
        vars(self.oracle.optimizer).update(own)
        return found

    def _after(
        self, update: int, gradient_change: float, of_state: float, options: list[dict[str, Any]]
    ) -> dict[str, Tensor]:
        self._start(of_state, options)
        for name, p in self.oracle.model.named_parameters():
            p.grad = self.gradients[name] * (1.0 + gradient_change) if name in self.gradients else None
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


def _group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


_DRAWS = 3


def measure_rounding_noise(
    oracle: Oracle, micro_batches: tuple[MicroBatch, ...], scale: float, sums: Tensors, roundoff: float
) -> dict[str, float]:
    """By name, the largest change of a summed gradient under other roundings.

    Args:
        oracle: in the state from which `sums` were made; afterwards again.
        scale: of the loss, see `Oracle.accumulate`.
        sums: of the gradients as they are.
        roundoff: of the arithmetic; coarser types of a parameter have their own.
    """
    found = dict.fromkeys(sums, 0.0)
    generator = torch.Generator().manual_seed(0)
    parameters = dict(oracle.model.named_parameters())
    kept = {name: p.detach().clone() for name, p in parameters.items()}
    for _ in range(_DRAWS):
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(_move_by_roundoff(kept[name], roundoff, generator))
        for name, g in oracle.accumulate(micro_batches, scale).gradients.items():
            if name in sums:
                found[name] = max(found[name], largest_magnitude(g - sums[name]))
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(kept[name])
    return found


def _move_by_roundoff(value: Tensor, roundoff: float, generator: torch.Generator) -> Tensor:
    """Each value moved by a unit roundoff, up or down."""
    draws = torch.randint(2, value.shape, generator=generator).to(value.device)
    return value * (1 + 2 * max(roundoff, unit_roundoff(value)) * (2 * draws - 1).to(value.real.dtype))


@dataclass
class ReferenceUpdate:
    """The oracle's view of one update, on rank 0.

    Args:
        before: the state that the update starts from.
        sums: of loss, count, gradients and buffers over all shards.
        norm: of the mean gradient, before the clip; from `finish` on.
        final: gradients as the optimizer got them; from `finish` on.
        noise: by name of a gradient, see `measure_rounding_noise`; nothing unless it is measured.
        moved: by name of a tensor, see `compare.state_bounds`; from `finish` on.
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
        """Where ranks compute a shard together; the oracle's state is that before the update.

        Args:
            scale: of the loss.
            roundoff: of the arithmetic.
            anew: what is asked beside the steps may be another sum; see `OwnLoopLoss`.
        """
        micro_batches = oracle.work.micro_batches(state.step)
        sums = oracle.accumulate(micro_batches, scale) if anew else self.sums
        self.noise = measure_rounding_noise(oracle, micro_batches, scale, sums.gradients, roundoff)

    def finish(self, oracle: Oracle, state: TrainState, sums: Mapping[str, Tensor], update: int) -> None:
        """Let the oracle divide, clip and update, with the gradients that rank 0 really had.

        Args:
            state: the oracle's.
            sums: those gradients, by parameter.
            update: its number, for the schedule.
        """
        oracle.set_buffers(moved(oracle.buffers(), self.sums.buffers))
        buffers = oracle.buffers()
        self.norm = oracle.set_gradients({name: g.clone() for name, g in sums.items()}, self.sums.count)
        self.final = {n: p.grad.clone() for n, p in oracle.model.named_parameters() if p.grad is not None}
        if not oracle.ordered:
            self.moved = UpdateConditioning(oracle, state, self.before, self.scalars, self.final).measure(
                update
            )
            self.moved |= {f"model/{n}": largest_magnitude(change) for n, change in self.sums.buffers.items()}
        oracle.set_buffers(buffers)
        for name, p in oracle.model.named_parameters():
            p.grad = self.final[name].clone() if name in self.final else None
        oracle.update(update)
        self.final = {n: p.grad for n, p in oracle.model.named_parameters() if p.grad is not None}


def loss_scale_of(session: Session, state: TrainState) -> float:
    """What losses are multiplied with before backward in a state."""
    return gradient_scale(session.work, state, max(1, session.task.num_tokens_per_sample))
