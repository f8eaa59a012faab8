"""Workers that a fork server starts are what they would be as processes of their own, and end as those do."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.job.cluster import process_environment
from paceline.launch.fork_client import FORK_SERVER_VARIABLE
from paceline.launch.fork_protocol import process_context
from paceline.launch.stale_folders import remove_stale_folders
from tests.dist.launch.actors import (
    ANEW,
    FORKED,
    act,
    alive,
    as_users_have_it,
    driving,
    until,
    without_fork_server,
)

pytestmark = [
    pytest.mark.capability("O1"),
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("server_has_imported"),
]


def told(
    folder: Path, action: str, num_processes: int = 2, start: tuple[str, ...] = FORKED, **options: Any
) -> list[dict[str, Any]]:
    """What workers say about themselves."""
    done = act(folder, f"all={action}", num_processes=num_processes, start=start, **options)
    assert done.exit_code == 0, done.report
    return [json.loads((folder / f"said-{rank}").read_text()) for rank in range(num_processes)]


def forked(folder: Path, *about: Any, **options: Any) -> list[bool]:
    """Which workers a fork server has started."""
    return [one["forked"] for one in told(folder, "say_whence", *about, **options)]


def test_a_forked_worker_is_what_a_new_process_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    copies = told(tmp_path, "describe", threads=2)
    assert [one.pop("forked") for one in copies] == [True, True]
    assert [one.pop("name") for one in copies] == ["rank 0", "rank 1"]
    new = told(tmp_path, "describe", environ=without_fork_server(), threads=2)
    assert [one.pop("forked") for one in new] == [False, False]
    drawn = {number for one in (*copies, *new) for number in one["drawn"]}
    assert len(drawn) == 8, "generators of two processes are alike"
    varying = ("drawn", "name", "files", "open")
    assert [{k: v for k, v in one.items() if k not in varying} for one in copies] == [
        {k: v for k, v in one.items() if k not in varying} for one in new
    ]
    assert copies[0]["directory"] == str(tmp_path / "elsewhere") and copies[0]["threads"] == 2
    assert copies[1]["files"] <= new[1]["files"], (copies[1]["open"], new[1]["open"])


@contextmanager
def core_limit(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


def test_what_a_fork_could_not_have_gets_a_process_of_its_own(tmp_path: Path) -> None:
    with core_limit(4096):
        (limited,) = told(tmp_path, "say_whence", 1)
    assert (limited["forked"], limited["limit"]) == (False, 4096)
    was_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # and so is the fork server: nohup did it
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL if was_deaf else signal.SIG_IGN)
    try:
        assert forked(tmp_path, 1) == [False]
    finally:
        signal.signal(signal.SIGHUP, before)
    assert forked(tmp_path, 1, environ={**process_environment(), "PYTHONHASHSEED": "1"}) == [False]


def test_another_home_and_another_name_of_python_are_no_reason_to_import_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, link = tmp_path / "home", tmp_path / "python-of-another-name"
    home.mkdir()
    link.symlink_to(sys.executable)
    environ = {**process_environment(), "HOME": str(home)}
    assert forked(tmp_path, 1, environ=environ) == [True]
    (home / ".config" / "fsspec").mkdir(parents=True)  # which fsspec reads when it is imported
    assert forked(tmp_path, 1, environ=environ) == [False]
    before = process_context({})
    monkeypatch.setattr(sys, "executable", str(link))
    assert process_context({}) == before
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert process_context({}) != before, "another virtual environment"


FIND_HOME = """
import os, sys
from paceline.launch.fork_server_preload import import_modules
import_modules()
def texts(value):
    return [value] if isinstance(value, str) else [os.fspath(value)] if isinstance(value, os.PathLike) else []
