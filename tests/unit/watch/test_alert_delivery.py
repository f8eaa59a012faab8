"""Alerts are delivered to real servers and commands, and a target that hangs holds nothing up."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.alert_command import alerts
from paceline.errors import DataError
from paceline.watch.alerts import AlertTarget, command, webhook
from paceline.watch.run_watch import RunWatch
from tests.unit.watch.records import append, run_record, step_record

SECONDS = 30.0
RECORD = {"alert": "disk", "state": "firing"}
WRITE = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


@contextmanager
def receiving(*statuses: int, hang_after: int | None = None) -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of a server that answers with these statuses, then with 200, and what it received.

    After `hang_after` requests it answers none until the end of the block.
    """
    received: list[Any] = []
    left = list(statuses)
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if hang_after is not None and len(received) > hang_after:
                ended.wait(SECONDS)
                return
            self.send_response(left.pop(0) if left else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", received
        finally:
            ended.set()
            server.shutdown()
            thread.join(SECONDS)


def test_a_webhook_that_hangs_holds_nothing_up(tmp_path: Path) -> None:
    """Nor does a command that does not end; its neighbor is still called, and both are reported."""
    path, problems = tmp_path / "alerts.jsonl", list[str]()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        targets = [
            AlertTarget("the webhook", webhook(url, 0.2), problems.append, retries=1, pause_seconds=0.01),
            AlertTarget("the sleeper", command(sleep, 0.2), problems.append, retries=0),
            AlertTarget("the command", command([sys.executable, "-c", WRITE, str(path)]), problems.append),
        ]
        for target in targets:
            target.send(RECORD)
        for target in targets:
            target.close(SECONDS)
    assert json.loads(path.read_text()) == RECORD
    assert sorted(text.partition(" was not delivered to ")[2] for text in problems) == [
        "the sleeper: it ran longer than 0.2 s",
        "the webhook: timed out",
    ]


def test_a_webhook_that_fails_is_tried_again_a_few_times() -> None:
    problems: list[str] = []
    with receiving(500, 503) as (url, received):
        target = AlertTarget("the webhook", webhook(url), problems.append, pause_seconds=0.01)
        target.send(RECORD)
        target.close(SECONDS)
        assert received == [RECORD] * 3 and problems == []
    with receiving(*[404] * 9) as (url, received):
        target = AlertTarget("the webhook", webhook(url), problems.append, retries=2, pause_seconds=0.01)
        target.send(RECORD)
        target.close(SECONDS)
        assert len(received) == 3 and problems == [
            "the alert disk was not delivered to the webhook: status 404"
        ]


def test_the_command_line_prints_and_delivers_what_fires(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "a"
    run.mkdir()
    (run / "recipe.toml").write_text('task = "digits"\n')
    append(
        run,
        run_record(),
        *(step_record(k) for k in range(59)),
        *(step_record(k, loss=50.0) for k in (59, 60)),
    )
    append(run, *(step_record(k) for k in range(61, 79)), *(step_record(k, loss="nan") for k in (79, 80)))
    log = tmp_path / "log"
    with receiving() as (url, received):
        alerts([tmp_path], webhook=url, command=f"{sys.executable} -c {json.dumps(WRITE)} {log}")
    (alert,) = received
    assert (alert["run"], alert["alert"], alert["state"], alert["step"]) == ("a", "loss-spike", "firing", 79)
    assert json.loads(log.read_text()) == alert and alert["score"] == "inf"
    text = capsys.readouterr().out
    assert "1 firing, 1 resolved" in text and "loss-spike at step 79: the loss is far above" in text
    alerts([run], as_json=True)
    (shown,) = json.loads(capsys.readouterr().out)
    assert [(a["state"], a["step"]) for a in shown["alerts"]] == [("firing", 79), ("resolved", 65)]
    alerts([run], prometheus=True)
    assert "PacelineLossSpike" in capsys.readouterr().out
    for wrong in ({"webhook": "file:///etc/passwd"}, {"command": "  "}, {"command": "'x"}):
        with pytest.raises(DataError):
            alerts([run], **wrong)


def test_a_page_has_the_alerts_that_fire(tmp_path: Path) -> None:
    append(tmp_path, run_record(), *(step_record(k, loss="inf") for k in (0, 1)))
    run = RunWatch(tmp_path)
    assert run.update() and [alert["alert"] for alert in run.state()["alerts"]] == ["loss-spike"]
    append(tmp_path, *(step_record(k) for k in range(2, 60)))
    assert run.update() and run.state()["alerts"] == []


@contextmanager
def following(*words: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Yield `paceline alerts --follow --json` as it runs, and the lines that it has printed so far."""
    script = "from paceline.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, "alerts", "--follow", "--json", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lines.extend, args=[process.stdout])
    reader.start()
    try:
        yield process, lines
    finally:
        process.kill()
        reader.join(SECONDS)
        process.stdout.close()
        if process.stderr is not None:
            process.stderr.close()
        process.wait(SECONDS)


def wait_until(condition: Callable[[], bool]) -> None:
    expires = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < expires
        time.sleep(0.05)


def test_a_growing_run_is_followed_to_webhook_and_command_and_a_hanging_webhook_stops_nothing(
    tmp_path: Path,
) -> None:
    run, log = tmp_path / "a", tmp_path / "log"
    run.mkdir()
    (run / "recipe.toml").write_text('task = "digits"\n')
    append(
        run,
        run_record(),
        *(step_record(k) for k in range(59)),
        *(step_record(k, loss=50.0) for k in (59, 60)),
    )
    append(run, *(step_record(k) for k in range(61, 69)))
    script = tmp_path / "write.py"
    script.write_text(WRITE)
    command = ["--command", f"{sys.executable} {script} {log}"]

    def delivered() -> list[tuple[str, str, int]]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [(alert["alert"], alert["state"], alert["step"]) for alert in map(json.loads, lines)]

    with (
        receiving(hang_after=2) as (url, received),
        following(str(run), "--webhook", url, *command) as (process, lines),
    ):
        # What fired and was resolved before is no news.
        append(run, *(step_record(k, loss="nan") for k in (69, 70)))
        wait_until(lambda: len(received) >= 1 and len(delivered()) == 1)
        append(run, *(step_record(k) for k in range(71, 89)))
        wait_until(lambda: len(received) >= 2 and len(delivered()) == 2)
        append(run, *(step_record(k, loss=50.0) for k in (89, 90)))  # the webhook hangs from here on
        wait_until(lambda: len(delivered()) == 3)
        append(run, *(step_record(k) for k in range(91, 110)))
        wait_until(lambda: len(delivered()) == 4 and len(lines) == 4)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) in (0, 130)
    spike, calm = ("loss-spike", "firing"), ("loss-spike", "resolved")
    assert [alert[:2] for alert in delivered()] == [spike, calm, spike, calm]
    # What already fires when the following begins is delivered with its first step, else with the one at
    # which it fires.
    first = delivered()[0][2]
    assert first in (69, 70) and [alert[2] for alert in delivered()] == [first, 75, 90, 95]
    assert [(alert["state"], alert["step"]) for alert in received[:2]] == [
        ("firing", first),
        ("resolved", 75),
    ]
    assert [json.loads(line)["step"] for line in lines] == [first, 75, 90, 95]
