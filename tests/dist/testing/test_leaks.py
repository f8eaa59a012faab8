"""Processes that a test leaves are found, although those of others are looked at once."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from paceline.testing import leaks
from paceline.testing.leaks import take_snapshot


def test_a_stranger_is_read_once_and_a_new_child_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = take_snapshot(), list[str]()
    plain = leaks._read_stat
    monkeypatch.setattr(leaks, "_read_stat", lambda pid: read.append(pid) or plain(pid))
    with subprocess.Popen(["sleep", "600"]) as child:
        now = take_snapshot(before)
        again = take_snapshot(now)
        child.kill()
    assert child.pid in now.processes and child.pid in again.processes
    assert read.count(str(child.pid)) == 2 and "1" not in read, "the first process comes from no other"
    assert 1 in {pid for pid, _ in again.strangers}


def test_a_child_with_the_number_of_a_stranger_is_no_stranger() -> None:
    before = take_snapshot()
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        gone = {(child.pid, 0), (grandchild, 0)}
        now = take_snapshot(replace(before, strangers=before.strangers | gone))
        subprocess.run(["kill", str(grandchild)], check=True)
    assert {child.pid, grandchild} <= now.processes.keys()
    assert not {child.pid, grandchild} & {pid for pid, _ in now.strangers}
