"""The ledger: calls and bytes by operation and group; shares of time that nobody waited for."""

import time

import pytest

from paceline.comm import ByteLedger, LedgerEntry


@pytest.mark.capability("G14")
def test_rows_are_kept_apart_by_operation_and_by_group() -> None:
    ledger = ByteLedger()
    for op, group, num_bytes in [
        ("all_reduce", "replica", 100),
        ("all_reduce", "replica", 50),
        ("all_reduce", "tensor", 8),
        ("broadcast", "replica", 30),
    ]:
        ledger.count_call(op, group, num_bytes, world=4)
    assert {row: (e.calls, e.payload_bytes, e.sent_bytes) for row, e in ledger.rows.items()} == {
        ("all_reduce", "replica"): (2, 150, 225.0),
        ("all_reduce", "tensor"): (1, 8, 12.0),
        ("broadcast", "replica"): (1, 30, 22.5),
    }


@pytest.mark.capability("G14")
def test_the_total_is_the_sum_of_the_rows_in_every_field() -> None:
    ledger = ByteLedger()
    for seconds, op in enumerate(("all_reduce", "all_gather", "all_reduce"), start=1):
        entry = ledger.count_call(op, "replica", 64, world=2)
        entry.busy_seconds += seconds
        entry.exposed_seconds += seconds / 4
    assert ledger.total() == LedgerEntry(3, 192, 192.0, 6.0, 1.5)
    assert ByteLedger().total() == LedgerEntry()


@pytest.mark.capability("P10")
def test_calls_that_overlap_are_under_way_once() -> None:
    ledger = ByteLedger()
    first, second = (ledger.count_call("all_reduce", group, 64, world=2) for group in ("replica", "world"))
    first.begin_call()
    second.begin_call()
    time.sleep(0.02)
    first.end_call()
    second.end_call()
    longest = max(first.busy_seconds, second.busy_seconds)
    assert 0.02 <= longest <= ledger.busy_seconds < first.busy_seconds + second.busy_seconds


@pytest.mark.capability("G10")
@pytest.mark.parametrize(
    ("busy", "exposed", "hidden"),
    [(4.0, 1.0, 0.75), (4.0, 4.0, 0.0), (4.0, 0.0, 1.0), (2.0, 3.0, 0.0), (0.0, 0.0, 0.0)],
)
def test_the_hidden_fraction_is_one_minus_exposed_over_busy_and_never_negative(
    busy: float, exposed: float, hidden: float
) -> None:
    assert LedgerEntry(busy_seconds=busy, exposed_seconds=exposed).hidden_fraction == hidden
