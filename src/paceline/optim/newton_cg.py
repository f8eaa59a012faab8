"""Newton-CG: steps along the solution of H d = -g, by conjugate gradients over Hessian-vector products.

An update passes over the samples of its step several times: once for each product and for each trial of the
line search. In a session the optimizer reads the micro-batches of this rank again; sums of losses and
products are sums over ranks. In a plain loop the loss is a closure.

Invariant: all ranks see equal sums, so they take the same decisions and end with equal parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from paceline.errors import NumericError, StrategyError, TaskError
from paceline.optim.compatibility import require_whole_passes
from paceline.optim.slot_norms import SlotOptimizer
from paceline.task import Loss

_DECREASE = 1e-4  # least decrease of the loss, as a share of that of its tangent
_MAX_HALVINGS = 30
_ROUNDING = 32  # roundings of a loss, below which two of them are equal


class NewtonCG(SlotOptimizer):
    """Newton's method with conjugate gradients and a line search.

    Conjugate gradients end when the residual is below min(1/2, sqrt(|g|)) |g|, after `max_cg_steps`, or at a
    direction of negative curvature; then the last iterate is taken, or -g if there is none. The step is
    halved, from `lr`, until the loss has fallen by 1e-4 of what its tangent promises.

    Args:
        params: parameters, or groups of them; real.
        lr: first trial of the step; 1 is Newton's.
        weight_decay: half of it times the squared parameters is added to the loss.
        damping: times the identity, added to the Hessian.
        max_cg_steps: most Hessian-vector products of an update.
    Raises:
        TaskError: a parameter is complex.
    Wire: one all_reduce of n values for each product, and one of two values for each trial of the step.
    Exactness: that of sums over ranks; tests/parity/test_newton_cg.py.
    Source: Nocedal & Wright 2006, Numerical Optimization, Algorithm 7.1; products: Pearlmutter 1994, Fast
        Exact Multiplication by the Hessian.
    """

    collects_in_backward: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        *,
        weight_decay: float = 0.0,
        damping: float = 0.0,
        max_cg_steps: int = 100,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.damping, self.max_cg_steps = damping, max_cg_steps
        self._losses: Callable[[], Iterable[Loss]] | None = None
        self._read_step: Callable[[], Callable[[], Iterable[Loss]]] | None = None
        self._sum: Callable[[Tensor], Tensor] = lambda x: x
        self._log: Callable[[str], None] = lambda text: None
        for options in self.param_groups:
            if any(p.is_complex() for p in options["params"]):
                raise TaskError(
                    "NewtonCG got a complex parameter, and its products are those of real ones",
                    next_step="give its real and imaginary parts as parameters, or choose another optimizer",
                )

    def on_build(self, session: Any) -> None:
        """Take the passes over the micro-batches of this rank, and the ranks that share a step.

        Raises:
            StrategyError: a rank does not run whole samples, or gradients are no means over the step.
        """
        require_whole_passes(session, type(self).__name__, allows_shards=False)
        batch = session.recipe.batch
        if batch.reduction != "mean" or batch.sync_batchnorm:
            key = "batch.sync_batchnorm" if batch.sync_batchnorm else f"batch.reduction = '{batch.reduction}'"
            raise StrategyError(
                f"NewtonCG compares losses that are means over the samples of a step, and not with {key}",
                next_step=f"leave out {key.split(' ', maxsplit=1)[0]}, or choose another optimizer",
            )
        net, group = session.net, session.mesh.data
        self._sum = lambda x: x if group.size == 1 else net.all_reduce(x, group).wait()
        self._log, self._read_step = session.session_base.context.warn, session.losses_of_step

    def begin_backward(self, scale: float, losses: Callable[[], Iterable[Loss]] | None = None) -> None:
        """Take the passes of a step that is not a session's."""
        self._losses = losses or self._losses

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make an update from `p.grad`.

        Args:
            closure: returns the loss with its graph, a mean over the samples, and computes no gradients;
                none in a session.
        Returns:
            The loss of the closure before the update.
        Raises:
            TaskError: there is neither a closure nor a session; or rates of groups differ.
            NumericError: a product is not finite.
        """
        if closure is None:
            self.update_tensors()
            return None
        closed: Callable[[], Any] = closure
        self._losses = lambda: [Loss(closed(), 1)]
        before = self._objective(self._moved())
        self.update_tensors()
        return before

    def _moved(self) -> list[tuple[nn.Parameter, dict[str, Any]]]:
        return [
            (p, options) for options in self.param_groups for p in options["params"] if p.grad is not None
        ]

    def update_tensors(self) -> None:
        """Update every parameter that has a gradient; collective."""
        moved, rates = self._moved(), {float(options["lr"]) for options in self.param_groups}
        if self._read_step is not None:
            self._losses = self._read_step()
        if self._losses is None:
            raise TaskError(
                "NewtonCG evaluates the loss in its step, and there is none",
                next_step="call step(closure), where closure() returns the loss, or train in a session",
            )
        if len(rates) > 1:
            raise TaskError(
                f"NewtonCG takes one step along one direction, and its groups have the rates {sorted(rates)}",
                next_step="give all groups the same lr",
            )
        gradient = _flat(
            [p.grad.add(p, alpha=options["weight_decay"]) for p, options in moved if p.grad is not None]
        )
        lr = rates.pop() if rates else 0.0
        if not lr or not gradient.numel() or not float(gradient.norm()):
            return
        direction = self._conjugate_gradients(gradient, moved)
        self._search(moved, gradient, direction, lr)

    def _conjugate_gradients(
        self, gradient: Tensor, moved: Sequence[tuple[nn.Parameter, dict[str, Any]]]
    ) -> Tensor:
        """Return a descent direction that solves H d = -g approximately; collective."""
        norm = float(gradient.norm())
        tolerance = min(0.5, math.sqrt(norm)) * norm
        solution, residual = torch.zeros_like(gradient), gradient.clone()
        direction, square = -residual, norm**2
        for iteration in range(self.max_cg_steps):
            product = self._product(direction, moved)
            curvature = float(direction @ product)
            if not math.isfinite(curvature):
                raise NumericError(
                    "a Hessian-vector product of NewtonCG is not finite",
                    next_step="lower optimizer.lr, raise optimizer.damping, or check the loss for values"
                    " without a second derivative",
                )
            if curvature <= 0:
                return solution if iteration else -gradient
            length = square / curvature
            solution += length * direction
            residual += length * product
            new_square = float(residual @ residual)
            if math.sqrt(new_square) <= tolerance:
                break
            direction = direction * (new_square / square) - residual
            square = new_square
        return solution

    def _product(self, vector: Tensor, moved: Sequence[tuple[nn.Parameter, dict[str, Any]]]) -> Tensor:
        """Return the product of the Hessian of the mean loss with a vector; collective."""
        parameters = [p for p, _ in moved]
        parts = [
            v.view(p.shape)
            for v, p in zip(vector.split([p.numel() for p in parameters]), parameters, strict=True)
        ]
        total, count = torch.zeros_like(vector), 0.0
        assert self._losses is not None
        with torch.enable_grad():
            for loss in self._losses():
                first = torch.autograd.grad(loss.total, parameters, create_graph=True, allow_unused=True)
                # A gradient that does not depend on the parameters has a derivative of 0.
                inner = [
                    (g * v).sum()
                    for g, v in zip(first, parts, strict=True)
                    if g is not None and g.requires_grad
                ]
                if inner:
                    second = torch.autograd.grad(
                        torch.stack(inner).sum(), parameters, allow_unused=True, materialize_grads=True
                    )
                    total += _flat(second)
                count += float(loss.count)
        sums = self._sum(torch.cat([total, total.new_tensor([count])]))
        decays = [
            v * (options["weight_decay"] + self.damping) for v, (_, options) in zip(parts, moved, strict=True)
        ]
        return sums[:-1] / sums[-1] + _flat(decays)

    def _objective(self, moved: Sequence[tuple[nn.Parameter, dict[str, Any]]]) -> float:
        """Return the mean loss over all ranks, with the decay; collective."""
        assert self._losses is not None
        sums = [0.0, 0.0]
        for loss in self._losses():
            sums = [sums[0] + float(loss.total), sums[1] + float(loss.count)]
        device = next((p.device for p, _ in moved), torch.device("cpu"))
        total, count = self._sum(torch.tensor(sums, dtype=torch.float64, device=device)).tolist()
        return total / count + sum(
            options["weight_decay"] / 2 * float(p.square().sum())
            for p, options in moved
            if options["weight_decay"]
        )

    def _search(
        self,
        moved: Sequence[tuple[nn.Parameter, dict[str, Any]]],
        gradient: Tensor,
        direction: Tensor,
        lr: float,
    ) -> None:
        """Move along a direction until the loss has fallen enough; collective."""
        start = [p.detach().clone() for p, _ in moved]
        slope, before = float(gradient @ direction), self._objective(moved)
        # Near a minimum the decrease is below the rounding of the loss, and a whole step is right.
        rounding = _ROUNDING * torch.finfo(gradient.dtype).eps * abs(before)
        length = lr
        for _ in range(_MAX_HALVINGS):
            self._move_to(moved, start, direction, length)
            if self._objective(moved) <= before + _DECREASE * length * slope + rounding:
                return
            length /= 2
        self._move_to(moved, start, direction, 0.0)
        self._log(
            f"optimizer: NewtonCG found no decrease of the loss {before:g} along its direction in"
            f" {_MAX_HALVINGS} halvings, so this update moves nothing"
        )

    def _move_to(
        self,
        moved: Sequence[tuple[nn.Parameter, dict[str, Any]]],
        start: Sequence[Tensor],
        direction: Tensor,
        length: float,
    ) -> None:
        parts = direction.split([p.numel() for p, _ in moved])
        for (p, _), old, part in zip(moved, start, parts, strict=True):
            p.copy_(torch.add(old, part.view(p.shape), alpha=length) if length else old)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    parts = [x.reshape(-1) for x in tensors]
    return torch.cat(parts) if parts else torch.zeros(0)
