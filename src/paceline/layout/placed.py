"""What a layout gives to a rule: the model as one rank holds it, and forward and backward of some units.

Gradients are named by the slot that the rank computes with. A rank calls `ready` for the slots that it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from paceline.comm import GradientSink
from paceline.data import LoadedUnit
from paceline.layout.buffers import UnitBuffers
from paceline.layout.holding import Holding
from paceline.layout.sums import MetricNames, Sums


class Placed(Protocol):
    """One rank's share of a replica.

    Attributes:
        holding: what of the model this rank has in memory.
        metric_names: of the loss; agreed before training.
        used: names of the parameters that had a gradient here, in a unit of the last `run`.
        buffers: of the whole model; those that this rank does not hold do not move here.
    """

    @property
    def holding(self) -> Holding: ...
    @property
    def metric_names(self) -> MetricNames: ...
    @property
    def used(self) -> Collection[str]: ...
    @property
    def buffers(self) -> UnitBuffers: ...

    def run(self, units: Iterable[LoadedUnit], num_units: int, sink: GradientSink, scale: float) -> Sums:
        """Forward and backward of some units of one step; every gradient goes to the sink once.

        Args:
            units: this replica's share of the step, in order.
            num_units: how many that is; 0 is allowed.
            sink: takes every gradient once, or once a unit; None where no unit used the parameter.
            scale: what the loss is multiplied with before backward.
        Returns:
            Sums over these units, on one rank of a replica; empty on its others.
        """

    def abort(self) -> None:
        """Drop a half `run`: buffers are those from before it, and no gradient is handed on."""

    def evaluate(self, units: Iterable[LoadedUnit]) -> Sums:
        """Loss, count and metrics of held-out units; empty where `run` returns empty sums."""
