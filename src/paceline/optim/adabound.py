"""AdaBound: Adam that becomes SGD with momentum, gradually for each value.

Every value has a rate of its own, as in Adam; bounds on that rate narrow from (0, inf) to `final_lr`. The
first moment of Adam becomes the momentum of SGD, so no state has to be converted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor


class AdaBound(torch.optim.Optimizer):
    """Adam with rates that are clipped to narrowing bounds.

    Args:
        params: parameters, or groups of them.
        lr: of Adam; a schedule that changes it changes `final_lr` with it.
        betas: decay of both moments.
        eps: added to the denominator.
        weight_decay: times the parameter, added to the gradient.
        final_lr: rate of the SGD that it becomes, of a gradient whose moment has settled.
        gamma: how fast bounds close: after t updates final_lr (1 - 1 / (gamma t + 1)) and
            final_lr (1 + 1 / (gamma t)).
    Exactness: elementwise, so tensors may be cut anywhere.
    Source: Luo et al. 2019, Adaptive Gradient Methods with Dynamic Bound of Learning Rate, arXiv:1902.09843,
        Algorithm 2, with the bounds of its authors' code.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        final_lr: float = 0.1,
        gamma: float = 1e-3,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "final_lr": final_lr, "gamma": gamma, "base_lr": lr})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        tensors = [p, grad, state["exp_avg"], state["exp_avg_sq"]]
        # A complex value is two real ones, each with a rate of its own.
        values, grad, first, second = (torch.view_as_real(x) for x in tensors) if p.is_complex() else tensors
        if group["weight_decay"]:
            grad = grad.add(values, alpha=group["weight_decay"])
        t = float(state["step"])
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        low, high = rate_bounds(group, t)
        rate = group["lr"] * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        values.sub_((rate / second.sqrt().add_(group["eps"])).clamp_(low, high).mul_(first))


def rate_bounds(group: dict[str, Any], t: float) -> tuple[float, float]:
    """Return the lowest and highest rate of a value in update t, counted from 1."""
    # The schedule changes `lr`, and the final rate follows it by the same ratio.
    final = group["final_lr"] * group["lr"] / group["base_lr"] if group["base_lr"] else 0.0
    return final * (1 - 1 / (group["gamma"] * t + 1)), final * (1 + 1 / (group["gamma"] * t))
