"""Adam that is replaced by SGD with momentum at an update, or when evaluations no longer improve.

The switch hands over the momentum and, for each tensor, a rate at which SGD moves it as far as Adam did, so
the loss goes on without a jump. Norms are those of whole tensors, whatever ranks hold them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.optim.slot_norms import SlotOptimizer, slot_norms

_SWITCH_IS_DUE, _IS_SGD = "switch_is_due", "is_sgd"


class AdamToSGD(SlotOptimizer):
    """Adam for the first updates, SGD with momentum for the rest.

    At the switch, with m the first moment and p = m_hat / (sqrt(v_hat) + eps) the direction of the last
    update of Adam, the momentum of SGD becomes b = m / (1 - beta1), which it would be had SGD seen the same
    gradients, and the rate of a tensor is lr r with r = p'p / p'b: the projection of the step of SGD onto
    that of Adam has the length of the latter. Afterwards b = beta1 b + g and w -= lr r b, and a schedule
    goes on to set lr. A tensor that has had no gradient before the switch is updated by Adam.

    Args:
        params: parameters, or groups of them; real or complex.
        lr: of Adam.
        betas: decay of both moments; the first is the momentum of SGD.
        eps: added to the denominator.
        weight_decay: times the parameter, added to the gradient.
        switch_update: number of updates of Adam, 1 or more; None: until the first fall of
            schedule.decay = "plateau", or `switch_at_next_update`.
    Wire: in the update of the switch one all_reduce of 16 S n bytes, for n tensors in parts on S ranks.
    Exactness: as `slot_norms`; tests/contract/test_optimizers.py.
    Source: Keskar & Socher 2017, Improving Generalization Performance by Switching from Adam to SGD,
        arXiv:1712.07628, section 3 and Algorithm 1, with two changes. The step is projected onto the first
        moment, the direction in which SGD with momentum goes on, and not onto the gradient; therefore r is
        positive and needs no average over updates. And the momentum is kept, which starts at 0 there.
    """

    is_ordered: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        switch_update: int | None = None,
    ) -> None:
        if switch_update is not None and switch_update < 1:
            raise _early_switch_error()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "updates": 0}
        super().__init__(params, {**defaults, _SWITCH_IS_DUE: False, _IS_SGD: False})
        self.switch_update = switch_update

    def on_build(self, session: Any) -> None:
        """Switch at the first fall of the rate on a plateau, unless the update is fixed."""
        if self.switch_update is None and session.plateau is not None:
            session.plateau.on_fall.append(self.switch_at_next_update)

    def switch_at_next_update(self) -> None:
        """Make the next update, and all that follow, one of SGD; on every rank. Later calls do nothing.

        Raises:
            TaskError: at the next update, if there has been none.
        """
        for options in self.param_groups:
            options[_SWITCH_IS_DUE] = True

    def update_tensors(self) -> None:
        """Update every parameter that has a gradient; in the switch collective over the ranks that hold its
        parts.
        """
        first = self.param_groups[0]
        if not first[_IS_SGD] and (first[_SWITCH_IS_DUE] or first["updates"] == self.switch_update):
            self._switch()
        for options in self.param_groups:
            options["updates"] += 1
            for p in options["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, options)

    def _update(self, p: Tensor, grad: Tensor, options: dict[str, Any]) -> None:
        if options["weight_decay"]:
            grad = grad.add(p, alpha=options["weight_decay"])
        state, beta1 = self.state[p], options["betas"][0]
        if "momentum_buffer" in state:
            momentum = state["momentum_buffer"].mul_(beta1).add_(grad)
            p.sub_(momentum * state["rate"], alpha=options["lr"])
            return
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        beta2, grad = options["betas"][1], _as_real(grad)
        _as_real(state["exp_avg"]).mul_(beta1).add_(grad, alpha=1 - beta1)
        _as_real(state["exp_avg_sq"]).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        _as_real(p).sub_(_direction(state, options), alpha=options["lr"])

    def _switch(self) -> None:
        """Replace the moments of every tensor by its momentum and rate; collective."""
        if not self.param_groups[0]["updates"]:
            raise _early_switch_error()
        group = self.slot_group
        moved: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        for options in self.param_groups:
            options[_IS_SGD] = True
            for p in options["params"]:
                if state := self.state[p]:
                    momentum = _as_real(state["exp_avg"]) / (1 - options["betas"][0])
                    moved.append((p, _direction(state, options), momentum))
        # Both have equal signs, so the root of their product has their inner product as its square.
        lengths, products = slot_norms(
            [
                {group.slots[p]: direction for p, direction, _ in moved},
                {group.slots[p]: (direction * momentum).sqrt_() for p, direction, momentum in moved},
            ],
            group,
        )
        for p, _, momentum in moved:
            length, product = lengths[group.slots[p]], products[group.slots[p]]
            rate = torch.where(product > 0, (length / product).square(), 1.0)
            buffer = torch.view_as_complex(momentum) if p.is_complex() else momentum
            self.state[p] = {"momentum_buffer": buffer, "rate": rate}


def _direction(state: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Return the update of Adam at rate 1, of complex tensors as pairs of real values."""
    (beta1, beta2), t = options["betas"], float(state["step"])
    denominator = (_as_real(state["exp_avg_sq"]) / (1 - beta2**t)).sqrt_().add_(options["eps"])
    return (_as_real(state["exp_avg"]) / (1 - beta1**t)).div_(denominator)


def _as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _early_switch_error() -> TaskError:
    return TaskError(
        "Adam is to become SGD before its first update, and so has no momentum and no step to hand over",
        next_step="switch after an update or more: optimizer.switch_update >= 1",
    )
