"""The measurements of a step: seconds by phase, the record of a step, and the records of all ranks.

`PhaseTimer` measures a rank: a phase lasts until the next one begins, so the phases add up to the step.
`StepStats` is what every sink receives after a step. `build_rank_records` turns the measurements of all ranks
into one record per rank and window.

Seconds are wall time on the host. On a GPU the host runs ahead of the device and nothing here synchronises
it, so there the phases show where the host waited.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from paceline.observe.rank_activity import BETWEEN_STEPS, RankActivity

StepPhase = Literal["data", "forward", "backward", "communication", "optimizer"]
PHASES: tuple[StepPhase, ...] = get_args(StepPhase)
LOCAL_PHASES: tuple[StepPhase, ...] = ("data", "forward", "backward")
"""The phases in which a rank does not wait for other ranks."""


class PhaseTimer:
    """A timer of seconds by phase since the last `take`; time before the first phase belongs to none.

    Args:
        activity: shows each phase as the current operation of the rank; None: it is not shown.
    """

    def __init__(self, activity: RankActivity | None = None) -> None:
        self._activity = activity or RankActivity()
        self._start = self._since = time.perf_counter()
        self._phase = ""
        self._spent = dict.fromkeys(("", *PHASES), 0.0)

    def begin(self, phase: StepPhase) -> float:
        """Attribute the time from now on to `phase`, until another begins; returns now, of `perf_counter`."""
        now = time.perf_counter()
        self._spent[self._phase] += now - self._since
        self._phase, self._since = phase, now
        if self._activity.is_active:
            self._activity.enter(phase, now)
        return now

    def spent(self, *phases: StepPhase) -> float:
        """Return the seconds of some phases since the last `take`."""
        now = time.perf_counter()
        self._spent[self._phase] += now - self._since
        self._since = now
        return sum(self._spent[phase] for phase in phases)

    def take(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last `take`, in total and by phase; start again in no phase."""
        if self._activity.is_active:
            self._activity.enter(BETWEEN_STEPS, time.perf_counter())
        now = time.perf_counter()
        self._spent[self._phase] += now - self._since
        total, self._start, self._since = now - self._start, now, now
        spent: dict[str, float] = {phase: self._spent[phase] for phase in PHASES}
        self._phase = ""
        self._spent = dict.fromkeys(self._spent, 0.0)
        return total, spent


@dataclass(frozen=True)
class StepStats:
    """The record of one step: sums that are equal on all ranks, and the seconds of this rank.

    Args:
        step: index of the step, from 0.
        epoch: index of the epoch that the step's samples belong to.
        loss: mean loss over the items of the step.
        metrics: means over the same items.
        num_samples: samples in the step, all replicas.
        num_items: what the loss counts (samples, tokens), all replicas.
        grad_norm: global norm of the mean gradient, before the clip.
        lr: rate of the first parameter group in this update.
        applied: False if the update was skipped: a gradient overflowed in fp16, or health skipped the step.
        loss_scale: 1 unless fp16.
        stops: number of ranks that were asked to stop.
        seconds: wall time of the step on this rank.
        phases: seconds by phase.
        sent_bytes: bytes that this rank has sent since the start of the run, by the closed form.
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

    def with_metrics(self, metrics: Mapping[str, float], rates: Mapping[str, float]) -> StepStats:
        """Return a copy with other metrics and rates."""
        # A tenth of the time of `dataclasses.replace`, which counts in steps of a millisecond.
        copy = object.__new__(StepStats)
        vars(copy).update(vars(self), metrics=metrics, rates=rates)
        return copy

    @property
    def samples_per_second(self) -> float:
        """Samples per second of this step, all replicas."""
        return self.num_samples / self.seconds if self.seconds > 0 else 0.0

    def record(self) -> dict[str, Any]:
        """Return the fields and the rate as plain values, for JSON."""
        return {"event": "step", **vars(self), "samples_per_second": self.samples_per_second}


RANK_COLUMNS = (
    "seconds",
    *PHASES,
    "busy_seconds",
    "exposed_seconds",
    "sent_bytes",
    "cpu_seconds",
    "proportional_bytes",
    "peak_bytes",
)
"""The measurements of a rank in a round. `busy_seconds` and `exposed_seconds` are about communication;
`proportional_bytes` is the memory of the process at the end of a window, in which a page that n processes map
counts 1 / n; `peak_bytes` is the largest resident memory since the process started."""

_COMMUNICATION = 1 + PHASES.index("communication")


def build_rank_records(step: int, windows: Mapping[int, Sequence[Sequence[float]]]) -> list[dict[str, Any]]:
    """Return one record per rank.

    Args:
        step: last step of the window.
        windows: the values of `RANK_COLUMNS`, by rank and round.
    """
    # In a round the rank that spent least in communication arrived last, so whatever another rank spent
    # beyond that was waiting for it.
    waits = {rank: [row[_COMMUNICATION] for row in rounds] for rank, rounds in windows.items()}
    least_waits = [min(column) for column in zip(*waits.values(), strict=True)]
    return [
        {
            "step": step,
            "rank": rank,
            "rounds": len(rounds),
            **_sum_rounds(rounds),
            "waiting_seconds": sum(wait - low for wait, low in zip(waits[rank], least_waits, strict=True)),
        }
        for rank, rounds in windows.items()
    ]


def _sum_rounds(rounds: Sequence[Sequence[float]]) -> Mapping[str, Any]:
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
        "exposed_seconds": total["exposed_seconds"],
        "hidden_seconds": sum(hidden),
        "sent_bytes": total["sent_bytes"],
        "cpu_seconds": total["cpu_seconds"],
        "proportional_bytes": max(columns["proportional_bytes"]),
        "peak_bytes": max(columns["peak_bytes"]),
    }
