"""What a layout gives to a rule: the model as one rank holds it, and forward and backward of some units.

Gradients are named by the place of their parameter among all trained parameters of the model, in the model's
order, on every rank and under every layout. A rank calls `ready` for the parameters that it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.data import LoadedUnit
from paceline.layout.buffers import UnitBuffers
from paceline.layout.sums import Sums
from paceline.slot import Slot


class GradSink(Protocol):
    """Supplied by the rule: takes each gradient as soon as it is complete on this rank (`comm.Reducer`)."""

    @property
    def by_unit(self) -> bool: ...
    def unit(self, shards: range, is_last: bool) -> None: ...
    def ready(self, index: int, grad: Tensor | None) -> None: ...


class Placed(Protocol):
    """One rank's share of a replica.

    Attributes:
        model: the whole module; which of its parameters are up to date here, the layout knows.
        metric_names: sorted names of the metrics that the loss returns.
        slots: all trained parameters of the model, in its order.
        parameters: the same, by index.
        used: by parameter index, whether a unit of the last `run` had a gradient here.
        buffers: of the whole model; those that no module of this rank changes do not move here.
    """

    @property
    def model(self) -> nn.Module: ...
    @property
    def metric_names(self) -> tuple[str, ...]: ...
    @property
    def slots(self) -> Mapping[Slot, nn.Parameter]: ...
    @property
    def parameters(self) -> Sequence[nn.Parameter]: ...
    @property
    def used(self) -> Sequence[bool]: ...
    @property
    def buffers(self) -> UnitBuffers: ...
    @property
    def device(self) -> torch.device:
        """Where this rank computes."""

    def run(self, units: Iterable[LoadedUnit], num_units: int, sink: GradSink, scale: float) -> Sums:
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
