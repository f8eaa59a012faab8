"""Where a worker hangs is known however late it is to say so, and asking one that has ended does no harm."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.launch.process_inspection import enable_stack_dump, read_position, request_stack_dumps
from paceline.observe.process_info import is_stopped

pytestmark = pytest.mark.capability("N5", clause="where a rank that hangs is")
WORKER = """
import signal, sys, time
from pathlib import Path
from paceline.launch.process_inspection import enable_stack_dump

def busy():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # as if it waited for a core
    print("ready", flush=True)
    while signal.SIGUSR2 not in signal.sigpending():
        time.sleep(0.001)
    time.sleep(0.3)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    time.sleep(600)

stack = enable_stack_dump(Path(sys.argv[1]))
busy()
"""


@contextmanager
def worker(stack: Path) -> Iterator[subprocess.Popen[str]]:
    """A worker that is asked and cannot answer yet."""
    words = [sys.executable, "-c", WORKER, str(stack)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_a_worker_that_is_late_to_say_where_it_is_is_waited_for(tmp_path: Path) -> None:
    with worker(tmp_path / "stack") as process:
        request_stack_dumps([(process.pid, tmp_path / "stack")])
        assert read_position(tmp_path / "stack").startswith("pthread_sigmask (signal.py:")


def test_who_is_stopped_is_not_waited_for_and_who_has_ended_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.launch.process_inspection._ANSWER_SECONDS", 1000.0)  # nobody waits so long
    with worker(tmp_path / "stack") as process:
        process.send_signal(signal.SIGSTOP)
        while not is_stopped(process.pid):
            time.sleep(0.001)
        request_stack_dumps([(process.pid, tmp_path / "stack")])
    assert read_position(tmp_path / "stack") == ""
    request_stack_dumps([(process.pid, tmp_path / "stack"), (process.pid, tmp_path / "none")])


def test_a_process_may_be_prepared_more_than_once(tmp_path: Path) -> None:
    """Else the signal is ignored from then on, here and in all that this process starts."""
    before = signal.getsignal(signal.SIGUSR2)
    for name in ("first", "second"):
        with enable_stack_dump(tmp_path / name):
            request_stack_dumps([(os.getpid(), tmp_path / name)])
        assert "request_stack_dumps (process_inspection.py:" in read_position(tmp_path / name)
    faulthandler.unregister(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
