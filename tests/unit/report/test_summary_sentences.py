"""The numbers and the sentences of a report, from rows whose numbers are known."""

import math
from pathlib import Path

import pytest

from paceline.report import collect_facts, render_page, summarize_run
from paceline.report.number_format import format_bytes, format_duration, format_number
from paceline.report.rank_balance import rank_times
from paceline.report.run_facts import quantile
from paceline.report.sent_bytes import compare_sent_bytes, has_closed_form
from tests.unit.report.runs import (
    GRADIENT_BYTES,
    TALLY_BYTES,
    evaluation,
    rank_record,
    start,
    stats,
    steps,
    write,
)

END = ("end", {"step": 10, "stopped": False})


@pytest.mark.capability("P10")
def test_the_parts_of_a_ranks_time_add_up_and_communication_is_split(tmp_path: Path) -> None:
    run = write(tmp_path, ("run", start()), ("ranks", rank_record(0)), ("ranks", rank_record(0)), END)
    (rank,) = rank_times(run)
    assert sum(rank.parts.values()) == pytest.approx(rank.seconds) == pytest.approx(20.0)
    assert (rank.parts["transfer"], rank.parts["waiting"], rank.parts["other"]) == (6.0, 2.0, 1.0)
    assert rank.hidden_fraction == pytest.approx(0.5) and rank.rounds == 20


@pytest.mark.capability("P10")
def test_a_resume_without_a_step_keeps_where_the_time_went(tmp_path: Path) -> None:
    run = write(tmp_path, ("run", start()), ("ranks", rank_record(0)), END, ("run", start(step=10)), END)
    assert [rank.seconds for rank in rank_times(run)] == [pytest.approx(10.0)]
    assert run.status == "finished"


def test_only_the_last_start_counts_for_time_and_bytes(tmp_path: Path) -> None:
    run = write(
        tmp_path,
        ("run", start(ranks=4)),
        ("ranks", rank_record(0)),
        ("run", start(step=10)),
        ("ranks", rank_record(0)),
        ("ranks", rank_record(1)),
    )
    assert [(rank.rank, rank.rounds) for rank in rank_times(run)] == [(0, 10), (1, 10)]
    assert [(one.rank, one.rounds, one.agrees) for one in compare_sent_bytes(run)] == [
        (0, 10, True),
        (1, 10, True),
    ]


def test_a_byte_more_than_the_closed_form_is_seen_and_said(tmp_path: Path) -> None:
    """The twin: the counted bytes of one rank are wrong by one."""
    more = 10.0 * (GRADIENT_BYTES + TALLY_BYTES) + 1
    records = [("ranks", rank_record(0)), ("ranks", rank_record(1, sent_bytes=more))]
    run = write(tmp_path, ("run", start()), *steps(0, 10), *records, END)
    assert [one.agrees for one in compare_sent_bytes(run)] == [True, False]
    assert any(
        line.startswith("Rank 1 sent") and "but the prediction is" in line for line in summarize_run(run)
    )
    assert "differs" in render_page([run])


def test_no_closed_form_is_claimed_for_strategies_that_have_none_here(tmp_path: Path) -> None:
    assert has_closed_form("replicas=2 sync=every-step") and has_closed_form("replicas=2 sync=local:8")
    others = (
        "replicas=2 sync=server-async",
        "replicas=2 sync=local:8 codec=int8",
        "",
        "shard=2 zero=1",
        "shard=2 zero=3",
        "tensor=2",
        "pipeline=2",
        "lanes=2",
        "codec=topk:0.3",
        "route=tree",
        "replicas=4 route=hierarchical",
        "replicas=2 sync=a-word-that-is-not-installed-here",
    )
    assert not any(map(has_closed_form, others))
    ordered = write(tmp_path / "ordered", ("run", start(ordered=True)), ("ranks", rank_record(0)))
    assert compare_sent_bytes(ordered)[0].agrees is None
    run = write(
        tmp_path,
        ("run", start(strategy="replicas=2 sync=every-step codec=int8")),
        *steps(0, 10),
        ("ranks", rank_record(0, sent_bytes=10.0 * (GRADIENT_BYTES + TALLY_BYTES) / 4)),
    )
    assert compare_sent_bytes(run)[0].agrees is None
    assert any("4 times less than plain data parallelism" in line for line in summarize_run(run))


