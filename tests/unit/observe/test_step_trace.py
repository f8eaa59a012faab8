"""Traces: clocks of two hosts are aligned by collectives, limits are kept and counted, damage is left out."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.rank_activity import RankActivity, SpanRecorder, TracedCall, read_operations
from paceline.observe.step_trace import (
    FOLDER,
    RankSpans,
    TraceRequest,
    TraceWindow,
    align_clocks,
    merge_spans,
    read_spans,
)

NUM_STEPS = 6


def ranks_of_two_hosts(
    ahead: float, wall_error: float, *, only_second_is_late: bool = False
) -> list[RankSpans]:
    """Two ranks whose clocks differ by `ahead`; in each step one arrives late at the sum of both."""
    ranks = [RankSpans("k", rank, 2, f"h{rank}", f"boot-{rank}", 1, 0.0, 0, NUM_STEPS) for rank in (0, 1)]
    ranks[0].wall_offset, ranks[1].wall_offset = 1000.0, 1000.0 - ahead + wall_error
    for step in range(NUM_STEPS):
        late = 1 if only_second_is_late else step % 2
        for rank in ranks:
            began = step + (0.2 if rank.rank == late else 0.05)
            span = ["collectives", "all_reduce, world", began, step + 0.2003, step, {"ranks": 2}]
            clock = ahead if rank.rank == 1 else 0.0
            rank.spans.append([*span[:2], span[2] + clock, span[3] + clock, *span[4:]])
    return ranks


@pytest.mark.parametrize("wall_error", [0.0001, 0.7, -3.0])
def test_clocks_of_two_hosts_are_aligned_by_the_collectives_of_all_ranks(wall_error: float) -> None:
    """However wrong the wall clocks are; the uncertainty that is reported holds."""
    here, there = align_clocks(ranks_of_two_hosts(12.5, wall_error))
    assert (here.offset, here.uncertainty) == (0.0, 0.0)
    assert abs(there.offset + 12.5) <= there.uncertainty < 0.001


def test_what_the_collectives_do_not_tell_is_reported_as_uncertain() -> None:
    _, there = align_clocks(ranks_of_two_hosts(12.5, 0.05, only_second_is_late=True))
    assert abs(there.offset + 12.5) <= there.uncertainty and 0.05 < there.uncertainty < 0.2
    ranks = ranks_of_two_hosts(12.5, 0.05)
    ranks[1].spans.clear()
    _, there = align_clocks(ranks)
    assert math.isinf(there.uncertainty) and there.offset == pytest.approx(-12.5 + 0.05)


def test_ranks_of_one_host_share_its_clock() -> None:
    ranks = ranks_of_two_hosts(0.0, 0.7)
    ranks[1].boot = ranks[0].boot
    assert [(clock.offset, clock.uncertainty) for clock in align_clocks(ranks)] == [(0.0, 0.0)] * 2


def read_trace(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return [event for event in trace["traceEvents"] if event["ph"] == "X"], trace["otherData"]


def test_a_file_never_exceeds_its_limit_and_counts_what_is_left_out(tmp_path: Path) -> None:
    """The names do not compress; the file has the beginning of the time, of all ranks."""
    draw = random.Random(1)
    ranks = [RankSpans("k", rank, 2, "h", "b", 1, 0.0, 0, 1, num_dropped=rank) for rank in (0, 1)]
    for rank in ranks:
        for i in range(3000):
            rank.spans.append(["collectives", f"{draw.getrandbits(200):x}", i, i + 0.5, 0, None])
    summary = merge_spans(ranks, tmp_path / "small.json.gz", max_bytes=60_000)
    spans, facts = read_trace(tmp_path / "small.json.gz")
    assert summary.num_bytes == (tmp_path / "small.json.gz").stat().st_size <= 60_000
    assert len(spans) == summary.num_spans > 500 and {span["pid"] for span in spans} == {0, 1}
    assert summary.num_dropped == 6000 - len(spans) + 1 == facts["spans_dropped"]
    whole = merge_spans(ranks, tmp_path / "whole.json.gz")
    assert (whole.num_spans, whole.num_dropped) == (6000, 1)


def test_a_recorder_counts_what_it_does_not_keep() -> None:
    recorder = SpanRecorder(2)
    for step in range(5):
        recorder.add("steps", "data", 0.0, 1.0, step)
    assert (len(recorder.spans), recorder.num_dropped) == (2, 3)


def test_spans_that_overlap_have_threads_of_their_own(tmp_path: Path) -> None:
    rank = RankSpans("k", 0, 1, "h", "b", 1, 0.0, 0, 1)
    rank.spans += [["buckets", f"bucket {i}", 0.1 * i, 1.0 + 0.1 * i, 0, {"bytes": 4}] for i in range(3)]
    rank.spans += [["buckets", "bucket 3", 1.05, 2.0, 0, {"bytes": 4}]]
    merge_spans([rank], tmp_path / "t.json.gz")
    tids = {span["name"]: span["tid"] for span in read_trace(tmp_path / "t.json.gz")[0]}
    assert len({tids[f"bucket {i}"] for i in range(3)}) == 3 and tids["bucket 3"] == tids["bucket 0"]


def window(
    folder: Path, events: list[str], steps: tuple[int, int] | None = None
) -> tuple[TraceWindow, RankActivity]:
    activity = RankActivity()

    def send(name: str, record: Any) -> None:
        events.append(name)

    traced = TraceWindow(
        folder, 0, 1, activity=activity, recipe_steps=steps, stage_rows=lambda: (), send_event=send
    )
    return traced, activity


def test_rounds_of_several_steps_are_recorded_if_they_touch_the_window(tmp_path: Path) -> None:
    """Rounds of four steps; of the round around the window only its own steps are kept."""
    events: list[str] = []
    traced, activity = window(tmp_path, events, (5, 7))
    traced.before_step(0)
    for step in range(12):
        activity.step = step
        activity.enter("data", float(step))
        activity.enter("between steps", step + 0.5)
        if step % 4 == 3:
            traced.before_step(step + 1)
    (read,) = read_spans(tmp_path)
    assert [span[4] for span in read.spans] == [5, 6] and events == ["trace"]
    assert activity.recorder is None


def test_a_request_that_comes_too_late_is_answered_with_the_step(tmp_path: Path) -> None:
    TraceRequest("late", 3, 5).write(tmp_path)
    traced, activity = window(tmp_path, [])
    traced.before_step(4)
    assert activity.recorder is None
    assert "at step 4 when it saw the request" in read_spans(tmp_path)[0].error


def test_a_request_that_is_withdrawn_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.observe.step_trace._CHECK_SECONDS", 0.0)
    TraceRequest("a", 3, 5).write(tmp_path)
    traced, activity = window(tmp_path, [])
    traced.before_step(0)
    TraceRequest.withdraw(tmp_path)
    for step in range(1, 6):
        assert not traced.before_step(step)
    assert activity.recorder is None and not read_spans(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    events: list[str] = []
    traced, activity = window(tmp_path, events, (0, 1))
    traced.before_step(0)
    activity.enter("data", 0.0)
    activity.enter("forward", 1.0)
    traced.before_step(1)
    assert events == ["warning"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"key": 1}', '{"key":"a","first":5,"end":5,"max_spans":1}']
)
def test_damaged_requests_and_spans_are_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / FOLDER).mkdir()
    for name in ("request.json", "rank-0.json"):
        (tmp_path / FOLDER / name).write_text(text)
    assert TraceRequest.read(tmp_path) is None and read_spans(tmp_path) == []


def test_pipes_and_links_in_the_place_of_files_are_not_waited_for(tmp_path: Path) -> None:
    for folder, names in ((FOLDER, ("request.json", "rank-0.json")), ("activity", ("rank-0",))):
        (tmp_path / folder).mkdir()
        for name in names:
            os.mkfifo(tmp_path / folder / name)
    (tmp_path / "activity" / "rank-1").symlink_to("rank-0")
    assert TraceRequest.read(tmp_path) is None and read_spans(tmp_path) == []
    assert read_operations(tmp_path) == []


def test_the_sum_of_a_bucket_ends_with_the_last_of_its_collectives() -> None:
    """A scatter and a sum, as under ZeRO-1; what is launched for no bucket is a span of its own."""
    activity = RankActivity()
    activity.recorder = recorder = SpanRecorder(100)
    bucket = TracedCall("bucket 0", 4096)
    activity.begin_bucket(bucket)
    first = activity.launch("reduce_scatter", "shard", 4096, 2)
    assert first is bucket
    first.complete()
    first_end = bucket.ended
    second = activity.launch("all_reduce", "replica", 2048, 2)
    assert second is bucket and bucket.ended == 0.0
    second.complete()
    activity.bucket = None
    activity.end_bucket(bucket)
    other = activity.launch("all_reduce", "world", 64, 2)
    assert other is not None
    other.complete()
    sum_of_bucket, sum_of_world = recorder.spans
    assert sum_of_bucket[:2] == ("buckets", "bucket 0") and sum_of_bucket[3] >= first_end
    assert sum_of_bucket[5] == {"bytes": 4096}
    assert sum_of_world[:2] == ("collectives", "all_reduce, world")
