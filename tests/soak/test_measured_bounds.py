"""Bounds of time that the kept benchmarks show, asserted: each is a ratio of two sides of one measurement.

The measuring functions are those of the benchmarks, with smaller sizes. Where it can be, what takes time
sleeps, so that other processes of the machine change little; A9, M3 and N4 need two free cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks import checkpoint, checkpoint_ways, loader, reproducible
from benchmarks.measure import compare
from benchmarks.pair import measure_pair
from benchmarks.pipeline_library import SCHEDULES
from benchmarks.pipelines import Waited, heavy_sides, planned_idle, run_sleeping
from benchmarks.report import Options
from benchmarks.stragglers import STRATEGIES, Course, measure_one
from benchmarks.subjects import byte_gpt
from paceline.job.cluster import Cluster
from paceline.testing import run_ranks

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
_STAGES = 2


@pytest.mark.capability("A9")
def test_two_lanes_are_faster_than_one() -> None:
    """The same bits, by one thread and by two."""
    one = reproducible.Way("1 lane", reproducible=True)
    ways = (one, replace(one, name="2 lanes", lanes=2))
    case = reproducible.Case("lanes", "mlp", 1, ways, steps=2, precision="fp32")
    build = partial(reproducible.build_sides, case, Options())
    single, double = measure_pair(build, repeats=5, steps=case.steps, warmup=2, num_ranks=1)
    comparison = compare(double, single)
    assert comparison.loss_error == 0.0
    assert 1 / comparison.ratio > 1.3, (single.seconds, double.seconds)


@pytest.mark.capability("A13")
def test_shares_by_speed_make_a_step_a_quarter_shorter_beside_a_slow_worker() -> None:
    """Of four workers one is three times as slow; samples that are applied a second, while it is."""
    course = Course(steps=120, begin=2.0, end=8.0, factor=3.0)
    equal, shared = (measure_one(STRATEGIES[name], course, 1) for name in ("every-step", "shares by speed"))
    assert equal.slow / shared.slow <= 0.75, (equal.slow, shared.slow)


@pytest.mark.capability("I7")
def test_a_straggler_that_is_ten_times_as_slow_costs_at_most_a_tenth_with_a_backup() -> None:
    """Applied samples a second before the worker is slow, and while it is."""
    course = Course(steps=480, begin=4.0, end=16.0, factor=10.0)
    measured = measure_one(STRATEGIES["backup:1"], course, 1)
    assert measured.clean / measured.slow <= 1.10, (measured.clean, measured.slow)


@pytest.fixture(scope="module")
def sleeping() -> dict[str, Waited]:
    """Pipelines of two stages that sleep, by schedule."""
    # Where other programs run, messages and wake-ups take a twentieth of a step of stages of 30 ms.
    return dict(zip(SCHEDULES, run_sleeping(_STAGES, 0.1, 3)[::2], strict=True))


@pytest.mark.capability("D7")
def test_stages_wait_as_long_as_their_schedule_says(sleeping: dict[str, Waited]) -> None:
    off = {schedule: side.idle - planned_idle(schedule, _STAGES) for schedule, side in sleeping.items()}
    assert max(map(abs, off.values())) <= 0.05, off


@pytest.mark.capability("D5")
def test_interleaved_stages_wait_less_than_others(sleeping: dict[str, Waited]) -> None:
    idle = {schedule: side.idle for schedule, side in sleeping.items()}
    assert idle["interleaved:2"] < idle["1f1b"], idle


@pytest.mark.capability("D8")
def test_stages_by_time_are_a_quarter_faster_than_by_number_of_layers() -> None:
    """One layer of twelve is four times as heavy; 32 micro-batches."""
    sides = partial(heavy_sides, 0.008, 32)
    by_number, by_time = measure_pair(sides, repeats=3, steps=1, warmup=2, num_ranks=4)
    comparison = compare(by_time, by_number)
    assert comparison.loss_error < 1e-6
    assert comparison.ratio <= 0.75, (by_number.seconds, by_time.seconds)


@pytest.mark.capability("M3")
def test_steps_wait_for_data_less_than_a_twentieth_of_their_time() -> None:
    """Samples take a tenth of the time of a step to unpack, which loader processes do beside it."""

    def shares(cluster: Cluster) -> list[Sequence[float]]:
        gpt = byte_gpt(quick=False, precision="fp32")
        costly = replace(gpt, task=replace(gpt.task, data=loader.Costly(gpt.task.data, loader.Packed(16), 1)))
        _, sessions = loader.train(costly, quick=True)
        found = [waiting.shares for waiting in sessions]
        for waiting in sessions:
            waiting.session.close()
        return found

    [(without, *with_workers)] = run_ranks(shares, 1, reuse=False)
    medians = [statistics.median(own) for own in with_workers]
    assert max(medians) < 0.05, (statistics.median(without), medians)


@pytest.mark.capability("N4")
def test_a_save_beside_the_steps_stalls_them_for_a_tenth_of_a_blocking_save(tmp_path: Path) -> None:
    """A state of 512 MiB; a slow disk has forty steps to write it."""
    size = replace(checkpoint.FULL, repeats=3, steps=40)
    job = checkpoint_ways.Job(size)
    job.step()
    with ExitStack() as stack:
        turn = checkpoint_ways.Turn(tmp_path, job.num_bytes())
        blocking = stack.enter_context(
            checkpoint_ways.our_saver(job, tmp_path / "blocking", background=False)
        )
        beside = stack.enter_context(checkpoint_ways.our_saver(job, tmp_path / "beside", background=True))
        ways = checkpoint.our_ways(blocking, beside)
        checkpoint.take_turns(job, ways, size, turn)
    _, whole, stalled = (statistics.median(way.blocked) for way in ways)
    assert stalled < 0.1 * whole, (stalled, whole)
