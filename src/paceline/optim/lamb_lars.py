"""LAMB and LARS: updates of each tensor scaled by the ratio of two norms of the whole tensor.

The norms come from `slot_norms`, so a tensor that several ranks hold in parts is scaled as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.optim.slot_norms import SlotOptimizer, slot_norms


class Lamb(SlotOptimizer):
    """LAMB: Adam whose update of a tensor gets the length of the tensor itself, times the rate.

    With m and v the bias-corrected moments of Adam, u = m / (sqrt(v) + eps) + weight_decay w, and
    w -= lr ||w|| / ||u|| u. The ratio is 1 where either norm is 0, and in groups with adapt=False.

    Args:
        params: parameters, or groups of them; real or complex. A group may have adapt=False.
        lr: share of its own norm by which a tensor changes in an update.
        betas: decay of both moments.
        eps: added to the denominator.
        weight_decay: times the parameter, added to the update before its norm is taken.
        adapt: scale by the ratio of norms.
    Wire: one all_reduce of 16 S n bytes in an update, for n tensors in parts on S ranks.
    Exactness: that of `slot_norms`; tests/parity/test_layer_norms.py.
    Source: You et al. 2019, Large Batch Optimization for Deep Learning, arXiv:1904.00962, Algorithm 2, with
        the identity as phi.
    """

    is_ordered: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt}
        super().__init__(params, defaults)

    def update_tensors(self) -> None:
        """Update every parameter that has a gradient; collective over the ranks that hold its parts."""
        group, pending = self.slot_group, []
        for options in self.param_groups:
            for p in options["params"]:
                if p.grad is not None:
                    pending.append((p, self._direction(p, p.grad, options), options))
        adapted = [(group.slots[p], p, u) for p, u, options in pending if options["adapt"]]
        weights, updates = slot_norms(
            [{slot: p for slot, p, _ in adapted}, {slot: u for slot, _, u in adapted}], group
        )
        for p, update, options in pending:
            slot, lr = group.slots[p], options["lr"]
            if options["adapt"]:
                w, u = weights[slot], updates[slot]
                update.mul_(torch.where((w > 0) & (u > 0), w / u, 1.0))
            p.sub_(update, alpha=lr)

    def _direction(self, p: Tensor, grad: Tensor, options: dict[str, Any]) -> Tensor:
        """Count a gradient in the moments; return the update of Adam, with decay and without a rate."""
        state, (beta1, beta2) = self.state[p], options["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        t = float(state["step"])
        first, second = _as_real(state["exp_avg"]), _as_real(state["exp_avg_sq"])
        grad = _as_real(grad)
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (second / (1 - beta2**t)).sqrt_().add_(options["eps"])
        update = (first / (1 - beta1**t)).div_(denominator)
        if options["weight_decay"]:
            update.add_(_as_real(p), alpha=options["weight_decay"])
        return torch.view_as_complex(update) if p.is_complex() else update


class Lars(SlotOptimizer):
    """LARS: SGD with momentum and a rate for each tensor, from the norms of the tensor and its gradient.

    With g the gradient, v = momentum v + lr r (g + weight_decay w) and w -= v, where
    r = trust_coefficient ||w|| / (||g|| + weight_decay ||w||). The ratio r is 1 where either norm is 0, and
    in groups with adapt=False.

    Args:
        params: parameters, or groups of them; real or complex. A group may have adapt=False.
        lr: global rate.
        momentum: share of the last update that is kept.
        weight_decay: times the parameter, added to the gradient.
        trust_coefficient: share of its norm by which a tensor changes at rate 1.
        adapt: scale by the ratio of norms.
    Wire, exactness: as `Lamb`.
    Source: You, Gitman & Ginsburg 2017, Large Batch Training of Convolutional Networks, arXiv:1708.03888,
        Algorithm 1.
    """

    is_ordered: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        adapt: bool = True,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adapt": adapt}
        super().__init__(params, {**defaults, "trust_coefficient": trust_coefficient})

    def update_tensors(self) -> None:
        """Update every parameter that has a gradient; collective over the ranks that hold its parts."""
        group = self.slot_group
        pending = [(p, options) for options in self.param_groups for p in options["params"]]
        pending = [(p, options) for p, options in pending if p.grad is not None]
        adapted = [(group.slots[p], p) for p, options in pending if options["adapt"]]
        weights, grads = slot_norms([dict(adapted), {slot: p.grad for slot, p in adapted}], group)
        for p, options in pending:
            slot, decay, update = group.slots[p], options["weight_decay"], p.grad
            if decay:
                update = update.add(p, alpha=decay)
            if options["adapt"]:
                w, g = weights[slot], grads[slot]
                ratio = options["trust_coefficient"] * w / (g + decay * w)
                update = update * torch.where((w > 0) & (g > 0), ratio, 1.0)
            if options["momentum"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                # The rate is within the momentum, so that it belongs to the update in which it was set.
                p.sub_(state["momentum_buffer"].mul_(options["momentum"]).add_(update, alpha=options["lr"]))
            else:
                p.sub_(update, alpha=options["lr"])


def _as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x
