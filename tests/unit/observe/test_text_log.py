"""The log for people: one line an event with time and level; steps are thinned out; old files make room."""

import re
from pathlib import Path

import pytest

from paceline.observe import TextLogSink
from tests.unit.observe.test_sinks import make_stats

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) +\S")


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


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
