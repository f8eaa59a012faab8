"""Adafactor under every layout: row and column means over whole tensors, of which each rank adds its part.

The factors of a tensor are small, so every rank that holds a part of it keeps them whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.errors import TaskError
from paceline.optim.slot_norms import SlotGroup, SlotOptimizer, slot_norms
from paceline.state.slot import TensorSlot


class Adafactor(SlotOptimizer, torch.optim.Adafactor):
    """`torch.optim.Adafactor`, also over parts of tensors.

    Wire: in an update, one all_reduce of S times the values of all factors and one of `slot_norms`, for S
        ranks; none where tensors are whole, and there the arithmetic is PyTorch's.
    Exactness: sums of squares in float64, in another order than PyTorch's; tests/parity/test_layer_norms.py.
    Source: Shazeer & Stern 2018, Adafactor, arXiv:1804.04235, Algorithms 4 and 5, with PyTorch's use of eps.
    """

    whole_moments: ClassVar[frozenset[str]] = frozenset({"row_var", "col_var"})

    def update_tensors(self) -> None:
        """Update every parameter that has a gradient; collective over the ranks that hold its parts.

        Raises:
            TaskError: a parameter is complex.
        """
        group = self.slot_group
        parameters = [p for options in self.param_groups for p in options["params"]]
        if any(p.is_complex() for p in parameters):
            raise TaskError(
                "Adafactor got a complex parameter, and its factors are those of real squares",
                next_step="give its real and imaginary parts as parameters, or choose another optimizer",
            )
        if group.size == 1:
            # The mean of no values is not defined, and there is nothing to update.
            for p in (p for p in parameters if not p.numel()):
                p.grad = None
            torch.optim.Adafactor.step(self)
            return
        parts = {
            group.slots[p]: (p, -p.grad if options["maximize"] else p.grad, options)
            for options in self.param_groups
            for p in options["params"]
            if p.grad is not None and 0 not in group.slots[p].shape
        }
        means = self._factor_means({slot: grad for slot, (_, grad, _) in parts.items()}, group)
        updates = {
            slot: self._direction(slot, p, grad, options, means) for slot, (p, grad, options) in parts.items()
        }
        weights, lengths = slot_norms([{slot: p for slot, (p, _, _) in parts.items()}, updates], group)
        for slot, (p, _, options) in parts.items():
            lr, numel = float(options["lr"]), prod(slot.shape)
            rate = min(lr, 1 / float(self.state[p]["step"]) ** 0.5)
            rate *= max(options["eps"][1], float(weights[slot]) / numel**0.5)
            excess = max(1.0, float(lengths[slot]) / (numel**0.5 * options["d"]))
            if options["weight_decay"]:
                p.mul_(1 - lr * options["weight_decay"])
            p.add_(updates[slot], alpha=-rate / excess)

    def _factor_means(
        self, grads: Mapping[TensorSlot, Tensor], group: SlotGroup
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the means of the squares of whole rows and columns by name, float64; collective."""
        shapes = {
            slot.name: ((*slot.shape[:-1], 1), (*slot.shape[:-2], 1, slot.shape[-1]))
            for slot, _ in self.owned_tensors(group)
            if len(slot.shape) > 1 and 0 not in slot.shape
        }
        sizes = [prod(shape) for pair in shapes.values() for shape in pair]
        device = next((grad.device for grad in grads.values()), torch.device("cpu"))
        flat = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        local = _factor_views(flat, sizes, shapes)
        for slot, grad in grads.items():
            if slot.name in group.counted and grad.dim() > 1:
                rows, columns = local[slot.name]
                rows[(*slot.index[:-1], slice(None))] = _squares(grad, -1)
                columns[(*slot.index[:-2], slice(None), slot.index[-1])] = _squares(grad, -2)
        sums = _factor_views(group.sum(flat), sizes, shapes)
        return {
            slot.name: (sums[slot.name][0] / slot.shape[-1], sums[slot.name][1] / slot.shape[-2])
            for slot in grads
            if slot.name in shapes
        }

    def _direction(
        self,
        slot: TensorSlot,
        p: Tensor,
        grad: Tensor,
        options: dict[str, Any],
        means: Mapping[str, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Count a gradient in the factors; return the part of the update before clip and rate."""
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.get_default_dtype())
            if grad.dim() > 1:
                row, column = means[slot.name]
                state["row_var"], state["col_var"] = grad.new_zeros(row.shape), grad.new_zeros(column.shape)
            else:
                state["variance"] = torch.zeros_like(grad)
        state["step"] += 1
        new_share = float(state["step"]) ** options["beta2_decay"]
        eps = torch.finfo(p.dtype).eps if options["eps"][0] is None else options["eps"][0]
        if grad.dim() > 1:
            row, column = (
                state[key].lerp_(mean.to(p.dtype), new_share)
                for key, mean in zip(("row_var", "col_var"), means[slot.name], strict=True)
            )
            outer = tuple(slot.index[:-2])
            own_rows = row[(*slot.index[:-1], slice(None))]
            own_columns = column[(*outer, slice(None), slot.index[-1])]
            variance = own_rows @ own_columns
            variance.div_(row.mean(dim=-2, keepdim=True).clamp_(min=eps)[outer])
        else:
            variance = state["variance"].lerp_(grad * grad, new_share).clone()
        return variance.clamp_(min=eps * eps).rsqrt_().mul_(grad)


def _factor_views(
    flat: Tensor, sizes: list[int], shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the row and the column factor of each tensor, views of one buffer."""
    views = iter(flat.split(sizes))
    return {name: (next(views).view(row), next(views).view(column)) for name, (row, column) in shapes.items()}


def _squares(grad: Tensor, dim: int) -> Tensor:
    return torch.linalg.vector_norm(grad, dim=dim, keepdim=True, dtype=torch.float64).square()
