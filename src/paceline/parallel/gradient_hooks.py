"""Hands gradients on to a sink during backward, each once it is complete.

A gradient is complete when autograd adds to it for the last time. Mostly that is the first time; a parameter
inside a block that is recomputed by a backward of its own (reentrant checkpointing) gets several additions.
So the first backward that reaches a parameter counts, and what grew more than once is handed on after each
backward.

Hooks of the user's on a parameter see the gradient of one micro-batch, whoever runs how many of them.
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
    """The gradients of one rank's parameters.

    Args:
        parameters: by slot, in the model's order.
        overlap: hand on during backward; pointless, and slower, if nobody communicates.
        frees_gradients: let go of a gradient that was handed on; the sink has a copy. Its norm is kept, unread, until
            the next step.
    """

    def __init__(
        self, parameters: Mapping[TensorSlot, nn.Parameter], *, overlap: bool, frees_gradients: bool = False
    ) -> None:
        self._parameters, self._overlap, self._frees = parameters, overlap, frees_gradients
        self._sink: GradientSink | None = None
        self._pending: dict[TensorSlot, None] = {}
        self._additions: Counter[TensorSlot] = Counter()  # of those that are not known yet
        self._added_once: set[TensorSlot] = set()
        self._late: set[TensorSlot] = set()
        self.used: set[str] = set()
        self.norms: dict[TensorSlot, list[Tensor]] = {}
        self._hooked = {slot for slot, p in parameters.items() if _has_user_hook(p)}
        self._sums: dict[TensorSlot, Tensor] = {}
        for slot, p in parameters.items() if overlap else ():
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, slot))

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        for p in self._parameters.values():
            p.grad = None
        self.used, self.norms, self._sums = set(), {}, {}

    def open(self, sink: GradientSink | None, slots: Sequence[TensorSlot] | None = None) -> None:
        """What becomes complete from now on goes to the sink; None: gradients only add up.

        Args:
            slots: what a backward reaches, in the model's order; everything if None.
        """
        self._sink = sink
        self._pending = {} if sink is None else dict.fromkeys(self._parameters if slots is None else slots)

    def close(self) -> None:
        """Backward has ended: hand on the rest."""
        if self._sink is not None:
            sink, self._sink = self._sink, None
            for slot in reversed(list(self._pending)):
                self._hand_on(slot, sink)
        elif self._hooked:
            self._put_aside()
        if self._additions:
            self._learn()

    def _learn(self) -> None:
        """Which parameters a backward adds to more than once."""
        for slot, count in self._additions.items():
            (self._added_once if count == 1 and slot not in self._late else self._late).add(slot)
        self._additions.clear()

    def stop(self) -> None:
        """Hand on nothing more of this step."""
        self._sink = None
        self._additions.clear()

    def _put_aside(self) -> None:
        """A hook of the user's shall see each micro-batch's gradient alone, not the sum so far."""
        for slot in self._hooked:
            p = self._parameters[slot]
            if p.grad is not None:
                self._sums[slot] = self._sums[slot] + p.grad if slot in self._sums else p.grad
                p.grad = None

    def _on_gradient(self, slot: TensorSlot, p: Tensor) -> None:
        if p.grad is None:
            raise TaskError(
                f"a hook has taken away the gradient of '{slot.name}', which is summed over micro-batches and"
                " ranks before anything is updated",
                next_step="give Task(optimizer=...) in place of a hook that steps during backward",
            )
        if slot not in self._added_once:
            self._additions[slot] += 1
            return
        if self._sink is None:
            return
        if slot not in self._pending:
            raise TaskError(
                f"the gradient of '{slot.name}' grew after it was complete: in an earlier backward it was"
                " added to once",
                next_step="use checkpoint(..., use_reentrant=False), or the same layers in every step",
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
                grad = p.grad = grad.to_dense()  # buckets have a place for every row
            if self._frees:
                self.norms.setdefault(slot, []).append(torch.linalg.vector_norm(grad))
        sink.ready(slot, grad)
        if sink.by_micro_batch or self._frees:
            p.grad = None  # the next micro-batch starts anew


def _has_user_hook(p: nn.Parameter) -> bool:
    return bool(getattr(p, "_post_accumulate_grad_hooks", None))
