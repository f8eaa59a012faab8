"""The answers of the live page: what the records say, in strict JSON, for whoever has the token."""

from __future__ import annotations

import csv
import io
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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
            assert len(curve["steps"]) == len(curve["low"]) <= 6
        assert read(f"{address}/api/curves?run=unheard&name=loss")[0]["steps"] == []
        assert get(f"{address}/api/runs/unheard")[0] == 404
        assert read(f"{address}/api/runs/unheard/events") == []


def test_readers_that_leave_or_stay_silent_hold_nobody_up(tmp_path: Path) -> None:
    """Three hundred streams and as many connections that say nothing; half of them hang up."""
    run = write_run(tmp_path / "a")
    with served(tmp_path) as address:
        port = int(address.rpartition(":")[2])
        streams = [socket.create_connection(("127.0.0.1", port), SECONDS) for _ in range(600)]
        for stream in streams[::2]:
            stream.sendall(f"GET /api/changes?token={TOKEN} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        for stream in streams[:300]:
            stream.close()
        append(run, step_record(5, loss=0.125))
        wait_until(lambda: read(address + "/api/runs")["runs"][0]["loss"] == 0.125)
        for stream in streams[300:]:
            stream.close()


def test_a_long_run_is_shown_before_it_is_read(tmp_path: Path) -> None:
    """From evenly spaced rows; once it is read, from all of them."""
    from paceline.watch.run_collection import RunCollection

    run = write_run(tmp_path / "a", num_steps=0)
    append(run, *(step_record(k, loss=50.0 if k == 12345 else 1.0 / (k + 1)) for k in range(20_000)))
    runs = RunCollection([tmp_path])
    runs._find()
    (key,) = (state["id"] for state in runs.summaries())
    before = runs.points(key, "loss", 0, None, 2000)
    assert 200 < len(before.steps) < 1000 and before.steps[0] == 0 and before.steps[-1] == 19_999
    assert max(b - a for a, b in zip(before.steps, before.steps[1:], strict=False)) < 150
    assert all(
        value == 1.0 / (step + 1)
        for step, value in zip(before.steps, before.last, strict=True)
        if step != 12345
    )
    runs.read_all()
    after = runs.points(key, "loss", 0, None, 2000)
    assert len(after.steps) == 2000 and max(after.high) == 50.0