found = {
    f"{name}.{key}" for name, module in list(sys.modules.items()) if name not in ("os", "posix", "__main__")
    for key, value in list(getattr(module, "__dict__", {}).items())
    if not key.startswith("__") and any(os.environ["HOME"] in text for text in texts(value))
}
print(*sorted(found))
"""


@pytest.mark.soak
def test_what_is_imported_remembers_no_home(tmp_path: Path) -> None:
    """But fsspec, see `process_context`, and site, whose names are found again."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIND_HOME],
        env={**process_environment(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {
        "fsspec.config.conf_dir",
        "fsspec.config.default_conf_dir",
        "site.USER_BASE",
        "site.USER_SITE",
    }
    assert set(done.stdout.split()) <= expected


@pytest.mark.parametrize("folder", ["nowhere", "dead"])
def test_a_server_that_is_gone_is_none(tmp_path: Path, folder: str) -> None:
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / "socket").touch()
    environ: Mapping[str, str] = {**process_environment(), FORK_SERVER_VARIABLE: str(tmp_path / folder)}
    assert forked(tmp_path, 1, environ=environ) == [False]


def test_failures_are_told_as_ever(tmp_path: Path) -> None:
    for name in ("raise", "kill", "leave"):
        (tmp_path / name).mkdir()
    raised = act(tmp_path / "raise", "0=lose", "1=late_raise", start=FORKED)
    assert raised.exit_code == 1
    assert raised.report.startswith("rank 1 raised ValueError: boom\n  Traceback")
    assert raised.report.splitlines()[-1].startswith("rank 2 was ended because of that")
    killed = act(tmp_path / "kill", "1=late_kill", start=FORKED)
    assert (killed.exit_code, killed.failures[0].global_rank) == (137, 1)
    left = act(tmp_path / "leave", "1=leave", start=FORKED)
    assert left.report.startswith("rank 1 ended with exit code 7\n  last words\n")


def test_signals_are_passed_on(tmp_path: Path) -> None:
    with driving(tmp_path, "0=obey", "1=child+defy", start=FORKED, grace_seconds=8.0) as launcher:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait()
    assert launcher.returncode == 143
    assert (tmp_path / "finished-0").exists()
    assert (tmp_path / "report").read_text() == "rank 1 did not exit in time and was killed\n"
    until(lambda: not any(alive(path) for path in tmp_path.glob("[pc]*-1")))


LEFT_EARLY = """
import socket
from pathlib import Path
from paceline.launch.fork_protocol import expect_message
from paceline.launch.fork_client import FORK_SERVER_VARIABLE, fork_server
with fork_server() as variables:
    for answered in (False, True):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30.0)
            connection.connect(str(Path(variables[FORK_SERVER_VARIABLE]) / "socket"))
            answered and expect_message(connection)
"""


@pytest.mark.soak
def test_a_launcher_that_dies_before_it_is_answered_is_no_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_EARLY],
        env=as_users_have_it(),
        capture_output=True,  # ends when every process of the server has ended
        text=True,
        check=True,
        timeout=200,
    )
    assert done.stderr == ""


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with driving(tmp_path, "0=child+defy", "1=child+wait", start=FORKED) as launcher:
        numbers = [*tmp_path.glob("pid-*"), *tmp_path.glob("child-*")]
        assert len(numbers) == 4 and all(alive(path) for path in numbers)
        launcher.kill()
        launcher.wait()
        until(lambda: not any(alive(path) for path in numbers))


def test_when_the_server_is_killed_its_workers_are_named_and_gone(tmp_path: Path) -> None:
    with driving(tmp_path, "all=child+defy", start=FORKED) as launcher:
        stat = Path(f"/proc/{(tmp_path / 'pid-0').read_text()}/stat").read_text()
        server = int(stat.rpartition(")")[2].split()[1])
        assert "paceline.launch.fork_server" in Path(f"/proc/{server}/cmdline").read_text()
        launcher.send_signal(signal.SIGSTOP)  # it cannot help
        os.kill(server, signal.SIGKILL)
        until(lambda: not any(alive(path) for path in tmp_path.glob("pid-?")))
        launcher.send_signal(signal.SIGCONT)
        launcher.wait()
    assert launcher.returncode == 137
    report = (tmp_path / "report").read_text()
    assert all(f"rank {rank} " in report for rank in range(2)) and "fork server" in report
    until(lambda: not any(alive(path) for path in tmp_path.glob("[pc]*-?")))


def test_a_server_ends_with_its_owner(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "from paceline.launch.fork_client import FORK_SERVER_VARIABLE, fork_server\n"
        "with fork_server() as variables:\n"
        "    print(variables[FORK_SERVER_VARIABLE], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=as_users_have_it(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        until((folder / "socket").exists)
        until(lambda: len(servers_of(owner.pid)) > 0)  # at first a program has no words yet
        (server,) = servers_of(owner.pid)
        owner.kill()
    until(lambda: not running(server))
    remove_stale_folders()  # as the next start does; the server itself may have been importing
    assert not folder.exists()


def servers_of(owner: int) -> list[Path]:
    return [words for words in children(owner) if "paceline.launch.fork_server" in words.read_text()]


def running(command_line: Path) -> bool:
    """Whether a process is there and is no zombie, whose parent has not looked yet."""
    try:
        return bool(command_line.read_bytes())
    except OSError:
        return False


def children(parent: int) -> list[Path]:
    """The command lines of a process's children."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "stat").read_text().rpartition(")")[2].split()[1] == str(parent):
                found.append(process / "cmdline")
        except OSError:
            continue
    return found


def test_a_command_that_is_not_ours_is_never_forked(tmp_path: Path) -> None:
    assert forked(tmp_path, 1, ANEW) == [False]


def test_a_users_script_is_forked_only_where_that_was_asked_for(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        assert forked(tmp_path, 2, environ=as_users_have_it()) == [False, False]
    finally:
        os.sched_setaffinity(0, before)
