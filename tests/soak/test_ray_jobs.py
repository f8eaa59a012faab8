"""Jobs that Ray really starts, on several raylets of this machine: a killed actor, and a killed raylet."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.search import open_study
from tests.cli.test_tune import SLOW, prepare, require_whole, words
from tests.cli.test_tune_workers import QUICK_SPACE
from tests.commands import run, start
from tests.fault.test_engine_jobs import hash_in, until, write_job
from tests.fault.test_network_client_jobs import NAMES, name_flags, write_jobs

ray = pytest.importorskip("ray", reason="needs Ray: pip install ray, in an environment of its own")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of three raylets with one core each, of which a job uses two."""
    started = start_cluster()
    yield started
    started.shutdown()


def start_cluster(attempts: int = 4) -> Any:
    """Start the raylets, and again if Ray gives one up, which needs more than 30 s on a busy machine."""
    from ray.cluster_utils import Cluster

    started = Cluster()
    # Ray raises a bare Exception for a node that it gives up; that of the last attempt is not caught.
    with suppress(Exception) if attempts > 1 else nullcontext():
        for number in range(3):
            head: dict[str, Any] = {"include_dashboard": False} if number == 0 else {}
            started.add_node(num_cpus=1, object_store_memory=100 << 20, **head)
        return started
    started.shutdown()
    for process in psutil.Process().children(recursive=True):  # Ray leaves those of a node that it gave up
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return start_cluster(attempts - 1)


@pytest.fixture(scope="module")
def plain_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_job(tmp_path_factory.mktemp("plain") / "job")
    done = run(folder, "train", "recipe.toml", "-n", 2)
    assert done.returncode == 0, done.stderr
    return hash_in(done.stdout)


class Submission:
    """A `paceline submit --on ray` that runs, with its output in a file."""

    def __init__(self, cluster: Any, folder: Path, name: str, *more: str) -> None:
        self.log = folder / f"{name}.log"
        words = ["submit", "recipe.toml", "--on", "ray", "--nodes", "2", "-n", "1", "--name", name]
        words += ["--option", f"address={cluster.address}", "--set", "checkpoint.every_steps=2", *more]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *words],
                cwd=folder,
                env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def printed(self) -> str:
        """What it has printed."""
        return self.log.read_text()

    def wait(self) -> int:
        """Wait for its end; returns its exit code."""
        try:
            return self.process.wait(300)
        finally:
            self.process.kill()
            self.process.wait()


