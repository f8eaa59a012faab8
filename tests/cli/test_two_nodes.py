"""Two nodes of two processes, joined over TCP: the same job, and the same end when a worker dies."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from paceline.checkpoint.checkpoint_reader import load_checkpoint
from paceline.checkpoint.storage import StorageFolder
from paceline.job.cluster import Cluster
from paceline.recipe import load_recipe
from paceline.testing.parity import run_oracle
from tests.commands import Command, start
from tests.dist.launch.test_signals import worker
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "options.hidden=[32]",
    "epochs=",
    "batch.size=44",
    "optimizer.weight_decay=0.0",
    "schedule.warmup_steps=2",
]


def start_nodes(run_dir: Path, steps: int, strategy: str, *more: str) -> list[Command]:
    port = free_port()
    settings = [*SETTINGS, f"steps={steps}", f"run_dir={run_dir}"]
    command = ["train", str(ROOT / "recipes" / "digits.toml"), "-n", "2"]
    command += [word for setting in settings for word in ("--set", setting)]
    command += ["--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--insecure"]
    command += ["--strategy", strategy, *more]
    return [start(run_dir, *command, "--node-rank", node) for node in range(2)]


def finish(nodes: list[Command], seconds: float) -> list[str]:
    expires = time.monotonic() + seconds
    try:
        return [node.communicate(timeout=max(0.1, expires - time.monotonic()))[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()


@pytest.mark.capability("O2", "A2", "A8")
@pytest.mark.parametrize(
    "strategy, group",
    [
        pytest.param("ddp", "replica", marks=pytest.mark.soak),
        ("multi-worker-mirrored", "replica-between-nodes"),
    ],
)
def test_two_nodes_of_two_end_where_one_process_ends(strategy: str, group: str, tmp_path: Path) -> None:
    nodes = start_nodes(tmp_path, 12, strategy)
    errors = finish(nodes, 240)
    assert [node.returncode for node in nodes] == [0, 0], errors
    recipe = load_recipe(tmp_path / "recipe.toml")
    oracle = run_oracle(recipe, 12)
    found = load_checkpoint(StorageFolder(str(tmp_path / "checkpoints")), "step-00000012").tensors
    worst = max(float((found[f"model/{name}"] - p).abs().max()) for name, p in oracle.parameters.items())
    assert worst <= 1e-5
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert f"all_reduce {group}" in next(row["rows"] for row in rows if row["event"] == "communication")
    assert Cluster.single().world_size == 1


@pytest.mark.capability("O2", "A8")
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("multi-worker-mirrored", marks=pytest.mark.soak)])
def test_a_worker_that_dies_ends_both_nodes(strategy: str, tmp_path: Path) -> None:
    nodes = start_nodes(tmp_path, 1_000_000, strategy, "--set", "elastic.mode=off")
    try:
        expires = time.monotonic() + 240
        while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text():
            assert time.monotonic() < expires and all(node.poll() is None for node in nodes)
            time.sleep(0.05)
        os.kill(worker(tmp_path, 3), signal.SIGKILL)
        errors = finish(nodes, 100)  # not at the deadline of a wait, which is later
    finally:
        for node in nodes:
            node.kill()
    assert "was killed by SIGKILL" in errors[1]
    assert errors[1].startswith("rank 3 ")
    assert nodes[0].returncode not in (0, None) and "look at the other nodes" in errors[0]


@pytest.mark.capability("N8")
def test_both_nodes_continue_without_a_worker_that_dies_and_one_without_the_other(tmp_path: Path) -> None:
    """Also without rank 0, whose node goes on with its other process, and without the launcher of node 0,
    which serves the store of the job; then a signal stops what is left."""
    nodes, metrics = start_nodes(tmp_path, 1_000_000, "ddp"), tmp_path / "metrics.jsonl"
    expires = time.monotonic() + 240

    def wait_for(text: str) -> None:
        while not metrics.exists() or text not in metrics.read_text():
            assert time.monotonic() < expires and nodes[1].poll() is None
            time.sleep(0.05)

    try:
        wait_for('"event": "step"')
        for rank, left in ((3, 3), (0, 2)):
            os.kill(worker(tmp_path, rank), signal.SIGKILL)
            wait_for(f'"lost": [{rank}], "joined": [], "ranks": {left}')
        nodes[0].send_signal(signal.SIGKILL)
        wait_for('"lost": [1], "joined": [], "ranks": 1')
        nodes[1].send_signal(signal.SIGTERM)
        errors = finish(nodes, 100)
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [-signal.SIGKILL, 143], errors
    assert "rank 0 was killed by SIGKILL" in errors[0] and "rank 3 was killed by SIGKILL" in errors[1]
