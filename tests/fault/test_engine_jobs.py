"""Jobs that Slurm and Open MPI really start: one job each, with the state of the plain run at its end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import build_app
from paceline.launch.engine_clients import explain_client_error
from paceline.search import open_study
from tests.cli.test_tune import SLOW, require_whole
from tests.cli.test_tune import prepare as prepare_study
from tests.cli.test_tune import words as study_words
from tests.cli.test_tune_workers import QUICK_SPACE
from tests.commands import run, start
from tests.fault.test_network_client_jobs import NAMES, name_flags, write_jobs
from tests.slurm_cluster import SlurmCluster, missing_programs, slurm_cluster

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
SECONDS = 240.0
TASK = """
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from paceline import Loss, Task

HOLD = Path(__file__).parent / "hold"


def build():
    points = torch.rand(64, 2, generator=torch.Generator().manual_seed(0))
    data = list(zip(points, (points.sum(1) > 1).long(), strict=True))
    calls = []

    def loss(model, batch):
        x, y = batch
        if model.training:
            calls.append(1)
            while len(calls) > 4 and HOLD.exists():  # until the test has done something to the job
                time.sleep(0.05)
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    return Task(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)), data=data, loss=loss)
"""
RECIPE = """
task = "task.py:build"
steps = 12
reproducible = true
[batch]
size = 8
shards = 2
[runtime]
threads = 1
"""
PACELINE = (sys.executable, "-m", "paceline")


def write_job(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "task.py").write_text(TASK)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def hash_in(printed: str) -> str:
    found = re.findall(r"state sha256: (\w+)", printed)
    assert found, printed
    return str(found[-1])


def until(is_done: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    expires = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < expires, what
        time.sleep(0.1)


@pytest.fixture(scope="module")
def plain_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_job(tmp_path_factory.mktemp("plain") / "job")
    done = run(folder, "train", "recipe.toml", "-n", 2)
    assert done.returncode == 0, done.stderr
    return hash_in(done.stdout)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"needs {missing} (make engines)")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, folder.parent, folder.parent.parent):
        parent.chmod(0o755)  # munge refuses a socket in a folder that others cannot enter
    with slurm_cluster(folder / "cluster") as running:
        yield running


def own_cluster(place: Path) -> AbstractContextManager[SlurmCluster]:
    """A cluster for a test that starts a daemon again, which no test may leave behind."""
    for folder in (place, place.parent, place.parent.parent):
        folder.chmod(0o755)
    return slurm_cluster(place / "cluster")


def submit(
    cluster: SlurmCluster, folder: Path, name: str, *options: str, settings: Sequence[str] = ()
) -> str:
    words = ["submit", "recipe.toml", "--on", "slurm", "--nodes", "2", "-n", "1", "--name", name]
    words += [word for option in ("mem=0", "partition=low", *options) for word in ("--option", option)]
    words += [word for setting in settings for word in ("--set", setting)]
    done = cluster.run(*PACELINE, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = re.search(r"job (\d+):", done.stdout)
    assert found is not None, done.stdout
    return found[1]


def has_trained(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.is_file() and '"event": "step"' in metrics.read_text()


@pytest.mark.soak  # a submitted job, which srun starts on two nodes, is in the suite
@pytest.mark.capability("O3", "B6")
def test_tasks_of_srun_are_one_job_on_one_node_and_on_two(
    cluster: SlurmCluster, plain_hash: str, tmp_path: Path
) -> None:
    folder = write_job(tmp_path / "job")
    train = ("train", "recipe.toml", "--set")
    one = cluster.run("srun", "-n", "2", *PACELINE, *train, "run_dir=one", cwd=folder)
    two = cluster.run(
        *("srun", "-N", "2", *PACELINE, *train, "run_dir=two"), cwd=folder, PACELINE_TOKEN="of this test"
    )
    assert [one.returncode, two.returncode] == [0, 0], one.stderr + two.stderr
    assert hash_in(one.stdout) == hash_in(two.stdout) == plain_hash
    assert '"ranks": 2' in (folder / "two" / "metrics.jsonl").read_text()
    absent = cluster.run("srun", "-N", "2", *PACELINE, "train", "none.toml", cwd=folder)
    assert absent.returncode == 2 and "node 1 of 2 has no file none.toml" in absent.stderr
    keyless = cluster.run("srun", "-N", "2", *PACELINE, *train, "run_dir=none", cwd=folder)
    assert keyless.returncode == 4 and "a job on 2 nodes needs a key" in keyless.stderr
    table = '{"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 0}}'
    nested = cluster.run("srun", "-n", "2", *PACELINE, *train, "run_dir=none", cwd=folder, TF_CONFIG=table)
    assert nested.returncode and "TF_CONFIG says rank 0 of 3" in nested.stderr


def preempt(cluster: SlurmCluster, folder: Path, name: str) -> str:
    """Submit a job, preempt it while it trains, and let it continue; returns what it printed."""
    (folder / "hold").touch()
    job = submit(cluster, folder, name)
    until(lambda: has_trained(folder / "runs" / name), f"{job} does not train: {cluster.job_state(job)}")
    first = cluster.run("sbatch", "-p", "high", "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    assert first.returncode == 0, first.stderr
    until(lambda: "CANCELLED AT" in _output(folder, name, job), f"{job} was told nothing")
    (folder / "hold").unlink()
    until(lambda: cluster.job_state(job) == "PENDING", "it was not queued again")
    assert not (folder / "runs" / name / "checkpoints" / "step-00000012").exists()
    until(lambda: cluster.job_state(first.stdout.split()[-1]) == "COMPLETED", "the other job does not end")
    cluster.start_soon(job)
    cluster.wait_for_state(job, "COMPLETED", seconds=SECONDS)
    return (folder / f"{name}-{job}.out").read_text()


@pytest.mark.capability("O3", "N7")
def test_a_preempted_job_saves_is_queued_again_and_ends_as_one_that_was_not(
    cluster: SlurmCluster, plain_hash: str, tmp_path: Path
) -> None:
    folder = write_job(tmp_path / "job")
    printed = preempt(cluster, folder, "preempted")
    assert "Exited with exit code 143" in printed and "resume: step" in printed
    assert hash_in(printed) == plain_hash
    assert [path.name for path in (folder / "runs").iterdir()] == ["preempted"]


@pytest.mark.soak
@pytest.mark.capability("O3")
def test_a_cancelled_job_saves_and_is_not_queued_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job")
    (folder / "hold").touch()
    job = submit(cluster, folder, "cancelled")
    until(
        lambda: has_trained(folder / "runs" / "cancelled"), f"{job} does not train: {cluster.job_state(job)}"
    )
    done = cluster.run(*PACELINE, "submit", "--on", "slurm", "--cancel", job)
    assert done.returncode == 0, done.stderr
    (folder / "hold").unlink()
    assert cluster.wait_for_state(job, "CANCELLED", "PENDING", "COMPLETED", "FAILED") == "CANCELLED"
    assert [*(folder / "runs" / "cancelled" / "checkpoints").glob("step-*")]


@pytest.mark.soak
@pytest.mark.capability("O3")
def test_a_job_that_waits_for_a_full_partition_says_so_and_its_exit_code_is_returned(
    cluster: SlurmCluster, plain_hash: str, tmp_path: Path
) -> None:
    folder = write_job(tmp_path / "job")
    words = ("sbatch", "--parsable", "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 60")
    first = cluster.run(*words)
    assert first.returncode == 0, first.stderr
    submission = ("submit", "recipe.toml", "--on", "slurm", "--nodes", "2", "-n", "1", "--name", "waiting")
    options = ("--option", "mem=0", "--option", "partition=low", "--attach")
    log = folder / "log"
    with log.open("wb") as output:
        waiting = subprocess.Popen(
            [*PACELINE, *submission, *options],
            cwd=folder,
            env=dict(cluster.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            until(lambda: "the partition is full" in log.read_text(), "it does not say why it waits")
            cluster.run("scancel", first.stdout.strip())
            code = waiting.wait(SECONDS)
        finally:
            waiting.kill()
            waiting.wait()
    assert code == 0 and hash_in(log.read_text()) == plain_hash, log.read_text()


def test_what_slurm_refuses_has_a_next_step(cluster: SlurmCluster, tmp_path: Path) -> None:
    """What sbatch says here; its texts are those of Slurm 22.05."""
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n")
    for option, advice in (("--partition=none", "sinfo"), ("--cpus-per-task=99", "no node is that large")):
        error = explain_client_error("sbatch", cluster.run("sbatch", option, str(script)).stderr)
        assert advice in error.next_step, error


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.capability("O3", "N7")
def test_a_sweep_is_a_job_array_of_which_a_preempted_task_is_queued_again_alone(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last task is the preempted one: its number in Slurm is that of the whole array."""
    folder = write_job(tmp_path / "job")
    (folder / "hold").touch()
    axis = ("--over", "seed=1,2,3")
    words = ("submit", "recipe.toml", "--on", "slurm", "--name", "seeds", *axis)
    options = ("--option", "mem=0", "--option", "partition=low")
    done = cluster.run(*PACELINE, *words, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    array = re.findall(r"job (\d+):", done.stdout)[-1]
    tasks = [f"{array}_{index}" for index in range(3)]
    sweep = folder / "sweeps" / "seeds"
    runs = [sweep / f"seed={seed}" for seed in (1, 2, 3)]
    until(lambda: all(map(has_trained, runs)), f"not all train: {cluster.describe(array)}")
    collect = ("sweep", "recipe.toml", "--collect", "--out", str(sweep), *axis)
    monkeypatch.chdir(folder)
    early = CliRunner().invoke(build_app(), collect)
    assert early.exit_code == 1 and early.stdout.count("it is not complete: running") == 3, early.output

    shown = cluster.run("scontrol", "show", "job", "-o", tasks[2]).stdout
    assert f"JobId={array} " in shown, shown
    node = re.findall(r" NodeList=(n\d)", shown)[-1]
    alone = ("-p", "high", "-w", node, "--exclusive", "-o", "/dev/null")
    first = cluster.run("sbatch", "--parsable", *alone, "--wrap", "true")
    assert first.returncode == 0, first.stderr
    outputs = [folder / f"seeds-{task}.out" for task in tasks]
    until(lambda: "CANCELLED AT" in outputs[2].read_text(), cluster.describe(tasks[2]))
    (folder / "hold").unlink()
    until(lambda: cluster.job_state(tasks[2]) == "PENDING", cluster.describe(tasks[2]))
    until(lambda: cluster.job_state(first.stdout.strip()) == "COMPLETED", "the other job does not end")
    cluster.start_soon(tasks[2])
    for task in tasks:
        cluster.wait_for_state(task, "COMPLETED", seconds=SECONDS)
    printed = [path.read_text() for path in outputs]
    assert ["resume: step" in text for text in printed] == [False, False, True]
    plain = run(folder, "train", "recipe.toml", "--set", "seed=3")
    assert hash_in(printed[2]) == hash_in(plain.stdout)
    results = CliRunner().invoke(build_app(), [*collect, "--json"])
    assert results.exit_code == 0, results.output
    found = json.loads(results.stdout)
    assert [(row["runs"], row["numbers"]["steps"]["mean"]) for row in found["rows"]] == [(3, 12.0)]
    again = CliRunner().invoke(build_app(), words)
    assert "all runs of this sweep are complete" in str(again.exception), again.output


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.capability("O3", clause="an executor: trials of a search run as tasks of Slurm")
def test_trials_of_a_search_are_tasks_of_slurm_and_no_job_outlives_the_coordinator(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    folder = prepare_study(tmp_path / "study", QUICK_SPACE, SLOW)
    tune = [*PACELINE, *study_words(3, 2, "--nodes", "2", "--on", "slurm", "--option", "partition=low")]
    refused = cluster.run(*tune[:-1], "partition=none", cwd=folder)
    assert refused.returncode == 1 and "sinfo" in refused.stderr, refused.stderr
    sleeps = ("sbatch", "--parsable", "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 60")
    sleeper = cluster.run(*sleeps).stdout.strip()
    cluster.wait_for_state(sleeper, "RUNNING")
    crowded = cluster.run(*tune, "--option", "wait=1", cwd=folder)
    assert crowded.returncode == 4 and "not found 2 nodes with 1 core free" in crowded.stderr, crowded.stderr
    cluster.run("scancel", sleeper)

    joined = re.compile(r"worker \d+ \(.*, process (\d+)\) has joined")
    killed = cluster.start(*tune, cwd=folder)
    assert killed.stdout is not None and any(map(joined.search, killed.stdout))
    assert cluster.run("squeue", "-h", "-o", "%j %D").stdout.strip() == "paceline 2"
    killed.kill()
    until(lambda: not cluster.run("squeue", "-h").stdout.strip(), "the allocation is still there")

    study = cluster.start(*tune, cwd=folder)
    assert study.stdout is not None
    lines = iter(study.stdout)
    places = [found[1] for found in map(joined.search, islice(lines, 4)) if found is not None]
    until(lambda: len([*folder.glob("out/trial-*/metrics.jsonl")]) >= 2, "no two trials run")
    os.kill(int(places[0]), signal.SIGKILL)
    printed = "".join(lines)
    assert study.wait(SECONDS) == 0, printed
    assert "has ended: killed by signal 9" in printed and "best: trial" in printed
    alone = prepare_study(tmp_path / "alone", QUICK_SPACE, SLOW)
    assert run(alone, *study_words(3, 1)).returncode == 0
    require_whole(open_study(folder / "out"), open_study(alone / "out"))


@pytest.mark.capability("Q9")
def test_clients_of_a_federated_run_are_tasks_of_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    """One client on each of two nodes and two here; the weights are those of simulated clients."""
    words = write_jobs(tmp_path)
    of_slurm = [*words, *name_flags(NAMES[:2]), "--on", "slurm", "--engine-option", "partition=low"]
    uneven = cluster.run(*PACELINE, *of_slurm, "--nodes", "3", cwd=tmp_path)
    assert uneven.returncode == 2 and "2 clients cannot be divided among 3 nodes" in uneven.stderr
    with ExitStack() as stack:
        server = start(tmp_path, "train", "network.toml", "--token-file", "key", "-n", "1")
        here = [start(tmp_path, *words, "--name", name) for name in NAMES[2:]]
        commands = [stack.enter_context(command) for command in (server, *here)]
        clients = cluster.run(*PACELINE, *of_slurm, "--nodes", "2", cwd=tmp_path)
        ends = [command.communicate() for command in commands]
        codes = [clients.returncode, *(command.returncode for command in commands)]
    assert codes == [0] * 4, (clients.stdout, clients.stderr, ends)
    assert clients.stdout.count("the run is complete") == 2
    assert not cluster.run("squeue", "-h").stdout.strip()
    assert hash_in(ends[0][0]) == hash_in(run(tmp_path, "train", "simulated.toml").stdout)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.capability("O3", "N7")
def test_twenty_preempted_jobs_of_twenty_continue(
    cluster: SlurmCluster, plain_hash: str, tmp_path: Path
) -> None:
    folder = write_job(tmp_path / "job")
    ends = [hash_in(preempt(cluster, folder, f"job-{number}")) for number in range(20)]
    assert ends == [plain_hash] * 20


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.capability("O3", "N7")
def test_a_time_limit_is_announced_and_the_job_continues(
    cluster: SlurmCluster, plain_hash: str, tmp_path: Path
) -> None:
    folder = write_job(tmp_path / "job")
    (folder / "hold").touch()
    job = submit(cluster, folder, "limited", "time=4", "signal=TERM@60")
    until(lambda: "CANCELLED AT" in _output(folder, "limited", job), "no notice", 320.0)
    (folder / "hold").unlink()
    until(lambda: cluster.job_state(job) == "PENDING", "it was not queued again")
    cluster.start_soon(job)
    cluster.wait_for_state(job, "COMPLETED", seconds=SECONDS)
    assert hash_in(_output(folder, "limited", job)) == plain_hash


@pytest.mark.soak
@pytest.mark.capability("O3")
def test_a_job_does_not_need_the_daemon_of_a_node(plain_hash: str, tmp_path: Path) -> None:
    """Only the daemon is killed: its tasks train on, and another one finds them."""
    with own_cluster(tmp_path) as cluster:
        folder = write_job(tmp_path / "job")
        (folder / "hold").touch()
        job = submit(cluster, folder, "daemon")
        until(
            lambda: has_trained(folder / "runs" / "daemon"), f"{job} does not train: {cluster.job_state(job)}"
        )
        cluster.kill_daemon("n2")
        (folder / "hold").unlink()
        until(lambda: "state sha256" in _output(folder, "daemon", job), "it does not end")
        cluster.start_daemon("n2")
        cluster.wait_for_state(job, "COMPLETED", seconds=SECONDS)
        assert hash_in(_output(folder, "daemon", job)) == plain_hash


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.capability("O3", "N8")
def test_a_job_that_loses_a_node_is_queued_again_and_continues(plain_hash: str, tmp_path: Path) -> None:
    """Slurm finds the node lost after its `SlurmdTimeout`, and queues the job again."""
    with own_cluster(tmp_path) as cluster:
        folder = write_job(tmp_path / "job")
        (folder / "hold").touch()
        job = submit(cluster, folder, "lost", settings=("checkpoint.every_steps=2",))
        saved = folder / "runs" / "lost" / "checkpoints"
        until(lambda: bool([*saved.glob("step-00000004/manifest.json")]), cluster.describe(job))
        cluster.kill_node("n2", job)
        until(lambda: cluster.job_state(job) == "PENDING", cluster.describe(job), 200.0)
        (folder / "hold").unlink()
        cluster.start_daemon("n2")
        cluster.start_soon(job)
        cluster.wait_for_state(job, "COMPLETED", seconds=SECONDS)
        printed = _output(folder, "lost", job)
        assert "resume: step" in printed and hash_in(printed) == plain_hash


def _output(folder: Path, name: str, job: str) -> str:
    path = folder / f"{name}-{job}.out"
    return path.read_text() if path.is_file() else ""


@pytest.mark.capability("O7", "B6")
def test_processes_of_mpirun_are_one_job(
    plain_hash: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, and by the script that `paceline submit --on mpi` writes."""
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun of Open MPI (make engines)")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    folder = write_job(tmp_path / "job")
    words = [
        "submit",
        "recipe.toml",
        "--on",
        "mpi",
        "-n",
        "2",
        "--name",
        "by-mpi",
        "--option",
        "oversubscribe",
    ]
    done = run(folder, *words, anew=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert hash_in(done.stdout) == plain_hash
    assert '"ranks": 2' in (folder / "runs" / "by-mpi" / "metrics.jsonl").read_text()
