"""Jobs with network clients by the command line: a killed client and a stopped server change no bit."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import Command, run, start
from tests.ports import free_port

pytestmark = [pytest.mark.capability("Q1", "Q9", "G12"), pytest.mark.timeout(300)]
TASK = """
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import Loss, Task

SIZES = {"site-0": 24, "site-1": 12, "site-2": 35, "site-3": 18}


def build(rest_seconds=0.0):
    clients = {}
    for number, (name, n) in enumerate(SIZES.items()):
        x = torch.randn(n, 6, generator=torch.Generator().manual_seed(number))
        clients[name] = TensorDataset(x, (x[:, 0] > 0.3 * number).long())
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)
    )

    def loss(model, batch):
        time.sleep(rest_seconds)
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(x))

    return Task(model, loss=loss, clients=clients)
"""
RECIPE = """
task = "task.py:build"
steps = 8
reproducible = true
hash_every = 1
[optimizer]
name = "sgd"
lr = 0.1
momentum = 0.5
[checkpoint]
every_steps = 1
[runtime]
threads = 1
deadline_seconds = 120.0
"""
SIMULATED = '[strategy]\nsync = "federated:1"\n[federated]\nclients = 4\ncohort = 4\npartition = "natural"\n'
NETWORK = """
[strategy]
sync = "federated:1"
channel = "grpc"
[federated]
clients = "network"
cohort = 4
at_least = 4
listen = "127.0.0.1:{port}"
[security]
certificate = "certificate"
"""
NAMES = [f"site-{number}" for number in range(4)]


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    """The events of a run so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["event"] == event]


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for something that happens soon."""
    expires = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < expires, "it did not happen"
        time.sleep(0.02)


def write_jobs(folder: Path) -> list[str]:
    """Write a job with network clients and one with simulated ones; returns the words of a client."""
    port = free_port()
    (folder / "task.py").write_text(TASK)
    (folder / "simulated.toml").write_text(RECIPE + SIMULATED)
    (folder / "network.toml").write_text(RECIPE + NETWORK.format(port=port))
    (folder / "key").write_text("the key of the job\n")
    assert run(folder, "certificate", "certificate").returncode == 0
    words = ["client", f"127.0.0.1:{port}", "--task", "task.py", "--token-file", "key"]
    return [*words, "--certificate", "certificate"]


def name_flags(names: Sequence[str] = NAMES) -> list[str]:
    """The words that name clients."""
    return [word for name in names for word in ("--name", name)]


def test_a_killed_client_and_a_stopped_server_change_no_bit(tmp_path: Path) -> None:
    words = write_jobs(tmp_path)
    alone = run(tmp_path, "train", "simulated.toml", "--set", "run_dir=simulated")
    assert alone.returncode == 0, alone.stderr

    def client(*names: str) -> Command:
        return start(tmp_path, *words, *name_flags(names), "--option", "rest_seconds=0.03")

    folder, serve = tmp_path / "network", ["--token-file", "key", "-n", "1"]
    with ExitStack() as stack:
        server = stack.enter_context(
            start(tmp_path, "train", "network.toml", "--set", "run_dir=network", *serve)
        )
        single = {name: stack.enter_context(client(name)) for name in ("site-0", "site-3")}
        clients = stack.enter_context(client("site-1", "site-2"))
        until(lambda: len(records(folder, "cohort")) >= 2)
        (killed,) = (p for p in psutil.Process(clients.pid).children() if p.cmdline()[-1] == "site-2")
        killed.kill()
        again = stack.enter_context(client("site-2"))
        until(lambda: len(records(folder, "cohort")) >= 5)
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate()
        assert server.returncode == 143, (out, err)
        resumed = stack.enter_context(start(tmp_path, "train", "--resume", "network", *serve))
        out, err = resumed.communicate()
        assert resumed.returncode == 0, err
        for name, command in (single | {"site-2": again}).items():
            out, err = command.communicate()
            assert command.returncode == 0 and "the run is complete" in out, (name, out, err)
        out, err = clients.communicate()
        assert clients.returncode == 137, (out, err)  # that of the killed client
        assert "site-2 was killed by SIGKILL" in out and "1 client of 2 failed: site-2" in out
        assert "[site-1] the run is complete: site-1 has returned" in out, (out, err)
    hashes = {record["step"]: record["sha256"] for record in records(folder, "hash")}
    expected = {record["step"]: record["sha256"] for record in records(tmp_path / "simulated", "hash")}
    assert len(expected) == 8 and hashes == expected
    assert all(not record["left_out"] for record in records(folder, "cohort"))
