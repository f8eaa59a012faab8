"""The critical batch size, beyond which larger batches save few steps. Pure.

Source: McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv:1812.06162, section 2: the
steps S and the samples E = S B that reach a target obey (S / S_min - 1) (E / E_min - 1) = 1, so that
S = S_min (1 + B_crit / B).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

_MIN_BATCH_SIZES = 3


@dataclass(frozen=True)
class CriticalBatch:
    """A fit of S = S_min (1 + B_crit / B).

    Args:
        batch: B_crit; None if steps fall as 1 / B for all measured batches, so that B_crit exceeds them.
        fewest_steps: S_min.
        savings: (batch, next batch, steps with the first / steps with the second); with perfect scaling
            the last is the ratio of the batches.
    """

    batch: float | None
    fewest_steps: float
    savings: tuple[tuple[int, int, float], ...]


def find_critical_batch(steps: Mapping[int, float]) -> CriticalBatch | None:
    """Fit S over 1 / B by least squares of relative errors.

    Args:
        steps: number of steps to the target, by batch size.
    Returns:
        None with fewer than three batch sizes: two points fit any line.
    """
    if len(steps) < _MIN_BATCH_SIZES:
        return None
    batches = sorted(steps)
    savings = tuple((a, b, steps[a] / steps[b]) for a, b in itertools.pairwise(batches))
    # These weights make errors relative; else the smallest batch, with the most steps, would decide.
    intercept, slope = _fit_line([(1 / b, steps[b], steps[b] ** -2) for b in batches])
    # A line that does not rise means that larger batches save nothing; one through the origin saves all.
    if slope <= 0:
        batch: float | None = 0.0
    else:
        batch = slope / intercept if intercept > 0 else None
    return CriticalBatch(batch, max(0.0, intercept), savings)


def _fit_line(points: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Return intercept and slope of y over x, by weighted least squares of (x, y, weight)."""
    total = sum(w for _, _, w in points)
    x_mean = sum(w * x for x, _, w in points) / total
    y_mean = sum(w * y for _, y, w in points) / total
    spread = sum(w * (x - x_mean) ** 2 for x, _, w in points)
    slope = sum(w * (x - x_mean) * (y - y_mean) for x, y, w in points) / spread
    return y_mean - slope * x_mean, slope
