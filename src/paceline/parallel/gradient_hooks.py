"""Hooks that hand gradients to a sink during backward, each as soon as it is complete.

A gradient is complete when autograd adds to it for the last time. That is usually the first time, but a
parameter inside a block with reentrant checkpointing gets several additions. So the hooks learn from the
first backward which parameters get a single addition; all others are handed on after each backward.

Hooks of the user on a parameter always see the gradient of one micro-batch, however many of them a rank runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paceline.comm.reduction.gradients import GradientSink
from paceline.errors import TaskError
from paceline.state.slot import TensorSlot


class GradientHooks:
    """Gradients of the parameters of one rank.

    Args:
        parameters: by slot, in the order of the model.
        overlap: hand gradients on during backward; slower and pointless if nothing is communicated.
        frees_gradients: free a gradient after handing it on, since the sink has a copy. Its norm is kept as a
            tensor, unread, until the next step.
    """

    def __init__(
        self, parameters: Mapping[TensorSlot, nn.Parameter], *, overlap: bool, frees_gradients: bool = False
    ) -> None:
        self._parameters, self._overlap, self._frees = parameters, overlap, frees_gradients
        self._sink: GradientSink | None = None
        self._pending: dict[TensorSlot, None] = {}
        # Additions in the current backward, of parameters that are not classified yet.
        self._additions: Counter[TensorSlot] = Counter()
        self._added_once: set[TensorSlot] = set()
        self._late: set[TensorSlot] = set()
        self.used: set[str] = set()
        self.norms: dict[TensorSlot, list[Tensor]] = {}
        # Learned before our own hooks are registered below, so these are the user's.
        self._hooked = {slot for slot, p in parameters.items() if _has_user_hook(p)}
        self._sums: dict[TensorSlot, Tensor] = {}
        for slot, p in parameters.items() if overlap else ():
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, slot))

    def begin(self) -> None:
        """Drop the gradients of the last step."""
        for p in self._parameters.values():
            # None, not zeros: `used` tells a parameter without a gradient from one whose gradient is zero.
            p.grad = None
        self.used, self.norms, self._sums = set(), {}, {}

    def open(self, sink: GradientSink | None, slots: Sequence[TensorSlot] | None = None) -> None:
        """Hand complete gradients to the sink from now on; with None, gradients only add up.

        Args:
            slots: parameters that the backward reaches, in the order of the model; None for all.
        """
        self._sink = sink
        self._pending = {} if sink is None else dict.fromkeys(self._parameters if slots is None else slots)

    def close(self) -> None:
        """Hand on all remaining gradients after a backward."""
        if self._sink is not None:
            sink, self._sink = self._sink, None
            # The reverse order of the model is the order in which backward completes gradients, and all
            # ranks use it.
            for slot in reversed(list(self._pending)):
                self._hand_on(slot, sink)
        elif self._hooked:
            self._put_aside()
        if self._additions:
            self._learn()

    def _learn(self) -> None:
        """Classify parameters by the number of additions in one backward."""
        for slot, count in self._additions.items():
            # Once late, always late: a gradient that was handed on early could not be completed any more.
            (self._added_once if count == 1 and slot not in self._late else self._late).add(slot)
        self._additions.clear()

    def stop(self) -> None:
        """Hand on no more gradients of this step."""
        self._sink = None
        # An aborted backward has counted only some of the additions.
        self._additions.clear()

    def _put_aside(self) -> None:
        """Move gradients of parameters with user hooks aside, so that a hook never sees the sum so far."""
        for slot in self._hooked:
            p = self._parameters[slot]
            if p.grad is not None:
                self._sums[slot] = self._sums[slot] + p.grad if slot in self._sums else p.grad
                p.grad = None

    def _on_gradient(self, slot: TensorSlot, p: Tensor) -> None:
        if p.grad is None:
            raise TaskError(
                f"a hook has removed the gradient of '{slot.name}', which must be summed over micro-batches"
                " and ranks before the update",
                next_step="use Task(optimizer=...) instead of a hook that steps during backward",
            )
        # Unclassified or late: another addition may follow, so `close` hands it on after the backward.
        if slot not in self._added_once:
            self._additions[slot] += 1
            return
        if self._sink is None:
            return
        if slot not in self._pending:
            raise TaskError(
                f"the gradient of '{slot.name}' changed after it was complete: earlier backwards added to it"
                " only once",
                next_step="use checkpoint(..., use_reentrant=False), or use the same layers in every step",
            )
        del self._pending[slot]
        self._hand_on(slot, self._sink)

    def _hand_on(self, slot: TensorSlot, sink: GradientSink) -> None:
        p = self._parameters[slot]
        grad = p.grad
        if self._sums and slot in self._sums:
            before = self._sums.pop(slot)
            grad = p.grad = before if grad is None else before + grad
        if grad is not None:
            self.used.add(slot.name)
            if grad.is_sparse:
                # Buckets have space for every row.
                grad = p.grad = grad.to_dense()
            if self._frees:
                # A tensor, not a number: reading it would wait for the device in the middle of backward.
                self.norms.setdefault(slot, []).append(torch.linalg.vector_norm(grad))
        sink.ready(slot, grad)
        if sink.by_micro_batch or self._frees:
            # The sink has its copy, and the next micro-batch starts from zero.
            p.grad = None


def _has_user_hook(p: nn.Parameter) -> bool:
    return bool(getattr(p, "_post_accumulate_grad_hooks", None))
