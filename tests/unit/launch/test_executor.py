"""What the ends of processes mean for a job, and its restart from the newest checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.launch.executor import (
    ExecutorJob,
    ExecutorProcess,
    LocalExecutor,
    NodeRequest,
    ProcessReport,
    judge_ends,
    plan_processes,
    run_job,
)

JOB = ExecutorJob(NodeRequest(2, 2), ("train",), ("server", "worker", "worker", "worker"))


def end(number: int, code: int | None) -> ProcessReport:
    return ProcessReport(number, ended=True, code=code)


@pytest.mark.parametrize(
    "ends, code",
    [
        ([(0, 0), (1, 0)], 0),
        ([(0, 4), (1, None)], None),  # a node is lost, and the other rank has lost its connection
        ([(1, -9), (0, 4)], None),
        ([(1, 1), (0, 4)], 1),
        ([(0, 4), (1, 2)], 2),
        ([(0, 143), (1, 143)], 143),
        ([(0, 143), (1, 4)], 143),
        ([(0, 4), (1, 4)], 4),
        ([(1, -9), (0, 0)], 0),  # the others have finished the run without it
        ([(0, 0), (1, 5)], 5),
    ],
)
def test_the_cause_decides_how_a_job_ends(ends: Sequence[tuple[int, int | None]], code: int | None) -> None:
    assert judge_ends([end(*one) for one in ends]) == code


def test_ranks_are_placed_node_by_node() -> None:
    planned = plan_processes(JOB, "10.0.0.1:1234", "key")
    assert [(one.node, one.role) for one in planned] == [
        (0, "server"),
        (0, "worker"),
        (1, "worker"),
        (1, "worker"),
    ]
    variables = planned[3].environ
    assert [variables[name] for name in ("RANK", "LOCAL_RANK", "NODE_RANK")] == ["3", "1", "1"]
    assert variables["PACELINE_RENDEZVOUS"] == "10.0.0.1:1234"


class _FailingExecutor(LocalExecutor):
    """An executor whose first process is killed as soon as it runs, at some starts."""

    def __init__(self, kills: int) -> None:
        super().__init__()
        self.kills, self.num_starts = kills, 0

    def start(self, processes: Sequence[ExecutorProcess]) -> None:
        super().start(processes)
        self.num_starts += 1
        if self.num_starts <= self.kills:
            self.children[0].send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    "kills, steps, code, starts",
    [(1, [0, 4], 0, 2), (1, [4, 4], 137, 1), (9, [0, 1, 2, 3], 137, 3)],
)
def test_a_lost_process_starts_all_again_if_there_is_a_newer_checkpoint(
    kills: int, steps: list[int], code: int, starts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    job = ExecutorJob(NodeRequest(1, 2), ("--help",), ("worker", "worker"), max_restarts=2)
    executor, printed = _FailingExecutor(kills), []
    left = iter(steps)
    assert run_job(executor, job, lambda: next(left), printed.append) == code
    assert executor.num_starts == starts and executor.children == []
    text = "".join(printed)
    assert "rank 0 (worker) was killed by SIGKILL" in text
    assert text.count("restart ") == starts - 1 and text.count("Usage: ") >= (code == 0)


def test_a_process_dies_with_its_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    executor = LocalExecutor()
    (tmp_path / "s.py").write_text("import time\ntime.sleep(600)\n")
    executor.start(plan_processes(ExecutorJob(NodeRequest(1, 1), ("run", "s.py"), ("worker",)), "h:1", "k"))
    process = executor.children[0]._process
    assert process is not None
    executor.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
