"""The record of one step, as every sink receives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stats:
    """One step, as all ranks agree on it, with the seconds of this rank.

    Args:
        step: index of the step, from 0.
        epoch: index of the epoch that the step's samples belong to.
        loss: mean loss over the items of the step.
        metrics: means over the same items.
        num_samples: samples in the step, all replicas.
        num_items: what the loss counts (samples, tokens), all replicas.
        grad_norm: global norm of the mean gradient, before the clip.
        lr: rate of the first parameter group in this update.
        applied: False if the update was skipped: a gradient overflowed in fp16, or health left the step out.
        loss_scale: 1 unless fp16.
        stops: number of ranks that were asked to stop.
        seconds: wall time of the step on this rank.
        phases: seconds by phase.
        sent_bytes: bytes this rank put on the wire since the start of the run, by the closed form.
        rates: learning rate of every parameter group, by its name or number.
    """

    step: int
    epoch: int
    loss: float
    metrics: Mapping[str, float]
    num_samples: int
    num_items: float
    grad_norm: float
    lr: float
    applied: bool
    loss_scale: float
    stops: int
    seconds: float
    phases: Mapping[str, float]
    sent_bytes: float
    rates: Mapping[str, float] = field(default_factory=dict)

    def told(self, metrics: Mapping[str, float], rates: Mapping[str, float]) -> Stats:
        """The same step with other metrics and rates, for a tenth of what `dataclasses.replace` costs."""
        found = object.__new__(Stats)
        vars(found).update(vars(self), metrics=metrics, rates=rates)
        return found

    @property
    def samples_per_second(self) -> float:
        """Rate of this step, all replicas."""
        return self.num_samples / self.seconds if self.seconds > 0 else 0.0

    def record(self) -> dict[str, Any]:
        """The fields and the rate as plain values, for JSON."""
        return {"event": "step", **vars(self), "samples_per_second": self.samples_per_second}
