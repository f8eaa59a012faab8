"""Ten ways in which a job hangs, as status lines: the rank, the place and the cause are named."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.job.launcher_reports import (
    TRAINING_ELASTIC,
    enter_phase,
    following_abort_requests,
    write_run_folder,
)
from paceline.launch import hang_monitor
from paceline.launch.hang_explainer import RankSituation, explain_hang
from paceline.launch.hang_monitor import PauseLimit
from paceline.observe import rank_activity
from paceline.observe.rank_activity import LEFT_INSIDE_STEP, LEFT_LOOP, GroupCall, RankActivity


def waiting(
    rank: int, call: int = 8, group: str = "world", num_bytes: int = 64, **more: Any
) -> RankSituation:
    calls = {group: GroupCall("all_reduce", call, num_bytes), **more.pop("calls", {})}
    values = {"step": 4, "operation": f"all_reduce, {group}", "seconds": 6.0, **more}
    return RankSituation(rank, group=group, call=call, num_bytes=num_bytes, calls=calls, **values)


def busy(rank: int, operation: str = "forward", calls: int = 7, **more: Any) -> RankSituation:
    launched = {"world": GroupCall("all_reduce", calls, 64)}
    return RankSituation(rank, more.pop("step", 4), operation, 6.2, calls=launched, **more)


PLACE = {"position": "read (socket.py:3), called from loss (task.py:12)"}
SEEDED: dict[str, tuple[list[RankSituation], list[int], tuple[int, ...], tuple[str, ...]]] = {
    "missing": (
        [waiting(0), busy(1, **PLACE), waiting(2)],
        [],
        (1,),
        ("rank 1 is missing from all_reduce, call 8 of group 'world'", "6.2 s", "task.py:12", "ranks 0, 2"),
    ),
    "shapes": (
        [waiting(0), waiting(1, num_bytes=128), waiting(2)],
        [],
        (1,),
        ("rank 1 waits in all_reduce of 128 bytes, call 8", "(64 bytes)", "different sizes"),
    ),
    "operations": (
        [
            waiting(0),
            waiting(1, operation="broadcast, world", calls={"world": GroupCall("broadcast", 8, 64)}),
        ],
        [],
        (1,),
        ("rank 1 waits in broadcast", "rank 0 waits for all_reduce"),
    ),
    "order": (
        [
            waiting(0, 3, "data", calls={"tensor": GroupCall("all_reduce", 4, 8)}),
            waiting(1, 5, "tensor", calls={"data": GroupCall("all_reduce", 2, 8)}),
        ],
        [],
        (0, 1),
        ("call 3 of group 'data'", "call 5 of group 'tensor'", "in different orders"),
    ),
    "uneven loop": (
        [waiting(0), waiting(1, 8, operation=f"{LEFT_LOOP}: all_gather, world", step=3)],
        [],
        (1,),
        ("after its loop", "in step 3", "fewer batches"),
    ),
    "left step": (
        [waiting(0), busy(1, LEFT_INSIDE_STEP, **PLACE)],
        [],
        (1,),
        ("left inside of a step", "task.py:12", "an exception that was caught"),
    ),
    "stopped": (
        [waiting(0), busy(1, process="stopped", host="h1")],
        [],
        (1,),
        ("rank 1 (host h1) is missing", "its process is stopped", "SIGCONT"),
    ),
    "lost": ([waiting(0), busy(1, process="ended")], [], (1,), ("its process has ended",)),
    "loader": (
        [waiting(0), busy(1, "data", position="__getitem__ (task.py:9)")],
        [],
        (1,),
        ("been in data of step 4", "task.py:9", "loader.workers = 0"),
    ),
    "checkpoint": (
        [waiting(0, operation="checkpoint: barrier, world"), busy(1, "checkpoint", position="fsync")],
        [],
        (1,),
        ("been in checkpoint of step 4", "at fsync", "cannot write"),
    ),
    "link": ([waiting(0), waiting(1)], [], (), ("ranks 0, 1 wait for all_reduce", "a blocked or lost link")),
}


@pytest.mark.parametrize("kind", SEEDED)
@pytest.mark.capability("N5", clause="the rank that hangs, its operation, line and cause")
def test_the_cause_of_a_hang_is_found_and_described(kind: str) -> None:
    ranks, left, causes, words = SEEDED[kind]
    found = explain_hang(ranks, left)
    assert (found.kind, found.ranks) == (kind, causes), found.text
    assert [word for word in words if word not in found.text] == [], found.text
    assert found.is_certain == (kind in ("shapes", "operations", "order", "uneven loop", "left step"))


def test_a_rank_that_has_left_is_named_although_it_shows_nothing() -> None:
    found = explain_hang([waiting(0), waiting(2)], [1])
    assert (found.kind, found.ranks) == ("uneven loop", (1,)) and found.text.startswith("rank 1 has ended.")


def test_the_end_of_a_chain_of_waits_is_the_cause() -> None:
    """Rank 0 waits for rank 1, which waits for a message of rank 2, which is in its loader."""
    chain = [
        waiting(0),
        waiting(1, 0, "stage", operation="receive from rank 2, stage", calls={"world": GroupCall("x", 7, 0)}),
        busy(2, "data", calls=7),
    ]
    assert (explain_hang(chain).kind, explain_hang(chain).ranks) == ("loader", (2,))


def test_a_rank_that_computes_is_slow_and_no_cause() -> None:
    found = explain_hang([waiting(0), busy(1, "backward", is_computing=True)])
    assert (found.kind, found.is_certain) == ("slow", False)


def test_the_limit_follows_the_steps_and_the_pauses_of_the_run() -> None:
    limit, now = PauseLimit(120.0), 0.0
    assert limit.seconds == 90.0, "the first steps may take long"
    for step in range(10):
        limit.observe(step, 0.5, now)
        now += 0.5
    assert limit.usual_step_seconds == 0.5 and limit.seconds == 10.0
    limit.observe(10, 8.0, now)  # an evaluation
    assert limit.seconds == 24.0
    limit.observe(11, 80.0, now)
    assert limit.seconds == 90.0, "before the ranks give up"
    assert PauseLimit(3.0).seconds == math.inf and PauseLimit(math.inf).seconds == 90.0


def end_of_wait(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    bytes_per_second: int,
    num_ranks: int = 2,
    mark_lost: Callable[[int], object] | None = None,
) -> list[str]:
    """Return what the monitor says of a worker when both ranks have waited in one call for 40 s.

    With `mark_lost` the worker is rank 0, of the host with the store, and rank 1 is on another host.
    """
    ranks = [RankActivity() for _ in range(2)]
    write_run_folder(folder, folder / "run")
    (folder / "run").mkdir(exist_ok=True)
    spec = SimpleNamespace(error_file=folder / "error", global_rank=0)
    worker = SimpleNamespace(ended_at=None, killed=False, overdue="", spec=spec)
    arrived = [0]
    monkeypatch.setattr(hang_monitor, "received_bytes", lambda: arrived[0])
    at = hang_monitor.HangMonitor(folder, cast("Any", [worker]), 120.0, 0.0, lambda text: None, mark_lost)
    for number, rank in enumerate(ranks):
        with monkeypatch.context() as elsewhere:
            if number and mark_lost is not None:
                elsewhere.setattr(rank_activity, "boot_id", lambda: "of another host")
            rank.open(folder / "run", number, num_ranks, 100)
    try:
        for step in range(5):
            for rank in ranks:
                rank.step = step
                rank.count_call("all_reduce", "world", 64)
                rank.begin_wait("all_reduce", "world", "world", step + 1, 64)
            assert at.overdue(1.0 + step) == []
        late: list[Any] = []
        for second in range(6, 50):
            arrived[0] += bytes_per_second
            late += at.overdue(float(second))
    finally:
        for rank in ranks:
            rank.close()
    return [one.overdue for one in late[:1]]


def test_a_link_that_carries_nothing_ends_the_job_and_one_that_is_slow_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a wait for a rank of a host that does not show what it does here."""
    (blocked,) = end_of_wait(tmp_path, monkeypatch, 100)
    assert blocked.startswith("hung: ") and "a blocked or lost link" in blocked
    assert end_of_wait(tmp_path, monkeypatch, 10**6) == []
    assert end_of_wait(tmp_path, monkeypatch, 100, num_ranks=3) == []


def test_behind_a_blocked_link_the_node_with_the_store_continues_if_its_ranks_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of each worker there ends the collective in which the worker waits."""
    lost: list[int] = []
    (blocked,) = end_of_wait(tmp_path, monkeypatch, 100, mark_lost=lost.append)
    assert "a blocked or lost link" in blocked and lost == [], "without elastic workers the job ends"
    enter_phase(tmp_path, 0, TRAINING_ELASTIC)
    ended = threading.Event()
    with following_abort_requests(tmp_path, ended.set):
        assert end_of_wait(tmp_path, monkeypatch, 10**6, mark_lost=lost.append) == [] == lost
        assert not ended.wait(1.0)
        assert end_of_wait(tmp_path, monkeypatch, 100, mark_lost=lost.append) == []
        assert set(lost) == {1} and ended.wait(20.0)
    assert len(end_of_wait(tmp_path, monkeypatch, 100)) == 1, "another launcher serves the store"
