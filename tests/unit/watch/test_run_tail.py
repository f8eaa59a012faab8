"""A tail returns every record once, whatever happens to the files that it reads."""

from __future__ import annotations

import json
import os
from pathlib import Path

from paceline.observe.sinks import JsonLinesSink
from paceline.watch.run_tail import RunTail, last_recorded_step, records_size
from tests.unit.watch.records import append, run_record, step_record


def steps(tail: RunTail, max_bytes: int = 2**23) -> list[int]:
    return [record["step"] for record in tail.read(max_bytes)]


def test_it_begins_before_the_file_is_there_and_waits_for_ends_of_lines(tmp_path: Path) -> None:
    tail = RunTail(tmp_path)
    assert steps(tail) == []
    append(tmp_path, step_record(0), step_record(1), end="")
    assert steps(tail) == [0]
    append(tmp_path, end="\n")
    assert steps(tail) == [1] and steps(tail) == []
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "st\n\xff\xfe\n[1]\n\n')
    append(tmp_path, step_record(2, loss="nan"))
    assert [record["loss"] for record in tail.read()] == ["nan"]
    assert tail.num_damaged == 3 and tail.num_bytes_read == tail.num_bytes > 0


def test_it_follows_files_that_are_full(tmp_path: Path) -> None:
    """Between two looks as many become full as may be."""
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", rotate_bytes=1500)
    tail, found = RunTail(tmp_path), []
    for step in range(60):
        sink.event("step", {**step_record(step), "event": "step"})
        if step % 7 == 0:
            found += steps(tail, max_bytes=400 if step % 2 else 2**23)
    sink.close()
    assert len(list(tmp_path.glob("metrics.0*.jsonl"))) > 10
    while more := steps(tail, max_bytes=400):
        found += more
    assert found == list(range(60)) and tail.num_restarts == 0


def test_it_begins_where_it_is_told_to(tmp_path: Path) -> None:
    """Whether that is in a full file, in the last one, or at the end of all."""
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", rotate_bytes=1500)
    tails = [RunTail(tmp_path, start_bytes=records_size(tmp_path))]
    for step in range(20):
        sink.event("step", {**step_record(step), "event": "step"})
        tails.append(RunTail(tmp_path, start_bytes=records_size(tmp_path)))
    sink.close()
    for first, tail in enumerate(tails):
        assert steps(tail) == list(range(first, 20)) and tail.num_bytes_read == tail.num_bytes
    append(tmp_path, step_record(20))
    assert [steps(tail) for tail in tails] == [[20]] * 21


def test_it_begins_again_where_a_file_was_replaced_or_cut(tmp_path: Path) -> None:
    append(tmp_path, *(step_record(step) for step in range(5)))
    tail = RunTail(tmp_path)
    assert steps(tail) == [0, 1, 2, 3, 4]
    other = tmp_path / "other"
    other.mkdir()
    append(other, step_record(7), step_record(8))
    (other / "metrics.jsonl").replace(tmp_path / "metrics.jsonl")
    assert steps(tail) == [7, 8] and tail.num_restarts == 1
    os.truncate(tmp_path / "metrics.jsonl", 0)
    append(tmp_path, step_record(9))
    assert steps(tail) == [9] and tail.num_restarts == 2


def test_a_pipe_in_place_of_the_file_does_not_hold_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert steps(RunTail(tmp_path)) == []


def test_the_last_recorded_step_is_found_at_the_end_of_the_files(tmp_path: Path) -> None:
    assert last_recorded_step(tmp_path) == -1
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", rotate_bytes=3000)
    for step in range(40):
        sink.event("step", {**step_record(step), "event": "step"})
    assert last_recorded_step(tmp_path) == 39
    for _ in range(100):  # more than the first look reads, in several files
        sink.event("warning", {"text": "x" * 1000})
    assert last_recorded_step(tmp_path) == 39
    sink.event("run", run_record(12))  # resumed from a checkpoint
    assert last_recorded_step(tmp_path) == 11
    sink.event("step", {**step_record(12), "event": "step"})
    sink.event("run", run_record(13))  # another rank has taken over the files
    assert last_recorded_step(tmp_path) == 12
    sink.event("roll-back", {"step": 12, "checkpoint": "c", "left_out": [8, 12], "reason": "nan"})
    assert last_recorded_step(tmp_path) == -1
    sink.close()


def test_a_record_that_was_cut_does_not_count_and_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    append(tmp_path, step_record(0), step_record(1))
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    for cut in range(1, len(whole) // 2 - 2):
        (tmp_path / "metrics.jsonl").write_bytes(whole[: -1 - cut])
        assert last_recorded_step(tmp_path) == 0, cut
        sink = JsonLinesSink(tmp_path / "metrics.jsonl")
        sink.event("step", {**step_record(1), "event": "step"})
        sink.close()
        assert last_recorded_step(tmp_path) == 1, cut
        last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["step"] == 1, cut
    (tmp_path / "metrics.jsonl").write_bytes(whole[:-1])  # only the end of the line is missing
    assert last_recorded_step(tmp_path) == 1
