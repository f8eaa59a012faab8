"""Pipelines: how long stages really wait beside what their schedule says, and `torch.distributed.pipelining`.

Stages that sleep (`benchmarks.sleeping`) take the time that schedules count with, so what is idle beyond the
plan is what the pipeline loses: messages, the update, agreement of the ranks. They need no idle machine. Real
models beside them do. Last, a chain with one layer that is four times as heavy, cut by counts and by time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from benchmarks.loops import paceline_side
from benchmarks.measure import Series, Side, compare, merge_ranks, take_turns
from benchmarks.pair import DEADLINE_SECONDS, measure_pair
from benchmarks.pipeline_library import SCHEDULES, Ends, TorchPipeline
from benchmarks.report import Options, Report, Table, blocks, comparison_table, present, series_data
from benchmarks.sleeping import Clock, mean_square, sleeping_chain
from benchmarks.subjects import deep_gpt
from paceline.job.cluster import Cluster
from paceline.parallel.pipeline.strategy_schedule import make_schedule
from paceline.pipeline_schedule import simulate_schedule
from paceline.recipe import Strategy
from paceline.testing import run_ranks

_MICRO_BATCHES = 8
_LAYERS = 2  # of a stage: as many chunks as interleaving needs
_FORWARD_SECONDS = (0.03, 0.1)  # of a stage: what a step costs beside its layers weighs less on long ones
_POINTS = 3.0  # percent of the time, that a measured idle share may be off
_HEAVY_SECONDS = (*[1.0] * 4, 4.0, *[1.0] * 7)  # in units of a light layer's forward
_HEAVY_WAYS = {"equal layer counts": "stages=3,3,3,3", "stages by time": "stages=time"}


class Waited(NamedTuple):
    """One side of a pipeline of sleeping stages.

    Args:
        idle: share of the time of all ranks in which no layer worked.
    """

    series: Series
    idle: float


def planned_idle(schedule: str, stages: int) -> float:
    """The share that the schedule says, from 0 to 1."""
    strategy = Strategy.parse(f"replicas=1 pipeline={stages} schedule={schedule}")
    return simulate_schedule(make_schedule(strategy)(stages, _MICRO_BATCHES), _MICRO_BATCHES).bubble


def _chunks(schedule: str) -> int:
    return 2 if schedule.startswith("interleaved") else 1


def sleeping_sides(stages: int, forward: float, cluster: Cluster) -> Sequence[tuple[Side, Clock]]:
    """Ours and PyTorch's under each schedule.

    Args:
        forward: seconds of a stage.
    """
    found = []
    ends = Ends(lambda x: (x, x), mean_square)
    for schedule in SCHEDULES:
        ours, theirs = Clock(), Clock()
        layers = [forward / _LAYERS] * (_LAYERS * stages)
        subject = sleeping_chain(layers, _MICRO_BATCHES, ours)
        text = f"replicas=1 pipeline={stages} schedule={schedule}"
        side = paceline_side(schedule, subject.changed(strategy=Strategy.parse(text)), cluster, 1)
        other = TorchPipeline(
            sleeping_chain(layers, _MICRO_BATCHES, theirs), ends, schedule, cluster, _chunks(schedule)
        )
        found += [(side, ours), (other.side(f"{schedule}, PyTorch"), theirs)]
    return found


def _measure_sleeping(
    stages: int, forward: float, repeats: int, cluster: Cluster
) -> tuple[list[Series], list[float]]:
    """Series of every side, and seconds a step in which this rank's layers worked."""
    torch.set_num_threads(1)
    busy: list[list[float]] = []
    sides = [_watched(side, clock, busy) for side, clock in sleeping_sides(stages, forward, cluster)]
    found = take_turns(sides, repeats=repeats, steps=1, warmup=2, ready=dist.barrier)
    return found, [statistics.median(own) for own in busy]


def _watched(side: Side, clock: Clock, busy: list[list[float]]) -> Side:
    """The same side, whose layers' seconds in every step are noted."""
    own: list[float] = []
    busy.append(own)

    def step() -> float:
        before = clock.slept_seconds
        loss = side.step()
        own.append(clock.slept_seconds - before)
        return loss

    return replace(side, step=step)


def run_sleeping(stages: int, forward: float, repeats: int) -> list[Waited]:
    """Measure pipelines of so many ranks."""
    ranks = run_ranks(partial(_measure_sleeping, stages, forward, repeats), stages, deadline=DEADLINE_SECONDS)
    merged = merge_ranks([series for series, _ in ranks])
    busy = [statistics.fmean(own) for own in zip(*(seconds for _, seconds in ranks), strict=True)]
    return [Waited(series, 1 - own / series.median_seconds) for series, own in zip(merged, busy, strict=True)]


