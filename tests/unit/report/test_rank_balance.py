"""How even the ranks of a run were, from chosen rows: one table, and what is more than a tenth apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.observe import PHASES
from paceline.report import RecordedRun, render_page, summarize_run
from paceline.report.rank_balance import describe_balance, find_imbalances, rank_loads
from tests.unit.report.runs import rank_record, start, steps, write

END = ("end", {"step": 3, "stopped": False})
EVEN = "The ranks are even: compute, memory and bytes sent are within 10 % of their means."


def phases(forward: float, backward: float) -> dict[str, float]:
    return dict(zip(PHASES, (0.5, forward, backward, 4.0, 0.5), strict=True))


def hybrid(folder: Path, *changes: dict[str, object], strategy: str = "replicas=2 pipeline=2") -> RecordedRun:
    """A run on replica x pipeline: ranks 0 and 1 are the stages of the first replica."""
    records = [("ranks", rank_record(rank, **change)) for rank, change in enumerate(changes)]
    return write(folder, ("run", start(strategy=strategy, ranks=len(changes))), *steps(0, 3), *records, END)


@pytest.mark.capability("E5")
def test_compute_communication_idle_and_memory_are_in_one_table(tmp_path: Path) -> None:
    run = hybrid(tmp_path, {}, {"peak_bytes": 2.0**28 * 1.05}, {"waiting_seconds": 3.0}, {})
    shares = rank_loads(run)
    assert [share.label for share in shares] == [
        "rank 0 (replica 0, stage 0)",
        "rank 1 (replica 0, stage 1)",
        "rank 2 (replica 1, stage 0)",
        "rank 3 (replica 1, stage 1)",
    ]
    third = shares[2]
    assert third.compute_seconds == pytest.approx(0.5)  # forward 2, backward 2.5, update 0.5, in ten rounds
    assert (third.communication_seconds, third.idle_seconds) == pytest.approx((0.1, 0.3))
    assert third.sent_bytes == pytest.approx(4080) and third.peak_bytes == 2**28
    assert list(describe_balance(shares)) == [EVEN]
    page = render_page([run])
    assert page.count("peak memory</th>") == 1 and EVEN in page and "rank 2 (replica 1, stage 0)" in page


@pytest.mark.capability("E5")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"phases": phases(4.0, 5.0)},
            "Compute is uneven: rank 1 (replica 0, stage 1) has 1.31 times the mean",
        ),
        ({"peak_bytes": 2.0**30}, "Memory is uneven: rank 1 (replica 0, stage 1) has"),
        ({"sent_bytes": 9e6}, "Bytes sent are uneven: rank 1 (replica 0, stage 1) has"),
    ],
)
def test_what_is_more_than_a_tenth_apart_is_said_with_its_stage_and_what_to_do(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    run = hybrid(tmp_path, {}, changes, {}, changes)
    (line, *more) = describe_balance(rank_loads(run))
    assert line.startswith(said) and "; " in line
    assert line in summarize_run(run)
    if said.startswith("Compute"):
        assert more[0].startswith("Each round waits for rank 1 (replica 0, stage 1)")


def test_the_axis_is_that_along_which_ranks_differ(tmp_path: Path) -> None:
    slow = {"phases": phases(4.0, 5.0)}
    assert [one.axis for one in find_imbalances(rank_loads(hybrid(tmp_path / "a", {}, slow, {}, slow)))] == [
        "pipeline"
    ]
    assert [one.axis for one in find_imbalances(rank_loads(hybrid(tmp_path / "b", {}, {}, slow, slow)))] == [
        "replica"
    ]


def test_a_tenth_is_even_and_a_little_more_is_not(tmp_path: Path) -> None:
    """The twin: the same run, a few bytes apart."""
    for times, found in ((1.2, []), (1.24, ["memory"])):  # 1.2 / 1.1 and 1.24 / 1.12 of the mean
        run = hybrid(tmp_path / str(times), {}, {"peak_bytes": times * 2.0**28}, strategy="replicas=2")
        assert [one.quantity for one in find_imbalances(rank_loads(run))] == found


def test_one_process_has_no_balance(tmp_path: Path) -> None:
    assert rank_loads(hybrid(tmp_path, {}, strategy="replicas=1")) == []


@pytest.mark.parametrize("strategy", ["replicas=all", "replicas=2"])
def test_ranks_that_were_lost_or_have_joined_need_no_place_in_the_mesh(strategy: str, tmp_path: Path) -> None:
    """The first of three ranks has no record, and the third one is uneven."""
    records = [("ranks", rank_record(1)), ("ranks", rank_record(2, peak_bytes=2.0**30))]
    run = write(tmp_path, ("run", start(strategy=strategy, ranks=2)), *steps(0, 3), *records, END)
    (uneven,) = find_imbalances(rank_loads(run))
    assert (uneven.quantity, uneven.load.rank) == ("memory", 2)
    assert "Memory is uneven: rank 2" in " ".join(summarize_run(run))
