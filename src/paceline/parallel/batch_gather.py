"""Gather of tensors over the micro-batches of a step, for losses that compare samples with each other.

A contrastive loss (SimCLR, CLIP) holds each sample against all others of the batch. With `paceline.gather`
every rank gets the rows of the whole batch, in its order, and computes the loss of the whole batch. Each rank
then adds 1/P of that loss, P being the number of ranks, so totals, counts and gradients are those of one
process with one micro-batch.

Invariant: with one micro-batch on each rank, the result does not depend on the number of ranks
(tests/parity/test_batch_gather.py). Outside of training (evaluation, checks, a plain loop) `gather` returns
its argument: the batch is whole there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.comm.net import Net
from paceline.errors import StrategyError, TaskError
from paceline.job.mesh import RankGroup, duplicate_group
from paceline.task import Loss, LossFunction


def gather(x: Tensor) -> Tensor:
    """Return the rows of all ranks' micro-batches, in the order of the batch, with gradients; collective.

    Use it in the loss for whatever is compared between samples, and compute the loss of all gathered rows:
    every rank returns the loss of the whole batch, which is counted once. Every rank has to run one micro-
    batch of every step; a strategy or `batch.shards` with which that is not so is refused before the first
    step. In evaluation, in one process and outside of Paceline the argument is returned.

    Args:
        x: [n, ...], any dtype; n may differ between ranks.
    Returns:
        [sum of n, ...], equal on all ranks.
    Raises:
        TaskError: `x` has no rows.
        StrategyError: see above.
    Wire: one all_gather of x, and in backward one all_reduce of the gathered rows.
    Exactness: that of a sum over ranks; tests/parity/test_batch_gather.py.
    """
    if not isinstance(x, Tensor) or x.dim() == 0:
        shown = "a scalar" if isinstance(x, Tensor) else type(x).__name__
        raise TaskError(
            f"paceline.gather takes a tensor with one row for each sample, found {shown}",
            next_step="gather embeddings or labels [n, ...]; sums and counts are added over ranks by Loss",
        )
    scope = _SCOPE.get()
    return x if scope is None else scope.gather(x)


class GatherScope(Protocol):
    """The action of `gather` inside of a block of code."""

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, or refuse."""


# Set only while a loss runs: a user's function has no other way to reach the ranks of its session.
_SCOPE: ContextVar[GatherScope | None] = ContextVar("paceline-gather", default=None)


ScopeT = TypeVar("ScopeT", bound=GatherScope)


@contextmanager
def gather_scope(scope: ScopeT) -> Iterator[ScopeT]:
    """Return a context manager inside of which `gather` is that of `scope`."""
    token = _SCOPE.set(scope)
    try:
        yield scope
    finally:
        _SCOPE.reset(token)


class WholeBatch:
    """A scope in which the batch is whole, so that `gather` returns its argument.

    Attributes:
        num_calls: calls of `gather` so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0

    def gather(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x


def whole_batch_scope() -> AbstractContextManager[GatherScope]:
    """Return the context manager of an evaluation or a check: the scope of a check that runs it is kept."""
    scope = _SCOPE.get()
    return gather_scope(scope if isinstance(scope, WholeBatch) else WholeBatch())


class RankGather:
    """A scope in which the batch is spread over ranks.

    Args:
        group: the ranks that share the samples of a step, in the order of the batch.
        net: this rank's collectives.
        require_support: raises a StrategyError unless every rank runs one micro-batch of every step; called
            before the first gather.

    Attributes:
        num_calls: calls of `gather` so far.
    """

    def __init__(self, group: RankGroup, net: Net, require_support: Callable[[], None]) -> None:
        self._group, self._net, self._require_support = group, net, require_support
        self._own_group: RankGroup | None = None
        self.num_calls = 0

    @property
    def num_ranks(self) -> int:
        return self._group.size

    @property
    def is_open(self) -> bool:
        """Return whether the loss has gathered rows in training."""
        return self._own_group is not None

    def gather(self, x: Tensor) -> Tensor:
        if self._own_group is None:
            self._require_support()
            # A group of its own: these calls run between those of gradients, in no fixed order with them.
            self._own_group = duplicate_group(self._group, "gather") if self.num_ranks > 1 else self._group
        self.num_calls += 1
        if self.num_ranks == 1:
            return x
        return cast(Tensor, _GatherRows.apply(x, self._net, self._own_group))

    def share(self, loss: Loss) -> Loss:
        """Return this rank's share of the loss of a whole batch, which every rank has computed."""
        ranks = self.num_ranks
        metrics = {name: value / ranks for name, value in loss.metrics.items()}
        return Loss(loss.total / ranks, loss.count / ranks, metrics)


class _GatherRows(torch.autograd.Function):
    """x [n, ...] of each rank -> [sum of n, ...]; the gradients of all ranks for a row are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: Net, group: RankGroup) -> Tensor:
        parts = net.all_gather(x.detach().contiguous(), group).wait()
        ctx.net, ctx.group, ctx.lengths = net, group, [len(part) for part in parts]
        rows = torch.cat(parts)
        if not x.is_floating_point() and not x.is_complex():
            ctx.mark_non_differentiable(rows)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        # A copy, because the all_reduce works in place.
        total = ctx.net.all_reduce(grads[0].contiguous().clone(), ctx.group).wait()
        first = sum(ctx.lengths[: ctx.group.rank])
        return total[first : first + ctx.lengths[ctx.group.rank]], None, None


class RefusedGather:
    """A scope in which `gather` is an error.

    Args:
        what, next_step: of the error.
    """

    def __init__(self, what: str, next_step: str) -> None:
        self._what, self._next_step = what, next_step

    def gather(self, x: Tensor) -> Tensor:
        raise StrategyError(self._what, next_step=self._next_step)


class GatheringLoss:
    """A loss function in which `gather` collects rows of all ranks in training.

    Args:
        loss: the task's.
        ranks: the scope of its training.
    """

    def __init__(self, loss: LossFunction, ranks: RankGather) -> None:
        self._loss, self._ranks = loss, ranks

    def __call__(self, model: Any, batch: Any) -> Loss:
        """Return the loss of the inner function, or this rank's share of it if the function has gathered."""
        # Few calls, because this runs in every micro-batch: the token of the new scope has the old one.
        ranks = self._ranks
        before, token = ranks.num_calls, _SCOPE.set(ranks)
        try:
            if token.old_value is not Token.MISSING and token.old_value is not None:
                # An evaluation or a check has a scope of its own.
                with gather_scope(token.old_value):
                    return self._loss(model, batch)
            loss = self._loss(model, batch)
        finally:
            _SCOPE.reset(token)
        if ranks.num_calls == before or not isinstance(loss, Loss):
            return loss
        return ranks.share(loss)
