"""A model whose step is all overhead, against a loop by hand: processor time in many short blocks, and calls.

On a machine that others use, the least of many short blocks says more than a few long ones; the number of
calls of functions, of Python's and of those in C, says the same on any machine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from benchmarks.loops import HandLoop, bare, paceline_side
from benchmarks.measure import Series, take_turns
from benchmarks.report import Options, Report, Table, present, series_data
from benchmarks.subjects import Subject, mlp
from paceline.job.cluster import Cluster

_COUNTED_STEPS = 40
_BLOCK_STEPS = 24


def calls_a_step(step: Callable[[], object]) -> float:
    """Calls that this thread makes in a step."""
    number = 0

    def see(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(see)
    for _ in range(_COUNTED_STEPS):
        step()
    sys.setprofile(None)
    return number / _COUNTED_STEPS


def measure_case(subject: Subject, shards: int, blocks: int) -> tuple[list[Series], list[float]]:
    """Both sides by turns, and then the calls of each."""
    sides = [
        HandLoop(subject, bare(subject)).side(),
        paceline_side("Paceline", subject, Cluster.single(), 1),
    ]
    steps = max(3, _BLOCK_STEPS // shards)
    found = take_turns(sides, repeats=blocks, steps=steps, warmup=40)
    return found, [calls_a_step(side.step) for side in sides]


def row(shards: int, found: list[Series], calls: list[float]) -> tuple[str, ...]:
    """Of one number of micro-batches."""
    hand, ours = (series.cpu_seconds for series in found)
    paired = statistics.median(b / a for a, b in zip(hand, ours, strict=True))
    times = [
        f"{1e6 * seconds:.0f}" for side in (hand, ours) for seconds in (min(side), statistics.median(side))
    ]
    ratios = [f"{min(ours) / min(hand):.3f}", f"{statistics.median(ours) / statistics.median(hand):.3f}"]
    return str(shards), *times, *ratios, f"{paired:.3f}", f"{calls[0]:.0f}", f"{calls[1]:.0f}"


def measure(options: Options) -> Report:
    """One micro-batch, and eight."""
    torch.set_num_threads(1)
    rows, data = [], {}
    for shards in (1, 8):
        subject = mlp((16,), batch_size=8, shards=shards, inputs=256)
        found, calls = measure_case(subject, shards, 5 if options.quick else 50)
        rows.append(row(shards, found, calls))
        data[str(shards)] = {"series": series_data(found), "calls": calls}
    by_hand, ours = ("by hand us", "median"), ("ours us", "median")
    ratios = ("of least", "medians", "paired")
    columns = ("micro-batches", *by_hand, *ours, *ratios, "calls", "our calls")
    return Report(
        "A step of MLP 256-16-10, batch 8, one thread.", [Table("", columns, rows)], {"cases": data}
    )


if __name__ == "__main__":
    present(measure, __doc__ or "")
