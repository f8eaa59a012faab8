"""`paceline doctor`: seeded faults of a host and of others are named, with the next step."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from paceline.job.cluster import process_environment
from paceline.launch.host_checks import (
    PlannedJob,
    check_cheaply,
    check_disk,
    check_link_profile,
    check_precision,
    check_shared_memory,
)
from paceline.launch.stale_folders import mark_owner
from tests import command_jobs

# Runs a command "there": on this host, whose clock is 7 s ahead, and where PyTorch is another one.
REMOTE = """#!/bin/sh
shift
case "$1" in
  date) exec date -d "+7 seconds" "$2" ;;
  paceline) shift; {python} -m paceline "$@" | sed 's/"torch": "[^"]*"/"torch": "1.0.0"/' ;;
esac
"""


def doctor(folder: Path, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    variables = {**process_environment(), **environ}
    return subprocess.run(
        ["sh", "-c", script],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_seeded_faults_are_named_with_the_next_step(tmp_path: Path) -> None:
    """A port in use, a name without address, another clock, other versions, a disk that cannot be written,
    few open files, too many threads, leftovers, copies, and a torchvision that cannot be imported.
    """
    (tmp_path / "remote").write_text(REMOTE.format(python=sys.executable))
    (tmp_path / "remote").chmod(0o755)
    broken, left = tmp_path / "packages" / "torchvision", tmp_path / "tmp" / "paceline-left"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    left.mkdir(parents=True)
    mark_owner(left)
    owner = json.loads((left / "owner.json").read_text())
    (left / "owner.json").write_text(json.dumps({**owner, "start": 1}))  # another process had that number
    (tmp_path / "recipe.toml").write_text('task = "digits"\nsteps = 5\nrun_dir = "/proc/runs"\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = f"recipe.toml -n 2 --json --rendezvous 127.0.0.1:{taken.getsockname()[1]}"
        words += " --hosts no-such-host.invalid,localhost --ssh ./remote"
        command = f"{sys.executable} -m paceline doctor {words}"
        path = f"{tmp_path / 'packages'}:{process_environment().get('PYTHONPATH', '')}"
        done = doctor(
            tmp_path,
            f"ulimit -n 100; {command} > other & {command}; code=$?; wait; exit $code",
            OMP_NUM_THREADS="64",
            TMPDIR=str(tmp_path / "tmp"),
            PYTHONPATH=path,
        )
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    expected = {
        "ports": ("error", "cannot be bound", "another port"),
        "names of no-such-host.invalid": ("error", "has no address", "/etc/hosts"),
        "clock of localhost": ("warning", "s ahead", "chrony"),
        "versions of localhost": ("error", "torch 1.0.0", "same versions"),
        "disk": ("error", "cannot be written", "run_dir"),
        "open files": ("error", "at most 100 open files", "ulimit -n"),
        "threads": ("warning", "128 threads of 2 processes", "OMP_NUM_THREADS"),
        "leftovers": ("warning", "1 folder of killed launchers", "rm -r"),
        "copies": ("error", "2 copies of this command", "once on each node"),
        "torchvision": ("error", "nms does not exist", "pip uninstall torchvision"),
    }
    for name, (severity, found, step) in expected.items():
        check = checks[name]
        assert check["severity"] == severity, check
        assert found in check["found"] and step in check["next_step"], check
    unexpected = {name for name, check in checks.items() if check["severity"] != "ok"} - {*expected}
    assert unexpected <= {"names", "memory"}, checks


def test_a_host_without_faults_has_none(tmp_path: Path) -> None:
    done = doctor(tmp_path, f"{sys.executable} -m paceline doctor --json")
    severities = {check["name"]: check["severity"] for check in json.loads(done.stdout)}
    assert "error" not in severities.values() and len(severities) == 12, done.stdout


def test_train_names_what_the_cheap_checks_find(tmp_path: Path) -> None:
    command_jobs.prepare(tmp_path, "")
    (tmp_path / "recipe.toml").write_text('task = "digits"\nsteps = 1\nrun_dir = "/proc/runs"\n')
    with command_jobs.start(tmp_path, "train", "recipe.toml") as command:
        _, errors = command.communicate(timeout=100)
    assert "warning: disk: /proc cannot be written" in errors and "choose another run_dir" in errors
    assert command.returncode != 0


def test_a_format_without_instructions_small_shared_memory_and_a_slow_link(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2\n")
    job = PlannedJob(precision="bf16", folder=tmp_path)
    assert check_precision(job, tmp_path / "cpuinfo").severity == "warning"
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 avx512_bf16\n")
    assert check_precision(job, tmp_path / "cpuinfo").severity == "ok"
    absent = check_shared_memory(job, tmp_path / "none")
    assert absent.severity == ("warning" if sys.platform == "linux" else "ok") and "loader" in absent.found
    assert check_disk(job).severity == "ok"
    (slow,) = check_link_profile({"h1": 1e-3, "h2": 1e-3}, {"h1": 0.05, "h2": 0.003})
    assert slow.name == "link to h1" and "50.0 ms, 2.0 ms in the profile" in slow.found
    names = [check.name for check in check_cheaply(job, {})]
    assert names == ["disk", "memory", "shared memory", "open files", "copies"]
