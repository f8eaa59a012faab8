"""From the numbers of rounds to one record a rank: sums, the slowest round, and who waited for whom."""

import pytest

from paceline.observe import PHASES
from paceline.observe.step_stats import RANK_COLUMNS, build_rank_records


def row(seconds: float, communication: float, busy: float, exposed: float, peak: float = 1.0) -> list[float]:
    """One round, in the order of the columns."""
    values = dict.fromkeys(RANK_COLUMNS, 0.0) | {"seconds": seconds, "communication": communication}
    values |= {"busy_seconds": busy, "exposed_seconds": exposed, "sent_bytes": 100.0, "cpu_seconds": 0.5}
    return [(values | {"peak_bytes": peak})[name] for name in RANK_COLUMNS]


@pytest.mark.capability("P1", "P10")
def test_a_record_sums_the_rounds_of_a_rank() -> None:
    rounds = [row(1.0, 0.25, 0.5, 0.25, peak=8.0), row(3.0, 0.5, 0.25, 0.5, peak=9.0)]
    (record,) = build_rank_records(7, {0: rounds})
    assert record["phases"] == {**dict.fromkeys(PHASES, 0.0), "communication": 0.75}
    assert (record["seconds"], record["slowest_seconds"], record["rounds"]) == (4.0, 3.0, 2)
    assert (record["sent_bytes"], record["cpu_seconds"], record["peak_bytes"]) == (200.0, 1.0, 9.0)
    assert record["hidden_seconds"] == 0.25  # of the first round; in the second nothing was hidden
    assert (record["step"], record["rank"], record["waiting_seconds"]) == (7, 0, 0.0)


@pytest.mark.capability("P10")
def test_ranks_wait_for_the_slowest_of_each_round() -> None:
    """In the first round rank 1 comes last, in the second rank 0: each waits for the other once."""
    first = [row(2.0, 1.5, 1.5, 1.5), row(2.0, 0.5, 0.5, 0.5)]
    second = [row(2.0, 0.5, 0.5, 0.5), row(2.0, 0.75, 0.75, 0.75)]
    assert [record["waiting_seconds"] for record in build_rank_records(1, {0: first, 3: second})] == [
        1.0,
        0.25,
    ]
