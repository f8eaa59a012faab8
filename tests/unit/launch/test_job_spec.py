"""The exact workers that a job becomes, and the jobs that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.launch import LaunchJob, render_workers, script_command
from paceline.launch.job_spec import NodeContext

PLACE = NodeContext("10.0.0.1", 29500, 29600, 7, (8, 9), "the-token", Path("/logs"), cores=6)
JOB = LaunchJob(("python", "train.py"), 2, nodes=2, node_rank=0, rendezvous="10.0.0.1:29500")


def test_the_first_worker_in_full() -> None:
    first = render_workers(JOB, PLACE, {"HOME": "/home"})[0]
    assert first.argv == ("python", "train.py")
    assert first.environ == {
        "HOME": "/home",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "MALLOC_TRIM_THRESHOLD_": "2147483647",
        "MALLOC_MMAP_THRESHOLD_": "2147483647",
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29600",
        "PACELINE_STORE_PORT": "29500",
        "PACELINE_TOKEN": "the-token",
        "PACELINE_ERROR_DIR": "/logs",
        "PACELINE_TLS": "auto",
        "PACELINE_LISTEN_FD": "7",
        "PACELINE_STORE_FD": "8",
    }
    assert first.files == {"PACELINE_STORE_FD": 8, "PACELINE_LISTEN_FD": 7}
    assert first.log_file is None


@pytest.mark.capability("O1")
def test_local_rank_counts_on_its_own_node() -> None:
    job = LaunchJob(("python", "train.py"), 2, nodes=2, node_rank=1, rendezvous="10.0.0.1:29500")
    workers = render_workers(job, replace(PLACE, store_fds=(), listen_fd=None), {})
    assert [worker.environ["RANK"] for worker in workers] == ["2", "3"]
    assert [worker.environ["LOCAL_RANK"] for worker in workers] == ["0", "1"]
    assert {worker.environ["GROUP_RANK"] for worker in workers} == {"1"}
    assert [worker.files for worker in workers] == [{}, {}]
    assert [worker.log_file for worker in workers] == [None, Path("/logs/rank-3.log")]


def test_variables_of_an_outer_launcher_do_not_leak() -> None:
    outer = {"PACELINE_LISTEN_FD": "99", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "5"}
    second = render_workers(JOB, PLACE, outer)[1]
    assert "PACELINE_LISTEN_FD" not in second.environ
    assert "TORCHELASTIC_USE_AGENT_STORE" not in second.environ
    assert second.environ["RANK"] == "1"


@pytest.mark.parametrize(
    ("threads", "inherited", "expected"),
    [(0, {}, "3"), (0, {"OMP_NUM_THREADS": "5"}, "5"), (2, {"OMP_NUM_THREADS": "5"}, "2")],
)
def test_threads(threads: int, inherited: dict[str, str], expected: str) -> None:
    job = LaunchJob(("x",), 2, threads=threads)
    environ = render_workers(job, PLACE, inherited)[0].environ
    assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == expected


def test_more_processes_than_cores_get_one_thread_each() -> None:
    last = render_workers(LaunchJob(("x",), 8), replace(PLACE, store_fds=()), {})[7]
    assert last.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": ()}, "command is empty"),
        ({"num_processes": 0}, "num_processes is 0"),
        ({"nodes": 0}, "nodes is 0"),
        ({"nodes": 2}, "need a rendezvous"),
        ({"nodes": 2, "node_rank": 2, "rendezvous": "h:1"}, "node_rank is 2, expected 0 to 1"),
        ({"threads": -1}, "threads is -1"),
        ({"rendezvous": "host"}, "expected HOST:PORT"),
        ({"rendezvous": "host:port"}, "expected HOST:PORT"),
        ({"rendezvous": "host:70000"}, "expected HOST:PORT"),
        ({"rendezvous": ":29500"}, "expected HOST:PORT"),
    ],
)
def test_impossible_jobs_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        LaunchJob(**{"command": ("x",), "num_processes": 1, **arguments})  # type: ignore[arg-type]


def test_rendezvous_with_a_version_6_address() -> None:
    assert LaunchJob(("x",), 1, nodes=2, rendezvous="[::1]:29500").endpoint == ("::1", 29500)


def test_script_command_keeps_the_arguments() -> None:
    assert script_command("train.py", "--lr", "1")[1:] == ("-m", "paceline.launch", "train.py", "--lr", "1")
