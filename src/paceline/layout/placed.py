"""What a layout gives to a rule: the model as one rank holds it, and forward and backward of some
micro-batches.

Gradients are named by the slot that the rank computes with. A rank calls `ready` for the slots that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.comm import GradientSink
from paceline.data import LoadedBatch
from paceline.layout.buffers import MicroBatchBuffers
from paceline.layout.holding import Holding
from paceline.layout.sums import MetricNames, Sums
from paceline.slot import Slot

Ask = Callable[[nn.Module, Any], Any]
"""`ask(model, batch)` calls the model once, and does what it likes with the result: a loss is one."""


class Placed(Protocol):
    """One rank's share of a replica.

    Attributes:
        holding: what of the model this rank has in memory.
        metric_names: of the loss; agreed before training.
        used: names of the parameters that had a gradient here, in a micro-batch of the last `run`.
        norms: of gradients that were let go of in the last `run`, one for each micro-batch; unread.
        buffers: of the whole model; those that this rank does not hold do not move here.
    """

    @property
    def holding(self) -> Holding: ...
    @property
    def metric_names(self) -> MetricNames: ...
    @property
    def used(self) -> Collection[str]: ...
    @property
    def norms(self) -> Mapping[Slot, Sequence[Tensor]]: ...
    @property
    def buffers(self) -> MicroBatchBuffers: ...

    def run(self, micro_batches: Iterable[LoadedBatch], count: int, sink: GradientSink, scale: float) -> Sums:
        """Forward and backward of some micro-batches of one step; every gradient goes to the sink once.

        Args:
            micro_batches: this replica's share of the step, in order.
            count: how many that is; 0 is allowed.
            sink: takes every gradient once, or once a micro-batch; None where no micro-batch used the
                parameter.
            scale: what the loss is multiplied with before backward.
        Returns:
            Sums over these micro-batches, on one rank of a replica; empty on its others.
        """

    def abort(self) -> None:
        """Drop a half `run`: buffers are those from before it, and no gradient is handed on."""

    def answer(self, micro_batches: Iterable[LoadedBatch], ask: Ask) -> None:
        """Forward alone of some batches, without gradients or dropout; collective, with as many on all
        ranks that share the model.

        Args:
            ask: gets past its call of the model on ranks that have what the whole model computes: all, or
                those of the last stage. The first stage ends it there, other stages do not call it.
        """

    def evaluate(self, micro_batches: Iterable[LoadedBatch]) -> Sums:
        """Loss, count and metrics of held-out micro-batches; empty where `run` returns empty sums."""
