"""Bytes that the rounds of a run have to send by the closed form, beside those that were counted.

The ledger counts what was really passed to each collective, on every rank. Here the same number follows from
the model's size and the number of ranks: two sources, so that a difference means something. Where no form is
known, none is given.

Bytes that all ranks had sent after some number of steps, from what ranks report window by window.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import StrategyError
from paceline.report.run_reader import RecordedRun, to_float

if TYPE_CHECKING:
    from paceline.recipe.registry.word_spec import SyncSpec
    from paceline.recipe.strategy import Strategy


@dataclass(frozen=True)
class SentBytes:
    """Bytes of one rank, over the steps since the run was started or resumed last.

    Args:
        rank: whose.
        rounds: how many the numbers are of; a round is a step, or the steps between two agreements.
        steps: in these rounds.
        counted_bytes: by the ledger.
        expected_bytes: by the closed form; None: no form is known for this strategy.
        dense_bytes: what replicas would send that agree in every step, by the closed form.
    """

    rank: int
    rounds: int
    steps: int
    counted_bytes: float
    expected_bytes: float | None
    dense_bytes: float

    @property
    def agrees(self) -> bool | None:
        """Whether both are the same to rounding; None: there is nothing to compare."""
        if self.expected_bytes is None:
            return None
        return abs(self.counted_bytes - self.expected_bytes) <= 1e-9 * max(1.0, self.expected_bytes)


def compare_sent_bytes(run: RecordedRun) -> list[SentBytes]:
    """What every rank sent in the steps of the last start; empty if that was not recorded."""
    counted: dict[int, tuple[int, float]] = {}
    steps = 0
    for record in run.last_training_records:
        if record.get("event") == "ranks":
            rounds, num_bytes = counted.get(record["rank"], (0, 0.0))
            counted[record["rank"]] = (rounds + record["rounds"], num_bytes + record["sent_bytes"])
            steps = record["step"] + 1 - run.start.get("step", 0)
    if not counted or not run.start:
        return []
    dense = all_reduce_bytes(run, "gradient_bytes", "tally_bytes")
    strategy = str(run.start["strategy"])
    by_size = any(
        record.get("event") == "route" and record["choice"] != "native"
        for record in run.last_training_records
    )
    known = has_closed_form(strategy) and not run.start["ordered"] and not by_size
    each = dense + _ring_factor(run.ranks) * (_sync_spec(strategy).extra_tally_bytes or 0) if known else 0.0
    return [
        SentBytes(rank, rounds, steps, num_bytes, rounds * each if known else None, steps * dense)
        for rank, (rounds, num_bytes) in sorted(counted.items())
    ]


def has_closed_form(strategy: str) -> bool:
    """Whether replicas add up whole fp32 tensors and a tally once a round, and send nothing else."""
    found = _parse_strategy(strategy)
    if found is None:
        return False
    whole = found.layout == "replicate" and found.lanes == 1 and not found.servers and found.form.exact
    return whole and found.path.ring_bytes and found.rule.extra_tally_bytes is not None


def all_reduce_bytes(run: RecordedRun, *sizes: str) -> float:
    """Bytes that one rank sends to add up tensors of these sizes, once: 2 (P - 1) / P n.

    Source: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in
        MPICH, section 4.
    """
    return _ring_factor(run.ranks) * sum(float(run.start[size]) for size in sizes)


def _ring_factor(ranks: int) -> float:
    return 2.0 * (max(1, ranks) - 1) / max(1, ranks)


def _parse_strategy(strategy: str) -> Strategy | None:
    """What a record says; None: a word that is not known here."""
    from paceline.recipe.strategy import Strategy  # commands that only name a run folder do without

    try:
        return Strategy.parse(strategy)
    except StrategyError:
        return None


def _sync_spec(strategy: str) -> SyncSpec:
    found = _parse_strategy(strategy)
    assert found is not None
    return found.rule


def cumulative_sent_bytes(run: RecordedRun) -> Callable[[float], float]:
    """Bytes by steps taken, as if they were sent evenly inside of a window; what a resumed run repeats counts
    again."""
    windows: dict[int, float] = defaultdict(float)
    for record in run.of("ranks"):
        windows[int(record["step"]) + 1] += to_float(record["sent_bytes"])
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
