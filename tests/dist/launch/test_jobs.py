"""Launched jobs whose ranks really meet: on one node, under torchrun, and on several nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from paceline.launch import LaunchJob, launch, script_command
from tests.ports import free_port

HERE = Path(__file__).parent
TRAINER = script_command(str(HERE / "trainer.py"))


@contextmanager
def node(
    report: Path, command: Sequence[str], prefix: Sequence[str] = (), **options: object
) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher of one node as a process of its own; what it prints goes to `report`."""
    job = json.dumps({"command": command, "num_processes": 1, "nodes": 2, **options})
    with report.open("w") as stream:
        launcher = subprocess.Popen(
            [*prefix, sys.executable, str(HERE / "driver.py"), job], stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.capability("O1")
@pytest.mark.parametrize(
    ("fault", "code", "headline"),
    [("raise", 1, "rank 2 raised ValueError: boom"), ("kill", 137, "rank 2 was killed by SIGKILL")],
)
def test_a_fault_between_collectives_ends_the_job(fault: str, code: int, headline: str) -> None:
    outcome = launch(LaunchJob((*TRAINER, f"2={fault}"), 3), log=lambda _: None)
    assert outcome.exit_code == code
    assert outcome.report.startswith(headline)
    assert [failure.kind for failure in outcome.failures[1:]] == ["connection", "connection"]


@pytest.mark.capability("O1")
def test_a_plain_script_runs_as_under_torchrun(tmp_path: Path) -> None:
    command = script_command(str(HERE / "plain.py"), "--lr", "1")
    assert launch(LaunchJob(command, 2, log_dir=tmp_path)).exit_code == 0
    assert (tmp_path / "rank-1.log").read_text() == "rank 1 of 2: 1 ['--lr', '1']\n"


@pytest.mark.capability("O1")
def test_torchrun_starts_the_same_workers() -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", TRAINER[3]]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 1", "rank 1 of 2: 1"]


@pytest.mark.capability("O2")
def test_two_nodes_form_one_job_and_strangers_are_rejected(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    command = (*TRAINER, f"until={stop}", f"started={tmp_path}")
    meet = {"rendezvous": f"127.0.0.1:{free_port()}", "token": "ours"}
    with ExitStack() as cleanup:
        first = cleanup.enter_context(node(tmp_path / "first", command, node_rank=0, **meet))
        second = cleanup.enter_context(node(tmp_path / "second", command, node_rank=1, **meet))
        while len(list(tmp_path.glob("started-*"))) < 2 and first.poll() is None:
            time.sleep(0.02)
        late = cleanup.enter_context(node(tmp_path / "late", TRAINER, node_rank=1, **meet))
        other = {**meet, "token": "theirs"}
        wrong = cleanup.enter_context(node(tmp_path / "wrong", TRAINER, node_rank=1, **other))
        assert late.wait() == 4
        assert wrong.wait() == 4
        assert (first.poll(), second.poll()) == (None, None), "the running job was harmed"
        stop.touch()
        assert (first.wait(), second.wait()) == (0, 0)
    rejected = "rejected: rank 1 has a different token than this job\n"
    assert sorted((tmp_path / "first").read_text().splitlines(True)) == ["rank 0 of 2: 1\n", rejected]
    assert (tmp_path / "second").read_text() == "rank 1 of 2: 1\n"
    assert "rank 1 has already joined the job" in (tmp_path / "late").read_text()
    assert "rank 1 has a different token than the job" in (tmp_path / "wrong").read_text()


@pytest.mark.capability("O2")
def test_the_failure_of_one_node_ends_the_other(tmp_path: Path) -> None:
    meet = {"rendezvous": f"127.0.0.1:{free_port()}"}
    command = (*TRAINER, "1=raise")
    with (
        node(tmp_path / "first", command, node_rank=0, **meet) as first,
        node(tmp_path / "second", command, node_rank=1, **meet) as second,
    ):
        assert (first.wait(), second.wait()) == (1, 1)
    assert "rank 1 raised ValueError: boom" in (tmp_path / "second").read_text()
    assert "look at the other nodes" in (tmp_path / "first").read_text()


@contextmanager
def two_network_namespaces() -> Iterator[tuple[str, str]]:
    """Two hosts with one cable: 10.77.0.1 and 10.77.0.2; skips the test where that is not permitted."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip")
    names = (f"paceline-{os.getpid()}-a", f"paceline-{os.getpid()}-b")
    commands = [f"ip netns add {name}" for name in names]
    commands += [
        f"ip link add va{os.getpid()} netns {names[0]} type veth peer name vb{os.getpid()} netns {names[1]}"
    ]
    for number, (name, link) in enumerate(zip(names, ("va", "vb"), strict=True), start=1):
        inside = f"ip -n {name}"
        commands += [
            f"{inside} address add 10.77.0.{number}/24 dev {link}{os.getpid()}",
            f"{inside} link set {link}{os.getpid()} up",
            f"{inside} link set lo up",
        ]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"network namespaces are not permitted here: {command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.soak  # tests/fault has hosts of the lab
@pytest.mark.capability("O2")
def test_two_network_namespaces_form_one_job(tmp_path: Path) -> None:
    with two_network_namespaces() as names, ExitStack() as cleanup:
        launchers = [
            cleanup.enter_context(
                node(
                    tmp_path / name,
                    TRAINER,
                    ("ip", "netns", "exec", name),
                    node_rank=rank,
                    num_processes=2,
                    rendezvous="10.77.0.1:29500",
                )
            )
            for rank, name in enumerate(names)
        ]
        assert [launcher.wait() for launcher in launchers] == [0, 0]
        assert "rank 0 of 4: 6" in (tmp_path / names[0]).read_text()
        assert "rank 2 of 4: 6" in (tmp_path / names[1]).read_text()
