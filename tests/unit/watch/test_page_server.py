"""The answers of the live page: what the records say, in strict JSON, for whoever has the token."""

from __future__ import annotations

import csv
import io
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.watch.run_watch import RunWatch
from tests.unit.watch.records import append, rank_records, run_record, step_record
from tests.unit.watch.serving import SECONDS, TOKEN, get, names_of, read, served


def write_run(folder: Path, num_steps: int = 5, **metrics: float) -> Path:
    folder.mkdir()
    (folder / "recipe.toml").write_text('task = "digits"\nsteps = 100\n')
    append(folder, run_record(), *(step_record(k, loss=1.0 / (k + 1), **metrics) for k in range(num_steps)))
    return folder


def wait_until(condition: Callable[[], bool]) -> None:
    expires = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < expires
        time.sleep(0.05)


@pytest.mark.capability("P17", clause="the page is read-only and needs the token")
def test_nobody_reads_a_run_without_the_token_and_nobody_changes_one(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    with served(tmp_path) as address:
        for path in ("/", "/api/runs", "/api/curves", "/api/changes", "/api/curve.csv", "/nothing"):
            for token in ("", "the-tokem", TOKEN + "x", "%ff"):
                assert get(address + path, token)[0] == 403, (path, token)
            assert get(address + path, method="POST")[0] == get(address + path, "", "DELETE")[0] == 405
        status, headers, body = get(address + "/")
        assert status == 200 and b"<script src" in body and b"http" not in body.split(b"</head>")[0]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "httponly" in headers["set-cookie"].lower() and headers["x-content-type-options"] == "nosniff"
        assert get(address + "/page.js", "")[0] == 200 and get(address + "/page.py")[0] == 404
        assert get(address + "/page.%2e%2e%2fpage_server.py")[0] == 404


@pytest.mark.capability("P17", clause="at most two seconds behind a run")
def test_what_a_run_writes_is_announced_and_there_to_read(tmp_path: Path) -> None:
    """Also of a run that is not there yet, one that is resumed, and one that is removed."""
    run = write_run(tmp_path / "a", f1=0.5)
    with served(tmp_path) as address:
        (only,) = read(address + "/api/runs")["runs"]
        assert (only["steps_done"], only["status"], only["loss"]) == (5, "unknown", 0.2)
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), SECONDS) as stream:
            stream.sendall(f"GET /api/changes?token={TOKEN} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            lines = stream.makefile("rb")
            began = next(line for line in lines if line.startswith(b"data: "))
            append(run, step_record(5, loss="nan", f1=0.75), *rank_records(5, (1.0, 3.0)))
            assert next(line for line in lines if line.startswith(b"data: ")) != began
        curves = read(f"{address}/api/curves?run={only['id']}&name=loss&name=metrics.f1&first=3")
        assert [curve["last"] for curve in curves] == [[0.25, 0.2, None], [0.5, 0.5, 0.75]]
        assert curves[0]["steps"] == [3, 4, 5] and curves[0]["times"] == [1003.0, 1004.0, 1005.0]
        (state,) = read(address + "/api/runs")["runs"]
        assert [rank["round_seconds"] for rank in state["ranks"]] == [1.0, 3.0]
        append(run, {"event": "warning", "level": "warning", "rank": 1, "time": 2.0, "text": "<b>"})
        write_run(tmp_path / "b", num_steps=1)
        wait_until(lambda: len(read(address + "/api/runs")["runs"]) == 2)
        events = read(f"{address}/api/runs/{only['id']}/events?after=0")
        assert [(event["number"], event["text"]) for event in events] == [(1, "<b>")]
        rows = list(
            csv.reader(io.StringIO(get(f"{address}/api/curve.csv?run={only['id']}&name=loss")[2].decode()))
        )
        assert rows[0] == ["run", "name", "step", "time", "value"] and rows[-1] == [
            "a",
            "loss",
            "5",
            "1005.0",
            "nan",
        ]
        (tmp_path / "b" / "recipe.toml").unlink()
        wait_until(lambda: names_of(read(address + "/api/runs")["runs"]) == ["a"])


def test_bad_input_is_answered_and_changes_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "step": 7}\n\x00\xff\n[]\n{"event": "ranks", "rank": "x"}\n')
    append(run, {**step_record(5), "loss": "inf", "metrics": {"far": "-inf"}})
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "empty" / "metrics.jsonl")
    (tmp_path / "empty" / "recipe.toml").write_text("not TOML [")
    with served(tmp_path, tmp_path / "missing") as address:
        by_name = {state["name"]: state for state in read(address + "/api/runs")["runs"]}
        wait_until(lambda: len(read(address + "/api/runs")["runs"]) == 2)
        by_name = {state["name"]: state for state in read(address + "/api/runs")["runs"]}
        assert by_name["a"]["damaged_lines"] == 4 and by_name["a"]["loss"] is None
        assert by_name["empty"]["status"] == "new" and by_name["empty"]["steps_done"] == 0
        key = by_name["a"]["id"]
        for words in ("first=x", "points=-1", "points=999999999", "first=99", "end=0", "name=unheard"):
            (curve,) = read(f"{address}/api/curves?run={key}&name=loss&{words}")[:1]
            assert len(curve["steps"]) == len(curve["last"]) <= 6
        assert read(f"{address}/api/curves?run=unheard&name=loss")[0]["steps"] == []
        assert get(f"{address}/api/runs/unheard")[0] == 404
        assert read(f"{address}/api/runs/unheard/events") == []


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_thousand_connections_hold_nobody_up_and_those_that_leave_cost_nothing(tmp_path: Path) -> None:
    """Half of them are streams, the others say nothing; a half hangs up, and then all do."""
    run = write_run(tmp_path / "a")
    with served(tmp_path) as address:
        port = int(address.rpartition(":")[2])
        read(address + "/api/runs")
        before, streams = num_descriptors(), []
        for number in range(1000):
            stream = socket.create_connection(("127.0.0.1", port), SECONDS)
            if number % 2:
                stream.sendall(f"GET /api/changes?token={TOKEN} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert stream.recv(12) == b"HTTP/1.1 200"
            streams.append(stream)
        for stream in streams[:500]:
            stream.close()
        append(run, step_record(5, loss=0.125))
        wait_until(lambda: read(address + "/api/runs")["runs"][0]["loss"] == 0.125)
        for stream in streams[500:]:
            stream.close()
        append(run, step_record(6))  # a stream notices with its next message
        wait_until(lambda: num_descriptors() <= before + 2)


def test_a_run_on_a_host_with_another_clock_is_silent_by_the_clock_of_this_one(tmp_path: Path) -> None:
    """Its records are of 1970 and its samples of next year; neither makes it silent, nor later than it is."""
    run = write_run(tmp_path / "a")
    watch = RunWatch(run)
    watch.update()
    assert watch.status == "unknown" and watch.silent_seconds < SECONDS and not watch.is_silent
    sample = {"event": "system", "rank": 0, "host": "b", "seconds": 1.0, "time": time.time() + 3e7}
    (run / "system-1.jsonl").write_text(
        json.dumps({**sample, "cpu_seconds": {"user": 1.0, "idle": 1.0}}) + "\n"
    )
    watch._samples_checked = 0.0
    wait_until(lambda: watch.update() or bool(watch.hosts))
    assert watch.state()["updated"] == 1004.0 and not watch.is_silent
    assert watch.curves.points("host.b.cpu_fraction").steps == [4]
    watch._heard -= 31.0
    assert watch.is_silent and watch.details()["rank_problems"][1].startswith("hung? no record for 31 s")


def test_ranks_that_are_lost_or_gone_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    lost = {"event": "lost", "level": "warning", "rank": 1, "time": 1005.0, "step": 5, "reason": "killed"}
    append(run, lost)
    samples = [{"event": "process", "rank": 0, "time": 1005.0, "pid": 7, "seconds": 1.0}]
    samples += [
        {"event": "system", "rank": 0, "host": "b", "time": 1005.0 + k, "seconds": 1.0} for k in range(3)
    ]
    (run / "system.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    watch = RunWatch(run)
    watch.update()
    assert watch.details()["rank_problems"] == {1: "lost: killed", 0: "gone: process 7 has ended"}
    append(run, run_record(step=5))  # it was started again
    watch.update()
    assert 1 not in watch.details()["rank_problems"]
    append(
        run, {"event": "error", "level": "error", "rank": 1, "time": 1006.0, "text": "no", "kind": "error"}
    )
    watch.update()
    assert watch.details()["rank_problems"] == {1: "failed: no"}


def test_a_port_in_use_and_a_folder_that_is_missing_are_errors_with_a_next_step(tmp_path: Path) -> None:
    from paceline.cli.watch import _existing_folders, _listen

    with _listen("127.0.0.1", 0) as listener:
        with pytest.raises(DataError, match="in use") as caught:
            _listen("127.0.0.1", listener.getsockname()[1])
        assert "--port" in caught.value.next_step
    with pytest.raises(DataError, match="does not exist"):
        _existing_folders([tmp_path / "missing"])
    with served(tmp_path) as address:  # a folder without a run is watched until there is one
        assert read(address + "/api/runs")["runs"] == []
        run = write_run(tmp_path / "a")
        (run / "metrics.jsonl").write_text("")  # it has begun, and written nothing yet
        wait_until(lambda: names_of(read(address + "/api/runs")["runs"]) == ["a"])
        assert read(address + "/api/runs")["runs"][0]["status"] == "new"


def test_a_long_run_is_shown_before_it_is_read(tmp_path: Path) -> None:
    """From evenly spaced rows; once it is read, from all of them."""
    from paceline.watch.run_collection import RunCollection

    run = write_run(tmp_path / "a", num_steps=0)
    append(run, *(step_record(k, loss=50.0 if k == 12345 else 1.0 / (k + 1)) for k in range(20_000)))
    runs = RunCollection([tmp_path])
    runs._find()
    (key,) = (state["id"] for state in runs.summaries())
    ((_, _, before),) = runs.points([key], ["loss"], 0, None, 2000)
    assert 200 < len(before.steps) < 1000 and before.steps[0] == 0 and before.steps[-1] == 19_999
    assert max(b - a for a, b in zip(before.steps, before.steps[1:], strict=False)) < 150
    assert all(
        value == 1.0 / (step + 1)
        for step, value in zip(before.steps, before.last, strict=True)
        if step != 12345
    )
    ((_, _, part),) = runs.points([key], ["loss"], 12_300, 12_360, 2000)
    assert part.steps == list(range(12_300, 12_360)) and part.last[45] == 50.0
    runs.read_all()
    ((_, _, after),) = runs.points([key], ["loss"], 0, None, 2000)
    assert len(after.steps) == 2000 and max(after.high) == 50.0


def test_single_steps_of_a_run_whose_rows_were_joined_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From several files, found by their steps, and from the newest records of a run that goes on."""
    import paceline.watch.curves as curves_module
    from paceline.watch.run_collection import RunCollection

    monkeypatch.setattr(curves_module, "_MAX_ROWS", 256)
    run = write_run(tmp_path / "a", num_steps=0)
    for number, first in enumerate((0, 3000), 1):
        append(run, *(step_record(k, loss=float(k)) for k in range(first, first + 3000)))
        (run / "metrics.jsonl").rename(run / f"metrics.{number:04d}.jsonl")
    append(run, *(step_record(k, loss=float(k)) for k in range(6000, 7000)))
    runs = RunCollection([tmp_path])
    runs.read_all()
    (key,) = (state["id"] for state in runs.summaries())
    ((_, _, whole),) = runs.points([key], ["loss"], 0, None, 800)
    assert len(whole.steps) < 256 and whole.low[1] < whole.high[1]
    for first, end in ((2990, 3010), (0, 20), (6980, 7010)):
        ((_, _, part),) = runs.points([key], ["loss"], first, end, 800)
        assert part.steps == list(range(first, min(end, 7000))) and part.last == [*map(float, part.steps)]
    append(run, step_record(7000, loss=7000.0))
    runs.read_all()
    ((_, _, part),) = runs.points([key], ["loss"], 6980, 7010, 800)
    assert part.last[-1] == 7000.0
