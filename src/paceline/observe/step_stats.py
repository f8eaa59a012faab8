"""Where the time of a step goes, on this rank.

Invariant: a phase lasts until the next one begins, so that each moment of a step is in one phase: their
seconds are those of the step. What belongs to a phase is said by whoever begins the next.

Seconds are wall time between marks on the host. On a GPU the host runs ahead of the device, so there the
shares say where the host waited. It does not synchronise the device.

The record of one step, as every sink receives it.

Where the time of every rank went: from the numbers of single rounds to one record a rank and window. Pure.

Communication is split in two: what a rank waited for ranks slower than itself, and the rest. In a round the
rank that waited least was the last to come, so what others waited beyond that is waiting for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

StepPhase = Literal["data", "forward", "backward", "communication", "optimizer"]
PHASES: tuple[StepPhase, ...] = get_args(StepPhase)
LOCAL_PHASES: tuple[StepPhase, ...] = ("data", "forward", "backward")
"""Those in which a rank waits for nobody."""


class PhaseTimer:
    """Seconds by phase since the last `take`; what lies before the first phase is in none."""

    def __init__(self) -> None:
        self._opened = self._since = time.perf_counter()
        self._present = ""
        self._spent = dict.fromkeys(("", *PHASES), 0.0)

    def begin(self, phase: StepPhase) -> None:
        """From here on time belongs to `phase`, until another begins."""
        now = time.perf_counter()
        self._spent[self._present] += now - self._since
        self._present, self._since = phase, now

    def spent(self, *phases: StepPhase) -> float:
        """Seconds of some phases since the last take."""
        now = time.perf_counter()
        self._spent[self._present] += now - self._since
        self._since = now
        return sum(self._spent[phase] for phase in phases)

    def take(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last take, and how they fall on the phases; starts anew, in no phase."""
        now = time.perf_counter()
        self._spent[self._present] += now - self._since
        whole, self._opened, self._since = now - self._opened, now, now
        spent: dict[str, float] = {phase: self._spent[phase] for phase in PHASES}
        self._present = ""
        self._spent = dict.fromkeys(self._spent, 0.0)
        return whole, spent


@dataclass(frozen=True)
class StepStats:
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

    def told(self, metrics: Mapping[str, float], rates: Mapping[str, float]) -> StepStats:
        """The same step with other metrics and rates, for a tenth of what `dataclasses.replace` costs."""
        found = object.__new__(StepStats)
        vars(found).update(vars(self), metrics=metrics, rates=rates)
        return found

    @property
    def samples_per_second(self) -> float:
        """Rate of this step, all replicas."""
        return self.num_samples / self.seconds if self.seconds > 0 else 0.0

    def record(self) -> dict[str, Any]:
        """The fields and the rate as plain values, for JSON."""
        return {"event": "step", **vars(self), "samples_per_second": self.samples_per_second}


RANK_COLUMNS = (
    "seconds",
    *PHASES,
    "busy_seconds",
    "exposed_seconds",
    "sent_bytes",
    "cpu_seconds",
    "peak_bytes",
)
"""What a rank measures in a round. Busy and exposed are of its communication; the peak is of its life."""

_COMMUNICATION = 1 + PHASES.index("communication")


def build_rank_records(step: int, windows: Mapping[int, Sequence[Sequence[float]]]) -> list[dict[str, Any]]:
    """One record a rank.

    Args:
        step: last step of the window.
        windows: by rank, by round, the columns.
    """
    waits = {rank: [row[_COMMUNICATION] for row in rounds] for rank, rounds in windows.items()}
    least = [min(column) for column in zip(*waits.values(), strict=True)]
    return [
        {
            "step": step,
            "rank": rank,
            "rounds": len(rounds),
            **_sums(rounds),
            "waiting_seconds": sum(wait - low for wait, low in zip(waits[rank], least, strict=True)),
        }
        for rank, rounds in windows.items()
    ]


def _sums(rounds: Sequence[Sequence[float]]) -> Mapping[str, Any]:
    columns = dict(zip(RANK_COLUMNS, zip(*rounds, strict=True), strict=True))
    total = {name: sum(values) for name, values in columns.items()}
    hidden = [
        max(0.0, busy - seen)
        for busy, seen in zip(columns["busy_seconds"], columns["exposed_seconds"], strict=True)
    ]
    return {
        "seconds": total["seconds"],
        "slowest_seconds": max(columns["seconds"]),
        "phases": {phase: total[phase] for phase in PHASES},
        "hidden_seconds": sum(hidden),
        "sent_bytes": total["sent_bytes"],
        "cpu_seconds": total["cpu_seconds"],
        "peak_bytes": max(columns["peak_bytes"]),
    }
