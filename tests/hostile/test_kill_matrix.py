"""Six signals to seven kinds of process at five moments, under seven strategies: jobs end, and leave nothing.

222 trials in the soak, five in the suite. A trial whose process was not there when its moment came says so
(`hit`), and shows only that the job left nothing.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch.actors import as_users_have_it
from tests.hostile.kill_trials import MOMENTS, OWN, SIGNALS, TARGETS, trials
from tests.hostile.leftovers import left_of, name_of, things

ROOT = Path(__file__).parents[2]
STOPPED = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


def may_unshare() -> bool:
    tool = shutil.which("unshare")
    return (
        tool is not None and subprocess.run([*OWN, "true"], capture_output=True, check=False).returncode == 0
    )


pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not may_unshare(), reason="needs namespaces"),
]


def attempt(folder: Path, *chosen: int) -> list[dict[str, Any]]:
    words = [*OWN, sys.executable, "-m", "tests.hostile.kill_trials", str(folder), *map(str, chosen)]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, env=as_users_have_it()
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(chosen), done.stderr
    return found


def allowed(target: str, number: int, strategy: str) -> set[int]:
    """The exit codes that a job may end with."""
    died = 128 + number
    if target == "last rank" and "servers" in strategy:
        return {0} | allowed(target, number, "")  # it goes on without a worker
    if target == "launcher":
        return {0, STOPPED.get(signal.Signals(number), -number)}
    if target in ("reaper", "writer"):
        return {0}
    if target == "fork server":
        return {0} if number == signal.SIGSTOP else {0, 137}
    if target == "loader worker":
        return {0, 2, 4} if number == signal.SIGSTOP else {0, 2}  # the other rank may be the first to give up
    if number == signal.SIGSTOP:
        return {0, 4}  # replicas continue without it, and others start again if they have saved
    asked = {143, 130} if number in (signal.SIGTERM, signal.SIGINT) else set()
    return {0, died} | asked  # 0: the others continue, or start again from what they have saved


def mistakes(found: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for one in found:
        trial = one["trial"]
        codes = allowed(trial["target"], trial["number"], trial["strategy"]) if one["hit"] else {0}
        if one["left"] or one["code"] not in codes:
            wrong.append(
                f"{trial}: {one['code']} after {one['seconds']:.0f} s, left {one['left']}: {one['err']}"
            )
    return wrong


def number_of(target: str, number: signal.Signals, moment: str) -> int:
    places = [(trial.target, trial.number, trial.moment) for trial in trials()]
    return places.index((target, number, moment))


@pytest.mark.soak
def test_a_few_of_all_trials_end_with_an_exit_code_of_the_table_and_leave_nothing(tmp_path: Path) -> None:
    few = [
        ("launcher", signal.SIGKILL, "step"),
        ("reaper", signal.SIGSTOP, "step"),
        ("fork server", signal.SIGKILL, "build"),
        ("last rank", signal.SIGKILL, "save"),
        ("loader worker", signal.SIGKILL, "step"),
    ]
    found = attempt(tmp_path, *(number_of(*one) for one in few))
    assert mistakes(found) == []
    assert sum(one["hit"] for one in found) >= 4


def test_the_trials_are_at_least_two_hundred_and_every_kind_is_among_them() -> None:
    found = trials()
    assert len(found) >= 200
    assert {one.target for one in found} == {*TARGETS}
    assert {(one.number, one.moment) for one in found} >= {(s, m) for s in SIGNALS for m in MOMENTS}


def test_what_is_left_is_seen(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(["sleep", "600"]) as server:
        before = things(tmp_path, server.pid)
        (tmp_path / "tmp" / "paceline-x").mkdir()
        with subprocess.Popen(["sleep", "600"]) as other, (tmp_path / "file").open("w"):
            left = left_of(tmp_path, server.pid, before, seconds=0.0)
            other.kill()
        server.kill()
    assert left["temporary folders"] == ["paceline-x"]
    assert any(str(other.pid) in line for line in left["processes"]) and left["descriptors"]


def test_a_process_is_seen_from_its_first_moment_on() -> None:
    names = []
    for _ in range(50):
        with subprocess.Popen(["sleep", "600"]) as process:
            names.append(name_of(Path(f"/proc/{process.pid}")))
            process.kill()
    assert names == ["sleep 600 "] * 50


@pytest.mark.soak
@pytest.mark.timeout(10_800)
def test_no_signal_at_any_moment_leaves_anything_behind(tmp_path: Path) -> None:
    found = attempt(tmp_path, *range(len(trials())))
    assert mistakes(found) == []
    assert sum(one["hit"] for one in found) >= 180
