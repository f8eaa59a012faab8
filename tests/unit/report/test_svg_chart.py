"""Curves: nothing that a reader must see is lost by thinning, and scales and ticks are round."""

import math

import pytest

from paceline.report.svg_chart import (
    AxisScale,
    ChartCurve,
    downsample,
    finite_segments,
    fit_scale,
    format_ticks,
    render_chart,
    running_mean,
)


def test_thinning_keeps_the_spikes_and_the_ends() -> None:
    points = [(float(i), 1.0) for i in range(100_000)]
    points[54_321], points[777] = (54_321.0, 99.0), (777.0, -5.0)
    found = downsample(points)
    assert len(found) < 1000 and (54_321.0, 99.0) in found and (777.0, -5.0) in found
    assert found == sorted(found) and found[0][0] == 0.0
    assert downsample(points[:100]) == points[:100]


def test_the_running_mean_of_a_line_is_the_line_and_of_noise_is_flat() -> None:
    line = [(float(i), 2.0 * i) for i in range(50)]
    assert running_mean(line) == line
    noise = [(float(i), float(i % 2)) for i in range(4000)]
    assert all(abs(y - 0.5) < 0.02 for _, y in running_mean(noise)) and running_mean(noise)[-1][0] == 3999.0


def test_what_is_not_finite_breaks_a_line() -> None:
    points = [(0.0, 1.0), (1.0, math.nan), (2.0, 3.0), (3.0, math.inf), (4.0, 5.0), (5.0, 6.0)]
    assert list(finite_segments(points)) == [[(0.0, 1.0)], [(2.0, 3.0)], [(4.0, 5.0), (5.0, 6.0)]]
    assert [p[0] for p in running_mean(points)] == [0.0, 2.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("low", "high", "logarithmic", "ticks"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (0.93, 1.02, False, [0.94, 0.96, 0.98, 1.0, 1.02]),
        (0.003, 40.0, True, [0.01, 0.1, 1, 10]),
        (3.0, 70.0, True, [5, 10, 20, 50]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, logarithmic: bool, ticks: list[float]) -> None:
    assert AxisScale(low, high, logarithmic).ticks() == pytest.approx(ticks)


def test_a_scale_is_logarithmic_only_if_that_helps() -> None:
    assert fit_scale([0.01, 5.0], may_be_logarithmic=True).logarithmic
    assert not fit_scale([0.0, 5.0], may_be_logarithmic=True).logarithmic
    assert not fit_scale([1.0, 5.0], may_be_logarithmic=True).logarithmic
    assert fit_scale([7.0, 9.0], from_zero=True).low == 0.0
    for values in ([3.0], [0.0], [math.nan]):
        assert fit_scale(values).low < fit_scale(values).high


def test_a_chart_of_nothing_is_nothing_and_of_one_point_is_a_dot() -> None:
    assert render_chart("Loss", [ChartCurve("a", "c1", [])]) == ""
    assert 'class="dot"' in render_chart("Loss", [ChartCurve("a", "c1", [(3.0, 0.5)])])


def test_ticks_of_a_narrow_range_are_told_apart() -> None:
    ticks = AxisScale(0.6138, 0.6142).ticks()
    assert len({*format_ticks(ticks)}) == len(ticks) >= 4
    assert format_ticks([0.5, 1.0, 1.5]) == ["0.5", "1", "1.5"]
    assert format_ticks([2.0, 2.0]) == ["2", "2"]


def test_an_axis_does_not_begin_at_minus_zero() -> None:
    chart = render_chart("Loss", [ChartCurve("a", "loss", [(-0.0, 1.0), (8.0, 2.0)])])
    assert "-0<" not in chart and ">0<" in chart


@pytest.mark.parametrize("step", [0.0, 5.0])
def test_a_single_point_is_a_dot_even_at_step_zero(step: float) -> None:
    html = str(render_chart("return", [ChartCurve("mean", "c0", [(step, 3.0)])]))
    assert 'class="dot"' in html and "nan" not in html
