"""Bytes that all ranks had sent after some number of steps, from what ranks report window by window."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable

from paceline.report.read import Run, number


def sent_bytes(run: Run) -> Callable[[float], float]:
    """Bytes by steps taken, as if they were sent evenly inside of a window; what a resumed run repeats counts
    again."""
    windows: dict[int, float] = defaultdict(float)
    for record in run.of("ranks"):
        windows[int(record["step"]) + 1] += number(record["sent_bytes"])
    ends, totals = [0], [0.0]
    for end in sorted(windows):
        ends.append(end)
        totals.append(totals[-1] + windows[end])

    def sent(step: float) -> float:
        at = bisect_left(ends, step)
        if at == 0 or at == len(ends):
            return totals[0 if at == 0 else -1]
        share = (step - ends[at - 1]) / (ends[at] - ends[at - 1])
        return totals[at - 1] + share * (totals[at] - totals[at - 1])

    return sent
