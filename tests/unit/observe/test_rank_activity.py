"""The current operation of a rank, as another process reads it from the run folder."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.observe import PhaseTimer
from paceline.observe.rank_activity import FOLDER, RankActivity, TracedCall, read_operations
from paceline.watch.run_watch import RunWatch
from tests.unit.watch.records import append, run_record


@pytest.fixture
def activity(tmp_path: Path) -> Iterator[RankActivity]:
    made = RankActivity()
    made.open(tmp_path, 1, 2, 100)
    yield made
    made.close()


def test_phases_and_waits_are_read_with_their_step_and_since_when(
    tmp_path: Path, activity: RankActivity
) -> None:
    phases = PhaseTimer(activity)
    activity.step = 12
    began = phases.begin("communication")
    (seen,) = read_operations(tmp_path)
    assert (seen.rank, seen.num_ranks, seen.num_steps, seen.pid, seen.alive) == (1, 2, 100, os.getpid(), True)
    assert seen.text == "communication of step 12"
    assert seen.since == pytest.approx(time.time() - time.perf_counter() + began, abs=0.01)
    activity.begin_bucket(TracedCall("bucket 3", 64))
    text = activity.begin_wait("all_reduce", activity.place_of("world"))
    assert read_operations(tmp_path)[0].text == "all_reduce, bucket 3 of step 12"
    activity.end_wait(text, 0.0, 1.0)
    again = read_operations(tmp_path)[0]
    assert (again.text, again.since) == ("communication of step 12", pytest.approx(seen.since, abs=0.01))
    phases.take()
    assert read_operations(tmp_path)[0].text == "after step 12"


def test_an_evaluation_hides_its_phases_but_not_what_it_waits_for(
    tmp_path: Path, activity: RankActivity
) -> None:
    phases = PhaseTimer(activity)
    with activity.during("evaluation"):
        phases.begin("forward")
        assert read_operations(tmp_path)[0].operation == "evaluation"
        activity.end_wait(activity.begin_wait("all_reduce", "world"), 0.0, 1.0)
        activity.begin_wait("all_reduce", "world")
        assert read_operations(tmp_path)[0].operation == "evaluation: all_reduce, world"
    assert read_operations(tmp_path)[0].text == "after step 0"


def test_a_thread_in_the_background_does_not_take_the_bucket_of_the_loop(activity: RankActivity) -> None:
    activity.begin_bucket(TracedCall("bucket 3", 64))
    places: list[str] = []
    thread = threading.Thread(target=lambda: places.append(activity.place_of("world")))
    thread.start()
    thread.join(10)
    assert places == ["world"] and activity.place_of("world") == "bucket 3"


def test_a_rank_that_has_left_has_no_file_and_a_killed_one_has_ended(tmp_path: Path) -> None:
    made = RankActivity()
    made.open(tmp_path, 0, 1, 100)
    made.enter("forward", time.perf_counter())
    path = tmp_path / FOLDER / "rank-0"
    data = bytearray(path.read_bytes())
    made.close()
    assert read_operations(tmp_path) == [] and not path.parent.exists()
    struct.pack_into("<q", data, 40, 1)  # a process that began at another time had the same number
    path.parent.mkdir()
    path.write_bytes(data)
    assert [(one.alive, one.text) for one in read_operations(tmp_path)] == [
        (False, "ended in forward of step 0")
    ]


def test_ranks_of_an_earlier_larger_job_are_left_out(tmp_path: Path, activity: RankActivity) -> None:
    others = RankActivity()
    others.open(tmp_path, 2, 3, 100)
    assert [one.rank for one in read_operations(tmp_path)] == [1]
    others.close()


@pytest.mark.parametrize("data", [b"", b"x" * 4096, b"paceact1" + b"\xff" * 4088])
def test_files_that_are_none_of_this_kind_are_left_out(tmp_path: Path, data: bytes) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank-0").write_bytes(data)
    assert read_operations(tmp_path) == []


def test_a_page_shows_what_ranks_do_that_have_no_times_yet(tmp_path: Path, activity: RankActivity) -> None:
    """The run hangs in its first step; its records are those of another host."""
    (tmp_path / "recipe.toml").write_text("")
    append(tmp_path, run_record())
    run = RunWatch(tmp_path)
    activity.enter("forward", time.perf_counter())
    assert run.update()
    state = run.state()
    assert state["ranks"] == []
    assert [(one["rank"], one["text"]) for one in state["operations"]] == [(1, "forward of step 0")]
