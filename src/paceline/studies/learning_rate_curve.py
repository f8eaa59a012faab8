"""The loss over a learning rate that rises from step to step, and a rate to train with. Pure.

The suggestion is where the smoothed loss falls fastest per factor of the rate. The lowest point of the curve
is an upper bound: from there on the rate is too large.

Source: Smith 2017, Cyclical Learning Rates for Training Neural Networks, arXiv:1506.01186, section 3.3; the
    steepest descent as suggestion is that of fast.ai's and Lightning's `lr_find`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from paceline.errors import DataError, RecipeError
from paceline.report.run_reader import to_float
from paceline.report.svg_chart import AxisScale, fit_scale
from paceline.studies.sweep_plot import render_svg, render_text

_SMOOTHING_FRACTION = 20  # the mean is over this fraction of the steps, to each side
_MIN_STEPS = 10
_CLEAR = 2.0  # a fall of this many standard deviations of the loss of a step is no accident
_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 300, 70, 50


@dataclass(frozen=True)
class LearningRateRange:
    """The rates of a run in which the rate rises geometrically from `low` to `high` in `steps` updates."""

    low: float
    high: float
    steps: int

    @classmethod
    def parse(cls, text: str, steps: int) -> LearningRateRange:
        """Parse `1e-6,1`.

        Raises:
            RecipeError: the text has another form, or the rates do not rise.
        """
        try:
            low, high = (float(part) for part in text.split(","))
        except ValueError:
            low = high = math.nan
        if not (0 < low < high < math.inf):
            raise RecipeError(
                f"expected two rising rates LOW,HIGH, found {text!r}",
                where="--lr-range",
                next_step="for example --lr-range 1e-6,1",
            )
        if steps < _MIN_STEPS:
            raise RecipeError(
                f"expected at least {_MIN_STEPS} steps, found {steps}",
                where="--lr-steps",
                next_step="leave it out for 100 steps",
            )
        return cls(low, high, steps)

    @property
    def overrides(self) -> list[str]:
        """The overrides of a recipe that make it such a run, without evaluations and other checkpoints."""
        rate = -math.log(self.high / self.low) / (self.steps - 1)
        return [
            f"steps={self.steps}",
            f"optimizer.lr={self.low!r}",
            f'schedule={{decay = "exponential", rate = {rate!r}}}',
            *(f"{table}={{}}" for table in ("evaluate", "checkpoint", "health", "average")),
        ]


@dataclass(frozen=True)
class LearningRatePoint:
    """One step: its rate, its loss, and the mean loss of the steps around it."""

    lr: float
    loss: float
    smoothed: float


@dataclass(frozen=True)
class LearningRateCurve:
    """The steps of a run with a rising rate, up to the first loss that is not finite.

    Args:
        points: in order.
        suggestion: the rate where the loss falls fastest.
        lowest: the rate with the lowest smoothed loss.
        end: why the run ended before its last step; empty if it did not.
    """

    points: tuple[LearningRatePoint, ...]
    suggestion: float
    lowest: float
    end: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        points = [{"lr": p.lr, "loss": p.loss, "smoothed": p.smoothed} for p in self.points]
        return {"suggestion": self.suggestion, "lowest": self.lowest, "end": self.end, "points": points}


def find_learning_rate(
    steps: Sequence[Mapping[str, Any]], rates: LearningRateRange, end: str = ""
) -> LearningRateCurve:
    """Return the curve of a run and its suggestion.

    Args:
        steps: records with `lr` and `loss`, in order.
        rates: of the run.
        end: why it ended early.
    Raises:
        RecipeError: the run had other rates, because its task brings an optimizer with a rate of its own.
        DataError: the loss did not fall anywhere, so there is no suggestion.
    """
    numbers = [(to_float(step["lr"]), to_float(step["loss"])) for step in steps]
    if numbers and not math.isclose(numbers[0][0], rates.low, rel_tol=1e-6):
        raise RecipeError(
            f"the first rate was {numbers[0][0]:.4g}, not {rates.low:.4g}: the task brings its own optimizer",
            where="--lr-range",
            next_step=f"begin the range with the rate of that optimizer: --lr-range"
            f" {numbers[0][0]:g},{numbers[0][0] * rates.high / rates.low:g}",
        )
    count = next((i for i, (_, loss) in enumerate(numbers) if not math.isfinite(loss)), len(numbers))
    numbers = numbers[:count]
    if len(numbers) < _MIN_STEPS:
        raise _no_descent_error(f"only {len(numbers)} steps had a finite loss", rates)
    losses, half = [loss for _, loss in numbers], max(1, len(numbers) // _SMOOTHING_FRACTION)
    smoothed = _smooth(losses, half)
    points = tuple(LearningRatePoint(lr, loss, s) for (lr, loss), s in zip(numbers, smoothed, strict=True))
    # Not at the ends, where the mean is over fewer steps: one lucky batch would be the lowest point.
    lowest = min(range(half, len(points) - half), key=lambda i: smoothed[i])
    noise = pstdev(loss - s for loss, s in zip(losses[: lowest + 1], smoothed, strict=False))
    if smoothed[half] - smoothed[lowest] <= _CLEAR * noise:
        raise _no_descent_error("the loss did not fall clearly", rates)
    steepest = min(range(half, lowest + 1), key=lambda i: _slope(points, i, half))
    return LearningRateCurve(points, points[steepest].lr, points[lowest].lr, end)


def _no_descent_error(what: str, rates: LearningRateRange) -> DataError:
    return DataError(
        f"{what} between the rates {rates.low:g} and {rates.high:g}",
        where="paceline sweep --find-lr",
        next_step="look at the plot, and try another --lr-range, more --lr-steps, or a larger batch",
    )


def _smooth(values: Sequence[float], half: int) -> list[float]:
    """Return means over up to `half` values to each side, equally many, so that a slope is not shifted."""
    sides = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
    return [fmean(values[i - side : i + side + 1]) for i, side in enumerate(sides)]


def _slope(points: Sequence[LearningRatePoint], i: int, half: int) -> float:
    """Return the change of the loss per factor e of the rate around a point."""
    before, after = points[i - half], points[min(i + half, len(points) - 1)]
    return (after.smoothed - before.smoothed) / math.log(after.lr / before.lr)


def render_curve_table(curve: LearningRateCurve, rows: int = 20) -> list[str]:
    """Return a table of about `rows` steps with bars of the smoothed loss, and the suggestion, as lines."""
    shown = curve.points[:: max(1, len(curve.points) // rows)]
    scale = fit_scale([p.smoothed for p in shown])
    lines = [f"{'rate':>10} {'loss':>10} {'smoothed':>10}"]
    for p in shown:
        bar = "#" * round(30 * min(1.0, max(0.0, scale(p.smoothed))))
        lines.append(f"{p.lr:>10.3g} {p.loss:>10.4g} {p.smoothed:>10.4g}  {bar}".rstrip())
    lines += [f"the run ended early: {curve.end}"] if curve.end else []
    lines.append(f"suggestion: optimizer.lr = {curve.suggestion:.2g}, where the loss falls fastest")
    lines.append(f"upper bound: {curve.lowest:.2g}, with the lowest loss; it rises from there")
    return lines


def render_curve_plot(curve: LearningRateCurve) -> str:
    """Return an SVG of the loss over the logarithm of the rate; a dashed line is the suggestion."""
    rates = [p.lr for p in curve.points]
    across = AxisScale(rates[0], rates[-1], logarithmic=True)
    # A diverged loss would flatten the rest: what is far above the start is cut off at the top.
    first, low = curve.points[0].smoothed, min(p.smoothed for p in curve.points)
    top = first + (first - low)
    up = fit_scale([*(min(p.loss, top) for p in curve.points), first])

    def place(lr: float, loss: float) -> str:
        return f"{_LEFT + across(lr) * _WIDTH:.1f},{_TOP + (1 - up(min(loss, top))) * _HEIGHT:.1f}"

    bottom, marked = _TOP + _HEIGHT, _LEFT + across(curve.suggestion) * _WIDTH
    title = f"loss by learning rate; suggestion {curve.suggestion:.2g}"
    body = [
        render_text(_LEFT, 24, title, "start", "bold"),
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{_LEFT + _WIDTH}" fill="none" stroke="#888"/>',
        f'<path d="M{marked:.1f} {_TOP}V{bottom}" stroke="#d55e00" stroke-dasharray="4 4"/>',
        *(render_text(_LEFT + across(x) * _WIDTH, bottom + 18, f"{x:g}") for x in across.ticks()),
        *(render_text(_LEFT - 6, _TOP + (1 - up(y)) * _HEIGHT + 4, f"{y:g}", "end") for y in up.ticks()),
    ]
    for color, values in (
        ("#bbb", [place(p.lr, p.loss) for p in curve.points]),
        ("#0072b2", [place(p.lr, p.smoothed) for p in curve.points]),
    ):
        body.append(f'<polyline points="{" ".join(values)}" fill="none" stroke="{color}"/>')
    return render_svg(_LEFT + _WIDTH + 40, bottom + 40, title, body)
