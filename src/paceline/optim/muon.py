"""Muon under every layout: each matrix is orthogonalised whole, by one of the ranks that hold its parts.

Momentum is elementwise and stays where the parts are. The ranks gather the matrices, divide them by cost, and
gather the results, of which each applies its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import _muon

from paceline.errors import TaskError
from paceline.optim.slot_norms import SlotGroup, SlotOptimizer
from paceline.state.slot import TensorSlot


class Muon(SlotOptimizer, torch.optim.Muon):
    """`torch.optim.Muon`, also over parts of matrices, and in float64 for parameters of float64.

    Wire: two all_reduces of the bytes of all matrices in an update; none where matrices are whole.
    Exactness: bitwise that of one process from equal gradients; PyTorch orthogonalises in bfloat16, so a
        rounding of a gradient can become one of 0.4 % of the update. tests/parity/test_layer_norms.py.
    Source: Jordan et al. 2024, Muon, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, Muon is
        Scalable for LLM Training, arXiv:2502.16982, section 2.2 (each matrix is gathered, and updated by
        one rank).
    """

    is_ordered: ClassVar[bool] = True

    def update_tensors(self) -> None:
        """Update every matrix that has a gradient; collective over the ranks that hold its parts."""
        group = self.slot_group
        parts = {
            group.slots[p]: (p, self._momentum(p, options), options)
            for options in self.param_groups
            for p in options["params"]
            if p.grad is not None
        }
        updates = {slot: update for slot, (_, update, _) in parts.items()}
        orthogonal = self._orthogonalise_parts(updates, group)
        for slot, (p, _, options) in parts.items():
            lr = float(options["lr"])
            p.mul_(1 - lr * options["weight_decay"])
            rate = _muon._adjust_lr(lr, options["adjust_lr_fn"], torch.Size(slot.shape))
            p.add_(orthogonal[slot], alpha=-rate)

    def _momentum(self, p: Tensor, options: dict[str, Any]) -> Tensor:
        """Count a gradient in the momentum; return the update that is to be orthogonalised."""
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"].lerp_(p.grad, 1 - options["momentum"])
        return p.grad.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum

    def _orthogonalise_parts(
        self, updates: dict[TensorSlot, Tensor], group: SlotGroup
    ) -> dict[TensorSlot, Tensor]:
        if group.size == 1:
            indices = {slot.name: index for slot, index in self.owned_tensors(group)}
            return {
                slot: _orthogonalise(update, self.param_groups[indices[slot.name]])
                for slot, update in updates.items()
            }
        matrices = self.owned_tensors(group)
        slots = [slot for slot, _ in matrices]
        counted = [(slot, update) for slot, update in updates.items() if slot.name in group.counted]
        whole = group.gather(counted, slots)
        rank = 0 if group.group is None else group.group.rank
        owners = assign_by_cost([orthogonalisation_cost(slot.shape) for slot in slots], group.size)
        solved = [
            (slot, _orthogonalise(whole[slot.name], self.param_groups[index]))
            for (slot, index), owner in zip(matrices, owners, strict=True)
            if owner == rank
        ]
        results = group.gather(solved, slots)
        return {slot: results[slot.name][slot.index] for slot in updates}


def assign_by_cost(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return the rank of each piece of work: the costliest first, each to the rank with the least so far.

    Source: Graham 1969, Bounds on Multiprocessing Timing Anomalies (longest processing time first: at most
        4/3 of the best makespan).
    """
    totals, ranks = [0.0] * num_ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        ranks[index] = totals.index(min(totals))
        totals[ranks[index]] += costs[index]
    return ranks


def orthogonalisation_cost(shape: Sequence[int]) -> float:
    """Return the multiplications of an iteration, up to a factor: those of products of a matrix with its
    transpose.
    """
    return float(shape[0] * shape[1] * min(shape))


def _orthogonalise(update: Tensor, options: dict[str, Any]) -> Tensor:
    """Return the nearest semi-orthogonal matrix, approximately, of a whole matrix."""
    coefficients, steps, eps = options["ns_coefficients"], options["ns_steps"], options["eps"]
    if not update.numel():
        return update
    if update.is_complex():
        raise TaskError(
            "Muon got a complex matrix, and PyTorch's iteration drops imaginary parts",
            next_step="give it to another optimizer by ByGroup",
        )
    if update.dtype != torch.float64:
        return _muon._zeropower_via_newtonschulz(update, coefficients, steps, eps)
    a, b, c = coefficients
    x = update.T if update.shape[0] > update.shape[1] else update
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if update.shape[0] > update.shape[1] else x