def idle_table(stages: int, forward: float, found: Sequence[Waited]) -> Table:
    """Planned and measured, ours and PyTorch's, by schedule."""
    rows, met = [], 0
    for schedule, ours, theirs in zip(SCHEDULES, found[::2], found[1::2], strict=True):
        planned = planned_idle(schedule, stages)
        off = 100 * (ours.idle - planned)
        met += abs(off) <= _POINTS
        ratio = compare(ours.series, theirs.series)
        rows.append(
            (
                schedule,
                f"{100 * planned:.1f} %",
                f"{100 * ours.idle:.1f} %",
                f"{off:+.1f}",
                f"{100 * theirs.idle:.1f} %",
                *_times(ours.series, theirs.series),
                ratio.verdict,
            )
        )
    title = (
        f"{stages} stages that sleep {forward * 1e3:g} ms forward, {_MICRO_BATCHES} micro-batches"
        f" ({blocks([found[0].series])})"
    )
    columns = ("schedule", "planned idle", "measured", "points", "PyTorch", *_TIMES, "verdict")
    remark = f"within {_POINTS:g} points of the plan: {met} of {len(rows)} schedules"
    return Table(title, columns, rows, (remark,))


_TIMES = ("ms", "PyTorch ms", "ratio", "paired ratio", "loss diff")


def _times(ours: Series, theirs: Series) -> tuple[str, ...]:
    c = compare(ours, theirs)
    return (
        f"{ours.median_seconds * 1e3:.1f}",
        f"{theirs.median_seconds * 1e3:.1f}",
        f"{c.ratio:.3f}",
        f"{c.paired.median:.3f} ({c.paired.low:.3f} .. {c.paired.high:.3f})",
        f"{c.loss_error:.0e}",
    )


def real_sides(options: Options, cluster: Cluster) -> Sequence[Side]:
    """The GPT, ours and PyTorch's under each schedule."""
    subject = deep_gpt(quick=options.quick, precision=options.precision).with_shards(_MICRO_BATCHES)
    ends = Ends(_tokens, _next_token_loss)
    found = []
    for schedule in SCHEDULES:
        text = f"replicas=1 pipeline={cluster.world_size} schedule={schedule}"
        found.append(paceline_side(schedule, subject.changed(strategy=Strategy.parse(text)), cluster, 1))
        other = TorchPipeline(subject, ends, schedule, cluster, _chunks(schedule))
        found.append(other.side(f"{schedule}, PyTorch"))
    return found


def _tokens(tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    return tokens_BT[:, :-1], tokens_BT[:, 1:]


def _next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def real_table(stages: int, found: Sequence[Series], options: Options) -> Table:
    """Ours beside PyTorch's, by schedule."""
    rows = [
        (schedule, *_times(ours, theirs), compare(ours, theirs).verdict)
        for schedule, ours, theirs in zip(SCHEDULES, found[::2], found[1::2], strict=True)
    ]
    title = (
        f"byte-gpt of 8 blocks, untied, {options.precision}, {stages} stages, {_MICRO_BATCHES} micro-batches"
        f" of 256 bytes ({blocks(found)})"
    )
    return Table(title, ("schedule", *_TIMES, "verdict"), rows)


def heavy_sides(light: float, micro_batches: int, cluster: Cluster) -> Sequence[Side]:
    """One layer in twelve is four times as heavy.

    Args:
        light: seconds of a forward of the others.
        micro_batches: of a step; the more, the more of it is the time of the slowest stage.
    """
    found = []
    for name, stages in _HEAVY_WAYS.items():
        subject = sleeping_chain([light * one for one in _HEAVY_SECONDS], micro_batches, Clock())
        text = f"replicas=1 pipeline=4 schedule=1f1b {stages}"
        found.append(paceline_side(name, subject.changed(strategy=Strategy.parse(text)), cluster, 1))
    return found


def measure(options: Options) -> Report:
    """All of it."""
    repeats = 3 if options.quick else 5
    tables: list[Table] = []
    data, idle = {}, {}
    for stages, forward in [(2, 0.004)] if options.quick else product((2, 4), _FORWARD_SECONDS):
        found = run_sleeping(stages, forward, repeats)
        tables.append(idle_table(stages, forward, found))
        name = f"{stages} stages that sleep {forward * 1e3:g} ms"
        data[name] = series_data([one.series for one in found])
        idle[name] = [one.idle for one in found]
    light = 0.001 if options.quick else 0.02
    sides = partial(heavy_sides, light, 2 * _MICRO_BATCHES)
    heavy = measure_pair(sides, repeats=repeats, steps=1, warmup=2, num_ranks=4)
    title = f"4 stages of 12 layers that sleep {light * 1e3:g} ms forward, the fifth four times as long"
    less = 100 * (1 - heavy[1].median_seconds / heavy[0].median_seconds)
    table = comparison_table(f"{title}, 1f1b, {2 * _MICRO_BATCHES} micro-batches", heavy, heavy[0].name)
    tables.append(replace(table, remarks=(f"by time a step takes {less:.0f} % less",)))
    data["one heavy layer"] = series_data(heavy)
    for stages in (2,) if options.quick else (2, 4):
        series = measure_pair(
            partial(real_sides, options), repeats=repeats, steps=1, warmup=2, num_ranks=stages
        )
        tables.append(real_table(stages, series, options))
        data[f"byte-gpt, {stages} stages"] = series_data(series)
    question = "Pipelines, a rank of one thread for each stage: idle time as planned, and beside PyTorch's."
    return Report(question, tables, {"cases": data, "idle": idle})


if __name__ == "__main__":
    present(measure, __doc__ or "")
