"""JSON lines: every line is strict JSON, also if a loss is not a number; a resumed run goes on."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.observe import JsonLinesSink, StepStats, TextLogSink
from paceline.observe.sinks import rotated_files
from paceline.testing.contracts.sink_contract import make_step
from tests.unit.observe.clock import Clock


def make_stats(**changes: Any) -> StepStats:
    return replace(make_step(4), **({"epoch": 1, "seconds": 0.25} | changes))


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, *records: StepStats | tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    sink = JsonLinesSink(path)
    for record in records:
        if isinstance(record, StepStats):
            sink.step(record)
        else:
            sink.event(*record)
    sink.close()
    return read(path)


@pytest.mark.capability("A1")
def test_a_step_is_written_with_loss_norm_rate_of_learning_and_samples_per_second(tmp_path: Path) -> None:
    (found,) = write(tmp_path / "metrics.jsonl", make_stats())
    assert found.pop("time") > 0
    common = {"event": "step", "level": "info", "rank": 0}
    assert found == {**common, "samples_per_second": 128.0, **vars(make_stats())}


def test_an_event_is_written_under_its_name(tmp_path: Path) -> None:
    found = write(
        tmp_path / "m",
        ("evaluation", {"loss": 1.5, "metrics": {"accuracy": 0.5}}),
        ("ranks", {"rank": 1, "time": 2.0}),
    )
    assert found[0].pop("time") > 0
    assert found == [
        {"event": "evaluation", "level": "info", "rank": 0, "loss": 1.5, "metrics": {"accuracy": 0.5}},
        {"event": "ranks", "level": "info", "rank": 1, "time": 2.0},
    ]


@pytest.mark.parametrize("value, spelled", [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_numbers_that_are_not_finite_are_spelled_wherever_they_are(
    value: float, spelled: str, tmp_path: Path
) -> None:
    stats = make_stats(loss=value, metrics={"bits": value}, grad_norm=value)
    step, event = write(tmp_path / "m", stats, ("evaluation", {"nested": {"a": {"b": value}}}))
    assert (step["loss"], step["metrics"], step["grad_norm"]) == (spelled, {"bits": spelled}, spelled)
    assert event["nested"] == {"a": {"b": spelled}}


def test_they_are_spelled_in_lists_too(tmp_path: Path) -> None:
    (event,) = write(tmp_path / "m", ("evaluation", {"curve": [1.0, math.nan, {"last": math.inf}]}))
    assert event["curve"] == [1.0, "nan", {"last": "inf"}]


def test_a_line_is_on_the_disk_at_once(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "m")
    sink.step(make_stats())
    assert len(read(tmp_path / "m")) == 1
    sink.close()


def test_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    write(tmp_path / "m", make_stats(step=0))
    assert [record["step"] for record in write(tmp_path / "m", make_stats(step=1))] == [0, 1]


def test_a_step_of_no_time_has_no_rate() -> None:
    assert make_stats(seconds=0.0).samples_per_second == 0.0


@pytest.mark.capability("P2")
def test_only_what_is_grave_enough_is_written(tmp_path: Path) -> None:
    for level, expected in {"debug": ["step", "cache", "warning"], "warning": ["warning"]}.items():
        sink = JsonLinesSink(tmp_path / level, level=level)
        sink.step(make_stats())
        sink.event("cache", {"hits": 1, "lookups": 2})
        sink.event("warning", {"text": "slow disk"})
        sink.close()
        assert [record["event"] for record in read(tmp_path / level)] == expected


@pytest.mark.capability("P2")
def test_a_full_file_is_put_aside_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for first in (0, 20):  # the second one goes on where the first one ended
        sink = JsonLinesSink(path, rotate_bytes=2000)
        for step in range(first, first + 20):
            sink.step(make_stats(step=step))
        sink.close()
    names = [file.name for file in rotated_files(path)]
    assert names == [f"metrics.{i:04d}.jsonl" for i in range(1, len(names) + 1)] and len(names) > 3
    found = [record["step"] for file in [*rotated_files(path), path] for record in read(file)]
    assert found == list(range(40))
    assert all(file.stat().st_size < 3000 for file in rotated_files(path))


def test_a_line_that_a_crash_cut_short_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"event": "st')
    sink = JsonLinesSink(tmp_path / "m")
    sink.step(make_stats(step=3))
    sink.close()
    assert json.loads((tmp_path / "m").read_text().splitlines()[1])["step"] == 3


LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) +\S")


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@pytest.mark.capability("P2")
def test_a_line_has_a_time_a_level_and_what_happened(tmp_path: Path) -> None:
    log = TextLogSink(tmp_path / "log.txt")
    log.event("run", {"task": "digits", "ranks": 2, "versions": {"torch": "2"}})
    log.event("evaluation", {"step": 4, "loss": 1.23456789, "metrics": {"accuracy": 0.5}})
    log.event("warning", {"text": "first line\nsecond line"})
    log.event("communication", {"rows": {}})
    log.close()
    found = lines(tmp_path / "log.txt")
    assert all(LINE.match(line) for line in found), found
    assert [line.split(" ", 1)[1] for line in found] == [
        "INFO    run: task digits  ranks 2",
        "INFO    evaluation: step 4  loss 1.2346  accuracy 0.5",
        "WARNING warning: text first line",
        "WARNING second line",
    ]


def test_steps_are_thinned_out_unless_everything_is_wanted(tmp_path: Path) -> None:
    for level, expected in (("info", [0, 10, 20]), ("debug", list(range(25)))):
        clock = Clock()
        log = TextLogSink(tmp_path / level, level=level, now=clock)
        for step in range(25):
            log.step(make_stats(step=step))
            clock.now += 1.0
        log.close()
        assert [int(re.findall(r"step (\d+):", line)[0]) for line in lines(tmp_path / level)] == expected


def test_what_is_below_the_level_is_left_out(tmp_path: Path) -> None:
    log = TextLogSink(tmp_path / "log.txt", level="error")
    log.step(make_stats())
    log.event("warning", {"text": "slow"})
    log.write("error", "rank 1 raised")
    log.close()
    assert [line.split("Z ")[1] for line in lines(tmp_path / "log.txt")] == ["ERROR   rank 1 raised"]


def test_a_full_file_makes_room_for_a_new_one(tmp_path: Path) -> None:
    log = TextLogSink(tmp_path / "log.txt", rotate_bytes=200)
    for i in range(30):
        log.write("info", f"line {i}")
    log.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["log.txt", "log.txt.1", "log.txt.2", "log.txt.3"]
    assert lines(tmp_path / "log.txt")[-1].endswith("line 29")
