"""The bytes that the ranks of a run sent: counted, predicted by a closed form, and over the steps. Pure.

The ledger of a rank counts what it really passed to each collective. The prediction follows from the size of
the model and the number of ranks alone, so a difference between the two means something. Strategies without a
closed form have no prediction.
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
    from paceline.recipe.registry import SyncSpec
    from paceline.recipe.strategy import Strategy

_NATIVE_ROUTE = "native"  # as records name it; a report does not import the recipe package


@dataclass(frozen=True)
class SentBytes:
    """The bytes that one rank sent since the run was started or resumed last.

    Args:
        rank: global rank.
        rounds: number of rounds; a round is a step, or the steps between two synchronizations.
        steps: number of steps in these rounds.
        counted_bytes: from the ledger of the rank.
        expected_bytes: from the closed form; None if this strategy has none.
        dense_bytes: closed form of plain data parallelism for the same steps.
    """

    rank: int
    rounds: int
    steps: int
    counted_bytes: float
    expected_bytes: float | None
    dense_bytes: float

    @property
    def agrees(self) -> bool | None:
        """Whether both numbers are equal up to rounding; None without a closed form."""
        if self.expected_bytes is None:
            return None
        return abs(self.counted_bytes - self.expected_bytes) <= 1e-9 * max(1.0, self.expected_bytes)


def compare_sent_bytes(run: RecordedRun) -> list[SentBytes]:
    """Return the bytes of every rank since the last start, ascending by rank; empty without records."""
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
    # route=auto may have chosen a route of its own by the size of a buffer, which sends other bytes.
    by_size = any(
        record.get("event") == "route" and record["choice"] != _NATIVE_ROUTE
        for record in run.last_training_records
    )
    known = has_closed_form(strategy) and not run.start["ordered"] and not by_size
    round_bytes = (
        dense + _ring_factor(run.ranks) * (_sync_spec(strategy).extra_tally_bytes or 0) if known else 0.0
    )
    return [
        SentBytes(rank, rounds, steps, num_bytes, rounds * round_bytes if known else None, steps * dense)
        for rank, (rounds, num_bytes) in sorted(counted.items())
    ]


def has_closed_form(strategy: str) -> bool:
    """Return whether a round sends nothing but one all_reduce of whole fp32 gradients and of a tally."""
    parsed = _parse_strategy(strategy)
    if parsed is None:
        return False
    plain = (
        parsed.layout == "replicate" and parsed.lanes == 1 and not parsed.servers and parsed.codec_spec.exact
    )
    return plain and parsed.route_spec.ring_bytes and parsed.sync_spec.extra_tally_bytes is not None


def all_reduce_bytes(run: RecordedRun, *sizes: str) -> float:
    """Return the bytes that one rank sends in a ring all_reduce of n bytes over P ranks: 2 (P - 1) / P n.

    Args:
        sizes: fields of the event "run" whose sum is n.

    Source: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in
        MPICH, section 4.
    """
    return _ring_factor(run.ranks) * sum(float(run.start[size]) for size in sizes)


def _ring_factor(ranks: int) -> float:
    return 2.0 * (max(1, ranks) - 1) / max(1, ranks)


def _parse_strategy(strategy: str) -> Strategy | None:
    """Parse the strategy of a record; None if it has words of a package that is not installed here."""
    from paceline.recipe.strategy import Strategy  # commands that only name a run folder do without

    try:
        return Strategy.parse(strategy)
    except StrategyError:
        return None


def _sync_spec(strategy: str) -> SyncSpec:
    parsed = _parse_strategy(strategy)
    assert parsed is not None
    return parsed.sync_spec


def cumulative_sent_bytes(run: RecordedRun) -> Callable[[float], float]:
    """Return a function from steps taken to the bytes that all ranks had sent by then.

    Ranks report once per window of rounds; inside a window the bytes are interpolated. Steps that a resumed
    run takes again count twice.
    """
    windows: dict[int, float] = defaultdict(float)
    for record in run.of("ranks"):
        windows[int(record["step"]) + 1] += to_float(record["sent_bytes"])
    ends, totals = [0], [0.0]
    for end in sorted(windows):
        ends.append(end)
        totals.append(totals[-1] + windows[end])

    def interpolate(step: float) -> float:
        window = bisect_left(ends, step)
        if window == 0 or window == len(ends):
            return totals[0 if window == 0 else -1]
        fraction = (step - ends[window - 1]) / (ends[window] - ends[window - 1])
        return totals[window - 1] + fraction * (totals[window] - totals[window - 1])

    return interpolate
