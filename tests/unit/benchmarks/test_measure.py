"""The benchmarks compare what they say: turns, ratios, and sides that do the same work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from benchmarks.loops import HandLoop, bare, paceline_side
from benchmarks.machine import number_format
from benchmarks.measure import FEWEST_BLOCKS, Series, Side, compare, merge_ranks, take_turns
from benchmarks.subjects import Subject, mlp
from paceline.job.cluster import Cluster


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Sides set the number of threads; the next test gets its own back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_sides_take_turns_in_alternating_order() -> None:
    ran: list[str] = []

    def step(name: str) -> float:
        ran.append(name)
        return float(len(ran))

    found = take_turns([Side(n, partial(step, n)) for n in "ab"], repeats=3, steps=2, warmup=1)
    assert "".join(ran) == "ab" + "aabb" + "bbaa" + "aabb"
    assert [len(series.seconds) for series in found] == [3, 3]
    assert [len(series.losses) for series in found] == [7, 7]


@pytest.mark.parametrize(("budget", "blocks", "steps"), [(60.0, 5, 4), (30.0, 3, 2), (1.0, FEWEST_BLOCKS, 1)])
def test_a_slow_machine_measures_shorter_and_fewer_blocks(budget: float, blocks: int, steps: int) -> None:
    sides = [Side(name, lambda: 0.0) for name in "ab"]
    found = take_turns(
        sides, repeats=5, steps=4, warmup=1, budget_seconds=budget, slowest=lambda seconds: 10.0
    )
    assert [(len(s.seconds), s.steps) for s in found] == [(blocks, steps)] * 2


def test_the_number_format_is_what_was_asked_for_or_has_a_reason() -> None:
    assert number_format("fp32") == ("fp32", "fp32, as asked for")
    chosen, reason = number_format("auto")
    assert chosen in ("bf16", "fp32") and reason.startswith(f"{chosen}, as ")


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(1.029, "equal"), (0.971, "equal"), (1.031, "slower"), (0.969, "faster")]
)
def test_a_band_of_three_percent_counts_as_equal(seconds: float, verdict: str) -> None:
    reference = Series("reference", (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (2.0, 2.0))
    other = Series("other", (seconds, seconds, 9.0), (1.0, 1.0, 1.0), (2.0, 2.5))
    comparison = compare(other, reference)
    assert comparison.verdict == verdict
    assert comparison.ratio == pytest.approx(seconds)
    assert comparison.loss_error == pytest.approx(0.25)


def test_a_job_is_as_slow_as_its_slowest_rank_and_idle_ranks_do_not_count() -> None:
    first = Series("x", (1.0, 4.0), (1.0, 1.0), (2.0,))
    second = Series("x", (3.0, 2.0), (1.0, 2.0), (4.0,))
    idle = Series("x", (9.0, 9.0), (0.0, 0.0), (math.nan,))
    (merged,) = merge_ranks([[first], [second], [idle]])
    assert merged == Series("x", (3.0, 4.0), (2.0, 3.0), (3.0,))


def losses(side: Side, steps: int) -> list[float]:
    return [side.step() for _ in range(steps)]


def tiny(shards: int) -> Subject:
    return mlp((16,), batch_size=8, shards=shards, inputs=256)


@pytest.mark.parametrize("shards", [1, 4])
def test_the_bare_loop_trains_what_paceline_trains(shards: int) -> None:
    subject = tiny(shards)
    by_hand = losses(HandLoop(subject, bare(subject)).side(), 30)
    by_paceline = losses(paceline_side("Paceline", subject, Cluster.single(), 1), 30)
    assert by_paceline == pytest.approx(by_hand, rel=1e-5)


def test_the_comparison_of_losses_sees_other_work() -> None:
    subject = tiny(1)
    unclipped = subject.changed(optimizer=subject.recipe.optimizer.replace(clip_norm=None, lr=1e-3))
    by_hand = losses(HandLoop(unclipped, bare(unclipped)).side(), 30)
    by_paceline = losses(paceline_side("Paceline", subject, Cluster.single(), 1), 30)
    apart = [abs(a - b) / b for a, b in itertools.zip_longest(by_hand, by_paceline)]
    assert max(apart) > 1e-3
