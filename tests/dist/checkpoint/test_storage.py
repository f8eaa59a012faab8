"""Where checkpoints go and first weights come from: a disk that fills up, and a server that speaks S3."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import nn

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.pretrained import load_weights
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import CheckpointError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import checkpointing, fit
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.dist.checkpoint.object_store import BUCKET

ROOT = Path(__file__).parents[3]
DIGITS = {"task": "digits", "options": {"model": "mlp", "hidden": [64]}, "batch": {"size": 8, "shards": 2}}


# A small disk. A mount needs a namespace of its own, so these run in a process that has one.

SMALL_DISK = """
import sys, threading, time
from pathlib import Path
from paceline.job.cluster import Cluster
from paceline.errors import CheckpointError
from paceline.recipe import Recipe
from paceline.testing.parity import build_test_session
from paceline.session import fit

class Listener:
    def step(self, stats): pass
    def close(self): pass
    def event(self, name, record):
        print(name, record.get("text", record.get("step")), flush=True)
        if name == "warning":
            Path(sys.argv[1], "ballast").unlink()

disk, patience = Path(sys.argv[1]), float(sys.argv[2])
recipe = Recipe(task="digits", options={"model": "mlp", "hidden": [64]}, steps=6,
                batch={"size": 8, "shards": 2},
                checkpoint={"every_steps": 2, "keep": 9, "full_disk_seconds": patience})
session = build_test_session(Cluster.single(), recipe)
class Filler(Listener):
    def step(self, stats):
        if stats.step == 2:
            while not (disk / "checkpoints" / "step-00000002" / "manifest.json").exists():
                time.sleep(0.01)
            fill()
def fill():
    try:
        (disk / "ballast").write_bytes(b"x" * (4 << 20))
    except OSError as error:
        print("filled", error.errno, flush=True)
try:
    print("done", fit(session, disk, [Filler()]).checkpoint, flush=True)
except CheckpointError as error:
    print("refused", error, flush=True)