def test_the_summary_says_what_the_rows_say(tmp_path: Path) -> None:
    losses = [stats(i, 8.0 - 0.5 * i, seconds=9.0 if i == 4 else 0.5) for i in range(10)]
    run = write(
        tmp_path,
        ("run", start()),
        *losses,
        evaluation(4, 2.0),
        evaluation(10, 3.0),
        ("ranks", rank_record(0)),
        ("ranks", rank_record(1, waiting_seconds=3.0)),
        ("warning", {"text": "slow disk"}),
        END,
    )
    found = collect_facts(run)
    assert (found.loss, found.held_out, found.best_held_out) == (3.75, 3.0, (2.0, 4))
    assert found.samples_per_second == pytest.approx(320 / 13.5) and found.step_seconds == 0.5
    assert summarize_run(run) == [
        "Finished 10 of 10 steps on 2 processes with replicas=2 sync=every-step.",
        "The training loss went from 8 to 3.75 (mean of the last fifth of the steps).",
        "The held-out loss is 3; it was lowest, 2, after 4 steps.",
        "Throughput was 23.7 samples/s; a step took 500 ms (median), but one in twenty took 9 s or more.",
        "Most of the time of a step went to communication (40 %).",
        "Exposed communication took 40 % of the time; "
        "50 % of all communication was hidden behind other work.",
        "Rank 1 spent 30 % of its time waiting for slower ranks; rank 0 waited least.",
        "Every rank sent 3.98 KiB per step, exactly as predicted.",
        "1 warning; the last: slow disk",
    ]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([*steps(0, 3), ("end", {"step": 3, "stopped": True})], "Stopped by a signal after 3 of 10 steps"),
        ([*steps(0, 3), ("error", {"text": "rank 1 raised E"})], "Failed after 3 of 10 steps"),
        ([*steps(0, 3)], "Running: 3 of 10 steps"),
        ([*steps(0, 3), ("run", start(step=3))], "It was resumed once at step 3."),
        ([*steps(0, 2), stats(2, math.nan)], "not finite from step 2 on"),
        ([stats(0), stats(1, applied=False)], "1 update was skipped"),
        ([], "Running: 0 of 10 steps"),
    ],
)
def test_a_run_that_did_not_go_well_says_so_and_has_a_page(tmp_path: Path, records: list, said: str) -> None:
    run = write(tmp_path, ("run", start()), *records)
    assert said in " ".join(summarize_run(run))
    assert said.split("(")[0] in render_page([run])


def test_a_lost_run_says_that_the_process_is_gone(tmp_path: Path) -> None:
    run = write(tmp_path, ("run", start(process_start=1)), *steps(0, 3))
    assert summarize_run(run)[0].startswith("Ended without a record of its end after 3 of 10 steps")


def test_numbers_are_written_as_a_person_would() -> None:
    assert [format_number(v) for v in (0.00012345, 12.3456, 123456.7, math.nan, None)] == [
        "0.0001234",
        "12.35",
        "123,457",
        "nan",
        "–",
    ]
    assert [format_bytes(v) for v in (0, 1023, 1024, 7.5 * 2**20)] == ["0 B", "1023 B", "1 KiB", "7.5 MiB"]
    assert [format_duration(v) for v in (0.0123, 59.0, 61.0, 3720.0)] == [
        "12.3 ms",
        "59 s",
        "1 min 01 s",
        "1 h 02 min",
    ]
    assert [quantile([4.0, 1.0, 3.0, 2.0], q) for q in (0.0, 0.5, 0.75, 1.0)] == [1.0, 2.0, 3.0, 4.0]
