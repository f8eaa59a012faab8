"""Rules that stop trials before their end. Pure: scores in, trials that continue out.

`halving` compares the trials of a batch with each other, `median` with those of earlier batches; both see
the same scores with any number of workers. `asha` compares a trial with those that reached the rung before
it, so its decisions depend on which trial arrived first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from paceline.search.space import StopRecipe

_MIN_EARLIER_TRIALS = 4


def surviving_trials(stop: StopRecipe, scores: Mapping[int, float], earlier: Sequence[float]) -> set[int]:
    """Return the trials that continue after a rung.

    Args:
        stop: the rule.
        scores: of the trials of a batch at the rung, by number; lower is better.
        earlier: scores of the trials of earlier batches at this rung.
    Source: halving: Jamieson and Talwalkar 2016, arXiv:1502.07943; median: Golovin et al. 2017, Vizier,
        section 3.2.
    """
    if stop.rule == "halving":
        num_kept = math.ceil(len(scores) * stop.keep)
        return set(sorted(scores, key=lambda number: (scores[number], number))[:num_kept])
    if stop.rule == "median" and len(earlier) >= _MIN_EARLIER_TRIALS:
        middle = median(earlier)
        return {number for number, score in scores.items() if score <= middle}
    return set(scores)


def continues_in_asha(keep: float, score: float, arrived: Sequence[float]) -> bool:
    """Return whether a trial continues that reaches a rung now.

    Args:
        keep: share of the trials that continues.
        score: of the trial; lower is better.
        arrived: scores of all trials that reached the rung, with this one.
    Source: Li et al. 2020, ASHA, arXiv:1810.05934, in its stopping variant.
    """
    num_kept = max(1, int(len(arrived) * keep))
    return math.isfinite(score) and sum(other < score for other in arrived) < num_kept