"""


def on_a_small_disk(tmp_path: Path, patience: float) -> tuple[str, list[int]]:
    """Train on a tmpfs of 1 MiB that is full after the first checkpoint; returns what was printed."""
    disk, script = tmp_path / "disk", tmp_path / "script.py"
    disk.mkdir()
    script.write_text(SMALL_DISK)
    copy = f"cp -r {disk}/checkpoints {tmp_path}/kept"
    command = f"mount -t tmpfs -o size=1m tmpfs {disk} && {sys.executable} {script} {disk} {patience}; {copy}"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", command], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [
        kept.step for kept in CheckpointCatalog.read(StorageFolder(str(tmp_path / "kept"))).whole
    ]


def has_namespaces() -> bool:
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, "-Urm", "true"], check=False).returncode == 0


@pytest.mark.capability("N13", "N1")
@pytest.mark.skipif(not has_namespaces(), reason="needs unshare and user namespaces, to mount a small tmpfs")
@pytest.mark.parametrize("patience", [pytest.param(0.0, marks=pytest.mark.soak), 30.0])
def test_a_full_disk_loses_nothing(tmp_path: Path, patience: float) -> None:
    said, whole = on_a_small_disk(tmp_path, patience)
    assert "filled 28" in said, said
    if patience:
        assert "warning the disk of" in said and "done" in said and whole == [2, 4, 6]
    else:
        assert "refused cannot write a checkpoint" in said and "No space left" in said
        assert "full_disk_seconds" in said and whole == [2]


# A server that speaks S3


def train_to(
    cluster: Cluster, url: str, run_dir: Path, steps: int, strategy: str = "", **settings: object
) -> tuple[int, list[str], str | None]:
    """Resume if there is something to resume from, and train.

    Returns:
        The first step, what the folder holds afterwards, and the hash of a reproducible run.
    """
    import s3fs

    store = s3fs.S3FileSystem(use_listings_cache=False)
    if cluster.global_rank == 0 and not store.exists(BUCKET):
        store.makedirs(BUCKET, exist_ok=True)
    layout = {"strategy": Strategy.parse(strategy)} if strategy else {}
    keep = {"folder": url, "every_steps": 2, "keep": 2}
    recipe = Recipe(**DIGITS, steps=steps, checkpoint=keep, **layout, **settings)
    session = build_test_session(cluster, recipe)
    if session.sum(
        float(cluster.global_rank == 0 and bool(CheckpointCatalog.read(StorageFolder(url)).whole))
    ):
        checkpointing.restore_checkpoint(session, StorageFolder(url))
    first = session.state.step
    sha256 = fit(session, run_dir).sha256
    return first, [kept.name for kept in CheckpointCatalog.read(StorageFolder(url)).whole], sha256


@pytest.mark.capability("N10", "N1", "N2", "N3")
def test_a_run_saves_to_s3_and_goes_on_from_there(server: str, tmp_path: Path) -> None:
    """Saved by two ranks that share all of the state, loaded by one: the bits of a run without a break."""
    run = partial(train_to, optimizer={"name": "adamw", "lr": 0.01}, reproducible=True)
    first = run_ranks(partial(run, strategy="replicas=1 shard=2 zero=3"), 2, server, tmp_path, 5)[0]
    assert first[:2] == (0, ["step-00000004", "step-00000005"])
    last = run_ranks(run, 1, server, tmp_path, 8)[0]
    assert last[:2] == (5, ["step-00000006", "step-00000008"])
    assert not (tmp_path / "checkpoints").exists()
    whole = run_ranks(run, 1, str(tmp_path / "whole"), tmp_path, 8)[0]
    assert last[2] is not None and last[2] == whole[2] != first[2]


def damage(cluster: Cluster, url: str, name: str) -> dict[str, list[int]]:
    """Change one byte of an object, and of another checkpoint remove the manifest."""
    import s3fs

    store = s3fs.S3FileSystem(use_listings_cache=False)
    path = f"{url}/{name}/rank-00000.safetensors"
    data = store.cat_file(path)
    store.pipe_file(path, data[:-1] + bytes([data[-1] ^ 1]))
    manifest = json.loads(store.cat_file(f"{url}/{name}/manifest.json"))
    return {key: list(t.shape) for key, t in load_tensors(data).items()} | {"step": [manifest["step"]]}


@pytest.mark.capability("N10", "N13")
def test_a_damaged_object_is_refused_and_the_one_before_it_is_used(server: str, tmp_path: Path) -> None:
    run_ranks(train_to, 1, server, tmp_path, 4)
    found = run_ranks(damage, 1, server, "step-00000004")[0]
    assert found["step"] == [4] and "model/layers.0.weight" in found
    assert run_ranks(train_to, 1, server, tmp_path, 6)[0][0] == 2


@pytest.mark.capability("W6")
def test_a_folder_in_s3_is_read_and_checked(server: str, tmp_path: Path) -> None:
    import s3fs

    model = nn.Linear(3, 2)
    store = s3fs.S3FileSystem(use_listings_cache=False)
    store.makedirs(BUCKET, exist_ok=True)
    data = save(model.state_dict())
    store.pipe_file(f"{BUCKET}/model/model.safetensors", data)
    folder = f"s3://{BUCKET}/model"
    other = nn.Linear(3, 2)
    assert load_weights(other, folder).unverified_files == ("model.safetensors",)
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
    line = f"{hashlib.sha256(data).hexdigest()}  model.safetensors\n"
    store.pipe_file(f"{BUCKET}/model/SHA256SUMS", line.encode())
    assert load_weights(other, f"{folder}/model.safetensors").unverified_files == ()
    store.pipe_file(f"{BUCKET}/model/model.safetensors", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_weights(other, folder)
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        load_weights(other, f"s3://{BUCKET}/nothing")
