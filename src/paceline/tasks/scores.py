"""Scores that are no means: each has the sums that a loss returns, and what follows from them at the end.

`Loss(total, count, {**f1_sums(predicted, actual)})` with `Task(..., derive=f1)`. Sums of parts add up to
the sums of the whole, so a score does not depend on how the samples were dealt out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_BIN = "_auc"


def perplexity(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the perplexity, exp of the mean loss; a `Task.derive`."""
    count = sums["count"]
    return {"perplexity": math.exp(min(sums["loss"] / count, 700.0)) if count else math.nan}


def f1_sums(predicted: Tensor, actual: Tensor) -> dict[str, Tensor]:
    """Count true positives, false positives and false negatives of bool [N] predictions."""
    yes, right = predicted.bool(), actual.bool()
    return {"_tp": (yes & right).sum(), "_fp": (yes & ~right).sum(), "_fn": (~yes & right).sum()}


def f1(sums: Mapping[str, float]) -> dict[str, float]:
    """Return precision, recall and their harmonic mean, from `f1_sums`; a `Task.derive`."""
    tp, fp, fn = sums["_tp"], sums["_fp"], sums["_fn"]
    return {
        "precision": _share(tp, tp + fp),
        "recall": _share(tp, tp + fn),
        "f1": _share(2 * tp, 2 * tp + fp + fn),
    }


def auc_sums(scores: Tensor, actual: Tensor, bins: int = 64) -> dict[str, Tensor]:
    """Count positives and negatives with a score in each of equal bins of [0, 1].

    Args:
        scores: float [N], between 0 and 1.
        actual: bool [N].
    """
    bin_index = (scores.detach().float() * bins).long().clamp(0, bins - 1)
    positive = actual.bool()
    ups = torch.bincount(bin_index[positive], minlength=bins)
    downs = torch.bincount(bin_index[~positive], minlength=bins)
    return {
        name: counts[i]
        for i in range(bins)
        for name, counts in ((f"{_BIN}+{i:03d}", ups), (f"{_BIN}-{i:03d}", downs))
    }


def auc(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the area under the ROC curve, from `auc_sums`; ties in a bin count half; a `Task.derive`."""
    bins = sum(name.startswith(f"{_BIN}+") for name in sums)
    ups = [sums[f"{_BIN}+{i:03d}"] for i in range(bins)]
    downs = [sums[f"{_BIN}-{i:03d}"] for i in range(bins)]
    below = wins = 0.0
    for up, down in zip(ups, downs, strict=True):
        wins += up * (below + down / 2)
        below += down
    return {"auc": _share(wins, sum(ups) * sum(downs))}


def _share(count: float, whole: float) -> float:
    return count / whole if whole else math.nan
