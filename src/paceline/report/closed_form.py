"""Bytes that the rounds of a run have to send by the closed form, beside those that were counted.

The ledger counts what was really passed to each collective, on every rank. Here the same number follows from
the model's size and the number of ranks: two sources, so that a difference means something. Where no form is
known, none is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import StrategyError
from paceline.report.read import Run

if TYPE_CHECKING:
    from paceline.recipe import Strategy
    from paceline.recipe.specs import SyncSpec


@dataclass(frozen=True)
class Sent:
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


def sent(run: Run) -> list[Sent]:
    """What every rank sent in the steps of the last start; empty if that was not recorded."""
    counted: dict[int, tuple[int, float]] = {}
    steps = 0
    for record in run.last_trained:
        if record.get("event") == "ranks":
            rounds, num_bytes = counted.get(record["rank"], (0, 0.0))
            counted[record["rank"]] = (rounds + record["rounds"], num_bytes + record["sent_bytes"])
            steps = record["step"] + 1 - run.start.get("step", 0)
    if not counted or not run.start:
        return []
    dense = all_reduced(run, "gradient_bytes", "tally_bytes")
    strategy = str(run.start["strategy"])
    by_size = any(
        record.get("event") == "route" and record["choice"] != "native" for record in run.last_trained
    )
    known = is_plain(strategy) and not run.start["ordered"] and not by_size
    each = dense + _ring(run.ranks) * (_rule(strategy).more_tally_bytes or 0) if known else 0.0
    return [
        Sent(rank, rounds, steps, num_bytes, rounds * each if known else None, steps * dense)
        for rank, (rounds, num_bytes) in sorted(counted.items())
    ]


def is_plain(strategy: str) -> bool:
    """Whether replicas add up whole fp32 tensors and a tally once a round, and send nothing else."""
    found = _parsed(strategy)
    if found is None:
        return False
    whole = found.layout == "replicate" and found.lanes == 1 and not found.servers and found.form.exact
    return whole and found.path.ring_bytes and found.rule.more_tally_bytes is not None


def all_reduced(run: Run, *sizes: str) -> float:
    """Bytes that one rank sends to add up tensors of these sizes, once: 2 (P - 1) / P n.

    Source: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication Operations in
        MPICH, section 4.
    """
    return _ring(run.ranks) * sum(float(run.start[size]) for size in sizes)


def _ring(ranks: int) -> float:
    return 2.0 * (max(1, ranks) - 1) / max(1, ranks)


def _parsed(strategy: str) -> Strategy | None:
    """What a record says; None: a word that is not known here."""
    from paceline.recipe import Strategy  # commands that only name a run folder do without

    try:
        return Strategy.parse(strategy)
    except StrategyError:
        return None


def _rule(strategy: str) -> SyncSpec:
    found = _parsed(strategy)
    assert found is not None
    return found.rule
