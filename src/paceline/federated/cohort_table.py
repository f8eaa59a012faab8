"""The table of a federated round: one row of numbers for each position of the cohort, equal on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.tally import StepTally
from paceline.errors import DataError
from paceline.job.mesh import RankGroup
from paceline.report.run_reader import read_run

RETURNED, NOT_FINITE, NO_SAMPLES, LATE, LOST, INVALID = 1.0, 2.0, 3.0, 4.0, 5.0, 6.0
LEFT_OUT_REASONS = {
    NOT_FINITE: "its loss or update is not finite",
    NO_SAMPLES: "it has no samples",
    LATE: "it was late",
    LOST: "it could not be reached",
    INVALID: "its update has other tensors than the model",
}
COHORT_COLUMNS = ("status", "weight", "samples", "steps", "total", "count", "bytes")
_SUMMED = COHORT_COLUMNS[1:-1]


def status_of(reason: str) -> float:
    """Return the status with a reason of `LEFT_OUT_REASONS`."""
    return next(status for status, text in LEFT_OUT_REASONS.items() if text == reason)


class CohortReplay:
    """The part of a recorded run that its seed does not decide: who was late, and what a buffer held.

    Args:
        cohorts: events `cohort` of the run.
        buffers: its events `buffer`; empty if it had none.
    """

    def __init__(
        self, cohorts: Sequence[Mapping[str, Any]], buffers: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        by_time = {LEFT_OUT_REASONS[LATE], LEFT_OUT_REASONS[LOST]}
        self._left_out = {
            int(record["step"]): {n: r for n, r in record["left_out"].items() if r in by_time}
            for record in cohorts
        }
        # First those that were dropped: their clients began other works in the same round.
        self._taken = {
            int(record["step"]): [
                *((name, work) for name, work, _ in record["dropped"]),
                *zip(record["clients"], record["works"], strict=True),
            ]
            for record in buffers
        }
        # A client begins each of its works on the weights of the round that the record names.
        self._begins = {
            (name, work): int(record["step"]) - age
            for record in buffers
            for name, work, age in (
                *zip(record["clients"], record["works"], record["ages"], strict=True),
                *record["dropped"],
            )
        }

    def left_out(self, step: int) -> Mapping[str, str]:
        """Return the clients that a round left out for the time that they took, with the reason."""
        return self._left_out.get(step, {})

    def taken(self, step: int) -> list[tuple[str, int]]:
        """Return the updates that a round with a buffer dropped and then applied, as client and its work."""
        return [*self._taken.get(step, ())]

    def next_work(self, name: str, first: int, step: int) -> int | None:
        """Return the work that a client begins in a round, the first from `first` on; None: there is none."""
        works = sorted(work for other, work in self._begins if other == name and work >= first)
        return works[0] if works and self._begins[name, works[0]] == step else None


def read_cohort_replay(folder: str | None) -> CohortReplay | None:
    """Read the cohorts of a run folder; None without one.

    Raises:
        DataError: the run was not federated, or was resumed.
    """
    if folder is None:
        return None
    run = read_run(Path(folder))
    if not run.of("cohort") or len(run.starts) != 1:
        raise DataError(
            f"{folder} has no cohorts of a complete federated run",
            where="debug.replay_arrivals",
            next_step="name the folder of a run with sync=federated that was not resumed",
        )
    return CohortReplay(run.of("cohort"), run.of("buffer"))


class CohortTable:
    """Table on which the ranks agree in a round: one row of numbers for each position, float64.

    Each rank fills in the rows of its own positions and the others stay zero, so the sum over ranks rounds
    nothing, and everything that is added up afterwards is added in the order of the positions.

    Args:
        num_positions: rows.
        metric_names: of the loss.
        num_counters: integer buffers of one value.
    """

    def __init__(self, num_positions: int, metric_names: Sequence[str], num_counters: int) -> None:
        self._metric_names, self._num_counters = metric_names, num_counters
        self._width = len(COHORT_COLUMNS) + len(metric_names) + num_counters
        self._written: dict[int, list[float]] = {}
        self.rows = torch.zeros(num_positions + 1, self._width, dtype=torch.float64)

    def write(
        self,
        position: int,
        head: Mapping[str, float],
        metrics: Mapping[str, float],
        counters: Sequence[float],
    ) -> None:
        """Write the row of a position; `head` has the numbers of `COHORT_COLUMNS`."""
        values = [
            *(head.get(name, 0.0) for name in COHORT_COLUMNS),
            *(metrics.get(name, 0.0) for name in self._metric_names),
        ]
        # One tensor for all rows is made in `agree`: small tensors cost more than their numbers.
        self._written[position] = [*values, *(counters or [0.0] * (self._width - len(values)))]

    @property
    def num_summed(self) -> int:
        """Return how many numbers of a client are added up: all but its status and its bytes."""
        return self._width - 2

    def summed_numbers(self, row: ClientRow, counters: Sequence[float]) -> list[float]:
        """Return the numbers of a client that are added up, [num_summed]."""
        values = [*(row.head[name] for name in _SUMMED), *(row.metrics[name] for name in self._metric_names)]
        return [*values, *(counters or [0.0] * self._num_counters)]

    def set_sums(self, survivors: Sequence[int], numbers: Sequence[float]) -> None:
        """Write sums over clients whose own numbers are not known; after `agree`.

        They stand in the row of the first survivor, and the other rows stay without them. A counter is there
        the mean of its changes, as the largest is no sum.

        Args:
            survivors: positions that are in the sums; others that have returned something are lost.
            numbers: [num_summed].
        """
        for position, status in enumerate(self.column("status")):
            if status == RETURNED and position not in survivors:
                self.rows[position] = 0.0
                self.rows[position, 0] = LOST
        if not survivors:
            return
        first, values = survivors[0], [*numbers]
        for index in range(len(values) - self._num_counters, len(values)):
            values[index] = float(round(values[index] / len(survivors)))
        columns = [index for index, name in enumerate(COHORT_COLUMNS) if name in _SUMMED]
        columns += range(len(COHORT_COLUMNS), self._width)
        self.rows[first, columns] = torch.tensor(values, dtype=torch.float64)

    def agree(self, net: Net, group: RankGroup, device: torch.device, *, stops: bool) -> None:
        """Sum the rows over the ranks; collective."""
        if self._written:
            rows = torch.tensor([*self._written.values()], dtype=torch.float64)
            self.rows[torch.tensor([*self._written])] = rows
        self.rows[-1, 0] = float(stops)
        if group.size > 1:
            self.rows = net.all_reduce(self.rows.to(device), group).wait().cpu()

    @property
    def stops(self) -> float:
        """Return the number of ranks that were asked to stop."""
        return float(self.rows[-1, 0])

    def column(self, name: str) -> list[float]:
        """Return a number of `COHORT_COLUMNS` by position."""
        values: list[float] = self.rows[:-1, COHORT_COLUMNS.index(name)].tolist()
        return values

    def returned(self) -> Tensor:
        """Return the rows of the clients that returned an update."""
        return self.rows[:-1][self.rows[:-1, 0] == RETURNED]

    def tally(self) -> StepTally:
        """Return loss, count and metrics of the clients that returned an update, added by position."""
        sums = [math.fsum(column) for column in self.returned().T.tolist()] or [0.0] * self.rows.shape[1]
        first = len(COHORT_COLUMNS)
        metrics = dict(zip(self._metric_names, sums[first : first + len(self._metric_names)], strict=True))
        total, count = sums[COHORT_COLUMNS.index("total")], sums[COHORT_COLUMNS.index("count")]
        return StepTally(
            micro_batches=sums[COHORT_COLUMNS.index("steps")],
            total=total,
            count=count,
            metrics=metrics,
            stops=self.stops,
            used=(),
            buffers=torch.zeros(0, dtype=torch.float64),
        )


class ClientRow(NamedTuple):
    """The numbers of a client in the table.

    Args:
        head: numbers of `COHORT_COLUMNS` other than status and bytes.
        metrics: sums by name.
    """

    head: Mapping[str, float]
    metrics: Mapping[str, float]


class LocalSums(NamedTuple):
    """The sums of the loss over the local steps of a client.

    Args:
        totals, counts: of each step.
        metrics: of each step.
    """

    totals: list[float]
    counts: list[float]
    metrics: list[Mapping[str, float]]

    @classmethod
    def empty(cls) -> LocalSums:
        """Return those of a client that has taken no step."""
        return cls([], [], [])

    def add(self, total: float, count: float, metrics: Mapping[str, float]) -> None:
        """Append the sums of a step."""
        self.totals.append(total)
        self.counts.append(count)
        self.metrics.append(metrics)

    def row(self, weight: float, num_samples: int) -> ClientRow:
        """Return the sums over all steps, with the weight and the samples of the client."""
        head = {
            "weight": weight,
            "samples": float(num_samples),
            "steps": float(len(self.totals)),
            "total": math.fsum(self.totals),
            "count": math.fsum(self.counts),
        }
        return ClientRow(head, {name: math.fsum(m[name] for m in self.metrics) for name in self.metrics[0]})
