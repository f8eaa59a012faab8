"""`paceline tune work`: leases across processes that share only a key, a port and a folder."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from paceline.search import Study, open_study
from paceline.search.study_log import without_times
from tests.cli.test_tune import SLOW, SPACE, TASK, prepare, require_whole, run, words
from tests.commands import Command, start
from tests.ports import free_port

pytestmark = pytest.mark.timeout(400)

QUICK_SPACE = SPACE.replace("confirm", "# confirm")


class RemoteStudy:
    """A coordinator without workers of its own, and workers that join it."""

    def __init__(self, folder: Path, trials: int = 3, lease: float = 20.0) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "key").write_text("correct horse battery staple\n")
        listen = ["--listen", f"127.0.0.1:{self.port}", "--token-file", "key", "--lease", str(lease)]
        self._command = words(trials, 0, *listen)
        self.coordinator = start(folder, *self._command)
        self.workers: list[Command] = []

    def join(self) -> Command:
        place = f"127.0.0.1:{self.port}"
        worker = start(self.folder, "tune", "work", place, "--token-file", "key", "--wait", "90")
        self.workers.append(worker)
        return worker

    def restart(self) -> None:
        """Start the coordinator again, after its end."""
        self.coordinator = start(self.folder, *self._command)

    def wait_for_run(self, name: str = "trial-*", count: int = 1) -> None:
        pattern = f"out/{name}/metrics.jsonl"
        wait_until(lambda: len(list(self.folder.glob(pattern))) >= count, self.coordinator)

    def finish(self) -> Study:
        out, err = self.coordinator.communicate()
        assert self.coordinator.returncode == 0, out + err
        for worker in self.workers:
            worker.wait(60)
        return open_study(self.folder / "out")


def wait_until(ready: Callable[[], bool], command: Command) -> None:
    expires = time.monotonic() + 120
    while not ready():
        assert command.poll() is None and time.monotonic() < expires, command.communicate()
        time.sleep(0.02)


def leases(folder: Path) -> list[str]:
    path = folder / "out" / "leases.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = prepare(tmp_path_factory.mktemp("clean"), QUICK_SPACE, SLOW)
    assert run(folder, *words(3, 2)).returncode == 0
    return open_study(folder / "out")


@pytest.mark.capability("S4")
def test_the_trial_of_a_killed_worker_goes_on_at_another_one(tmp_path: Path, clean: Study) -> None:
    remote = RemoteStudy(prepare(tmp_path, QUICK_SPACE, SLOW))
    first, second = remote.join(), remote.join()
    remote.wait_for_run(count=2)
    time.sleep(0.4)
    os.kill(first.pid, signal.SIGKILL)
    study = remote.finish()
    require_whole(study, clean)
    assert [e["event"] for e in without_times(study.events)] == [e["event"] for e in clean.events]
    killed = [lease for lease in study.leases if lease.end == "killed"]
    assert len(killed) == 1 and f"process {first.pid}" in killed[0].reason
    assert f"lease {killed[0].number} has expired" in killed[0].reason
    said = second.communicate()[0]
    assert "the study needs this worker no more" in said and f"lease {killed[0].number}:" not in said


@pytest.mark.soak
def test_a_report_after_the_lease_has_expired_is_rejected(tmp_path: Path, clean: Study) -> None:
    remote = RemoteStudy(prepare(tmp_path, QUICK_SPACE, SLOW), lease=6.0)
    frozen = remote.join()
    remote.wait_for_run()
    os.kill(frozen.pid, signal.SIGSTOP)
    remote.join()
    try:
        wait_until(lambda: any('"killed"' in line for line in leases(tmp_path)), remote.coordinator)
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    study = remote.finish()
    require_whole(study, clean)
    said = frozen.communicate()[0]
    killed = [f"lease {lease.number}:" for lease in study.leases if lease.end == "killed"]
    rejected = [line for line in said.splitlines() if line.endswith("rejected: the lease has expired")]
    assert rejected and all(line.startswith(tuple(killed)) for line in rejected), (killed, said)
    assert "joining again" in said


@pytest.mark.soak  # test_tune.py has one that is killed twice
def test_a_trial_that_loses_two_workers_has_failed_and_the_study_continues(tmp_path: Path) -> None:
    space = '[study]\nobjective = "validation loss"\nsearch = "grid"\nproposals = 1\n[space]\n'
    folder = prepare(tmp_path, space + '"options.width" = { choice = [9, 4] }\n', SLOW)
    # the first trial kills its worker: the parent of the slot, which is the leader of the rank's launcher
    kill = "[os.kill(int(p), 9) for p in (HERE / 'workers').read_text().split()] if width == 9 else 0"
    (folder / "task.py").write_text(TASK.replace("time.sleep(seconds)", f"time.sleep(seconds); {kill}"))
    remote = RemoteStudy(folder, trials=2)
    for number in (1, 2):
        worker = remote.join()
        (folder / "workers").write_text(str(worker.pid))
        worker.wait(120)
        assert worker.returncode == -signal.SIGKILL, (number, worker.communicate())
    (folder / "workers").write_text("")
    remote.join()
    study = remote.finish()
    assert [trial.status for trial in study.trials] == ["failed", "complete"]
    assert "killed 2 times" in study.trials[0].reason
    assert "failed: killed 2 times; it was resumed once" in (study.folder / "study.html").read_text()
    assert [lease.end for lease in study.leases] == ["killed", "killed", "done"]


@pytest.mark.soak
def test_workers_need_the_key_and_the_folder(tmp_path: Path) -> None:
    remote = RemoteStudy(prepare(tmp_path, QUICK_SPACE, SLOW), trials=1)
    place = f"127.0.0.1:{remote.port}"
    (tmp_path / "other").write_text("another key\n")
    refused = run(tmp_path, "tune", "work", place, "--token-file", "other")
    assert refused.returncode != 0 and "different token" in refused.stderr
    (tmp_path / "elsewhere").mkdir()
    refused = run(tmp_path, "tune", "work", place, "--token-file", "key", "--out", "elsewhere")
    assert refused.returncode != 0 and "does not see the study's folder" in refused.stderr
    refused = run(tmp_path, "tune", "work", place)
    assert refused.returncode == 2 and "need a key" in refused.stderr
    leaving = remote.join()  # and one that is stopped gives its run back, which counts as no kill
    remote.wait_for_run()
    os.kill(leaving.pid, signal.SIGTERM)
    assert leaving.wait(60) == 0
    remote.join()
    study = remote.finish()
    assert study.trials[0].status == "complete"
    ends = [lease.end for lease in study.leases]
    assert ends[0] == "lost" and ends[-1] == "done" and set(ends[1:-1]) <= {"paused"}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["coordinator", "worker"])
def test_kills_at_twenty_moments_with_workers_of_other_machines(
    tmp_path: Path, clean: Study, kind: str
) -> None:
    for moment in range(20):
        folder = tmp_path / str(moment)
        folder.mkdir()
        remote = RemoteStudy(prepare(folder, QUICK_SPACE, SLOW), lease=8.0)
        workers = [remote.join(), remote.join()]
        remote.wait_for_run()
        time.sleep(0.15 * moment)
        if kind == "worker":
            with suppress(ProcessLookupError):  # the study is over
                os.kill(workers[0].pid, signal.SIGKILL)
        elif remote.coordinator.poll() is None:
            os.kill(remote.coordinator.pid, signal.SIGKILL)
            remote.coordinator.wait()
            remote.restart()
        require_whole(remote.finish(), clean)


@pytest.mark.capability("S4", clause="an executor starts the workers")
def test_a_study_whose_started_workers_have_all_ended_ends_and_can_continue(
    tmp_path: Path, clean: Study
) -> None:
    prepare(tmp_path, QUICK_SPACE, SLOW)
    command = words(3, 1, "--on", "local")
    study = start(tmp_path, *command)
    wait_until(lambda: bool([*tmp_path.glob("out/trial-*/metrics.jsonl")]), study)
    (joined,) = [line for line in read_log(tmp_path) if "joined as worker" in line]
    assert joined.startswith("[0] ")
    os.kill(worker_of(study), signal.SIGKILL)
    out, err = study.communicate()
    assert study.returncode == 4 and "all workers of the study have ended" in err, out + err
    assert "worker process 0 has ended: killed by signal 9" in out
    assert run(tmp_path, *command).returncode == 0
    require_whole(open_study(tmp_path / "out"), clean)
    assert "[0] the study needs this worker no more" in read_log(tmp_path)[-1]


def read_log(folder: Path) -> list[str]:
    return (folder / "out" / "logs" / "workers.log").read_text().splitlines()


def worker_of(study: Command) -> int:
    """The process of the worker that a study has started."""
    found = [
        process.pid
        for process in psutil.Process(study.pid).children()
        if process.cmdline()[3:5] == ["tune", "work"]
    ]
    return found[0]


def test_workers_of_an_engine_are_the_same_number_on_each_node(tmp_path: Path) -> None:
    prepare(tmp_path, QUICK_SPACE, SLOW)
    refused = run(tmp_path, *words(3, 3, "--on", "local", "--nodes", "2"))
    assert refused.returncode == 2 and "3 workers cannot be divided among 2 nodes" in refused.stderr
    refused = run(tmp_path, *words(3, 1, "--on", "local", "--option", "partition=low"))
    assert refused.returncode == 2 and "local has no option 'partition'" in refused.stderr
