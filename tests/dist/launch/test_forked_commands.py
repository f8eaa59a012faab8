"""Commands that the suite's fork server starts are what new processes are, and end as those do."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.fork_client import FORK_SERVER_VARIABLE
from paceline.launch.job_spec import common_environment
from tests.command_jobs import prepare
from tests.command_jobs import start as start_job
from tests.commands import Command, run
from tests.dist.launch.actors import alive, until

pytestmark = [
    pytest.mark.capability("O1"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("server_has_imported"),
]
SCRIPT = """
import json, os, signal, sys, tempfile, time
from pathlib import Path

def describe():
    names = ("HUP", "INT", "TERM", "USR1", "USR2", "PIPE", "CHLD", "ALRM")
    handlers = [signal.getsignal(getattr(signal, f"SIG{name}")) for name in names]
    said = {
        "arguments": sys.argv,
        "directory": os.getcwd(),
        "path": sys.path[0],
        "variables": dict(os.environ),
        "input": os.readlink("/proc/self/fd/0"),
        "files": len(os.listdir("/proc/self/fd")),
        "handlers": [str(one).partition(" at ")[0] for one in handlers],
        "temporary": tempfile.gettempdir(),
        "leads": os.getsid(0) == os.getpid(),
    }
    Path("said").write_text(json.dumps(said))

def count():
    import torch
    print(torch.get_num_threads())

def wait():
    Path("pid").write_text(str(os.getpid()))
    while True:
        time.sleep(0.1)  # Python sees a signal that comes just before a sleep when that is over

def leave():
    print("to the output")
    sys.stderr.write("to the errors\\n")
    sys.exit(7)

def fail():
    raise ValueError("boom")

globals()[sys.argv[1]]()
"""


def start(folder: Path, what: str, anew: bool = False, **environ: str) -> Command:
    (folder / "script.py").write_text(SCRIPT)
    words = ["paceline.launch", str(folder / "script.py"), what]
    return Command(words, folder, {"TMPDIR": str(folder), **environ}, anew=anew)


def test_a_forked_command_is_what_a_new_process_is(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for anew in (False, True):
        with start(tmp_path, "describe", anew, PACELINE_TOKEN="a key") as command:
            assert command.communicate() == ("", "")
            assert (command.forked, command.returncode) == (not anew, 0)
        found.append(json.loads((tmp_path / "said").read_text()))
    forked, new = found
    assert forked.pop("leads"), "a signal to the terminal of the tests reaches it"
    new.pop("leads")
    assert forked.pop("files") <= new.pop("files")
    assert forked["variables"].pop("PACELINE_TOKEN") == new["variables"].pop("PACELINE_TOKEN") == "a key"
    assert forked.pop("variables") == common_environment(new.pop("variables"))
    assert forked == new and forked["directory"] == forked["temporary"] == str(tmp_path)


@pytest.mark.parametrize(
    ("what", "code", "out", "err"),
    [("leave", 7, "to the output\n", "to the errors\n"), ("fail", 1, "", "boom")],
)
def test_ends_and_texts_are_those_of_a_new_process(
    what: str, code: int, out: str, err: str, tmp_path: Path
) -> None:
    for anew in (False, True):
        with start(tmp_path, what, anew) as command:
            said = command.communicate()
        assert (command.forked, command.returncode, said[0]) == (not anew, code, out)
        assert err in said[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_end_it_as_they_end_a_new_process(number: signal.Signals, tmp_path: Path) -> None:
    for anew in (False, True):
        (tmp_path / "pid").unlink(missing_ok=True)
        with start(tmp_path, "wait", anew) as command:
            until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() == str(command.pid))
            assert command.poll() is None
            command.send_signal(number)
            command.wait()
        assert (command.forked, command.returncode) == (not anew, -number)


def test_who_leaves_it_by_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired), start(tmp_path, "wait") as command:
        until((tmp_path / "pid").exists)
        command.wait(0.01)
    assert command.returncode == -signal.SIGKILL and not alive(tmp_path / "pid")


def test_without_a_number_of_threads_it_has_one_for_each_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is always told how many."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for told, threads in (({}, len(os.sched_getaffinity(0))), ({"OMP_NUM_THREADS": "3"}, 3)):
        with start(tmp_path, "count", **told) as command:
            assert command.communicate() == (f"{threads}\n", "") and command.forked


def test_what_a_fork_could_not_have_is_started(tmp_path: Path) -> None:
    for more in ({"PYTHONHASHSEED": "1"}, {FORK_SERVER_VARIABLE: "none"}):
        with start(tmp_path, "leave", **more) as command:
            assert command.communicate()[0] == "to the output\n"
            assert (command.forked, command.returncode) == (False, 7)
    done = run(tmp_path, "--version")
    assert done.returncode == 0 and done.stdout.startswith("paceline ")


LEAVES = """
import atexit, gzip, os, threading, time
from pathlib import Path
import torch
from paceline import Loss

FORKED = "fork_server" in Path(f"/proc/{os.getppid()}/cmdline").read_text()
TEXT = open("text", "w")
TEXT.write("not flushed")
PACKED = gzip.open("packed", "wt")
PACKED.write("not closed")
BYTES = open("bytes", "wb")
BYTES.write(b"not flushed")

def late():
    time.sleep(0.3)
    Path("late").write_text("waited for")

def build():
    threading.Thread(target=late).start()
    atexit.register(lambda: Path("exit").write_text(f"forked: {FORKED}"))
    return torch.nn.Linear(1, 1), [torch.ones(1)] * 8, lambda model, x: Loss(model(x).sum(), len(x))
"""


def test_what_a_task_leaves_to_the_end_of_python_is_done(tmp_path: Path) -> None:
    prepare(tmp_path, LEAVES)
    with start_job(tmp_path, "train", "recipe.toml", "-n", "1") as command:
        _, said = command.communicate()
    assert command.returncode == 0, said
    assert (tmp_path / "exit").read_text() == "forked: True"
    assert (tmp_path / "late").read_text() == "waited for"
    assert (tmp_path / "text").read_text() == (tmp_path / "bytes").read_text() == "not flushed"
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == b"not closed"