def rank_process(folder: Path, rank: int) -> int:
    """The process of a rank of the job whose recipe is in this folder."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            environ = (path / "environ").read_text().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if {"train", str(folder / "recipe.toml")} <= {*words} and f"RANK={rank}" in environ:
            return int(path.name)
    raise AssertionError(f"rank {rank} does not run")


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def kill_actor(cluster: Any, folder: Path) -> None:
    os.kill(parent_of(rank_process(folder, 1)), signal.SIGKILL)


def kill_raylet(cluster: Any, folder: Path) -> None:
    """End the raylet of a rank, with its workers; not that of the head, without which there is no cluster."""
    nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    raylets = [parent_of(parent_of(rank_process(folder, rank))) for rank in (0, 1)]
    cluster.remove_node(next(nodes[pid] for pid in raylets if pid in nodes), allow_graceful=False)


@pytest.mark.capability("B6")
def test_a_job_on_two_raylets_ends_as_the_plain_one_and_returns_errors(
    cluster: Any, plain_hash: str, tmp_path: Path
) -> None:
    folder = write_job(tmp_path / "job")
    job = Submission(cluster, folder, "plain")
    assert job.wait() == 0, job.printed
    assert hash_in(job.printed) == plain_hash
    assert '"ranks": 2' in (folder / "runs" / "plain" / "metrics.jsonl").read_text()
    task = (folder / "task.py").read_text().replace("calls.append(1)", "raise RuntimeError('of this test')")
    (folder / "task.py").write_text(task)
    failed = Submission(cluster, folder, "failed")
    assert failed.wait() == 1, failed.printed
    assert "RuntimeError: of this test" in failed.printed and "restart" not in failed.printed


@pytest.mark.capability("N8")
@pytest.mark.parametrize("kill", [kill_actor, kill_raylet])
def test_a_job_that_loses_a_process_continues_from_its_newest_checkpoint(
    kill: Callable[[Any, Path], None], cluster: Any, plain_hash: str, tmp_path: Path
) -> None:
    folder = write_job(tmp_path / "job")
    (folder / "hold").touch()
    # otherwise the rank that remains may finish the run alone
    job = Submission(cluster, folder, "killed", "--set", "elastic.mode=off")
    saved = folder / "runs" / "killed" / "checkpoints"
    until(lambda: bool([*saved.glob("step-00000004/manifest.json")]), job.printed)
    kill(cluster, folder)
    time.sleep(1)
    (folder / "hold").unlink()
    assert job.wait() == 0, job.printed
    assert "restart 1 of 3 from step 4" in job.printed and "resume: step 4" in job.printed
    assert hash_in(job.printed) == plain_hash


def test_a_cluster_that_is_too_small_is_an_error_with_a_next_step(cluster: Any, tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job")
    settings = ("--set", "reproducible=false", "--set", "runtime.threads=8")
    job = Submission(cluster, folder, "large", *settings, "--option", "wait=5")
    assert job.wait() == 4, job.printed
    assert "ray status" in job.printed


@pytest.mark.capability("S4", clause="an executor starts the workers")
def test_trials_of_a_search_run_in_actors_also_without_one_that_was_killed(
    cluster: Any, tmp_path: Path
) -> None:
    folder = prepare(tmp_path / "study", QUICK_SPACE, SLOW)
    ray_words = ("--on", "ray", "--nodes", "2", "--option", f"address={cluster.address}")
    log, environ = tmp_path / "printed", {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("wb") as output:
        study = subprocess.Popen(
            [sys.executable, "-m", "paceline", *words(3, 2, *ray_words)],
            cwd=folder,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: log.read_text().count("has joined") == 2, "the workers do not join")
        until(lambda: len([*folder.glob("out/trial-*/metrics.jsonl")]) >= 2, "no two trials run")
        worker = int(re.findall(r"process (\d+)\) has joined", log.read_text())[0])
        os.kill(parent_of(worker), signal.SIGKILL)
        assert study.wait(300) == 0, log.read_text()
    finally:
        study.kill()
        study.wait()
    assert "has ended: " in log.read_text()
    alone = prepare(tmp_path / "alone", QUICK_SPACE, SLOW)
    assert run(alone, *words(3, 1)).returncode == 0
    require_whole(open_study(folder / "out"), open_study(alone / "out"))


@pytest.mark.capability("Q9")
def test_clients_of_a_federated_run_are_actors(cluster: Any, tmp_path: Path) -> None:
    """One client on each of two raylets and two of this machine; the weights are those of simulated ones."""
    words = write_jobs(tmp_path)
    on_ray = [*words, *name_flags(NAMES[:2]), "--on", "ray", "--nodes", "2"]
    with (
        start(tmp_path, "train", "network.toml", "--token-file", "key", "-n", "1") as server,
        start(tmp_path, *words, *name_flags(NAMES[2:])) as others,
    ):
        clients = run(tmp_path, *on_ray, "--engine-option", f"address={cluster.address}")
        ends = [command.communicate() for command in (others, server)]
        codes = [clients.returncode, others.returncode, server.returncode]
    assert codes == [0, 0, 0], (clients.stdout, clients.stderr, ends)
    assert clients.stdout.count("the run is complete") == 2
    assert hash_in(ends[1][0]) == hash_in(run(tmp_path, "train", "simulated.toml").stdout)
    # Ray ends the idle workers of a job a moment after the job
    until(lambda: not idle_workers(), "workers of Ray are left", 120.0)


def idle_workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.is_running() and "ray::IDLE" in child.name()]
