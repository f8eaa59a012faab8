"""A state that is saved by some ranks is loaded by another number of them, under another strategy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import load_checkpoint
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import CheckpointError, PacelineError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe, Strategy
from paceline.session import checkpointing, fit
from paceline.testing import run_ranks
from paceline.testing.parity import build_test_session
from tests.marks import soak_param

pytestmark = pytest.mark.capability("N3")
STRATEGIES = [
    soak_param("replicas=all", 2, "replicas=all", 3),
    pytest.param("replicas=all", 3, "replicas=all", 1, marks=pytest.mark.soak),
    soak_param("replicas=1 shard=2 zero=1", 2, "replicas=all", 1),
    ("replicas=1 shard=3 zero=1", 3, "replicas=1 shard=2 zero=1", 2),
    pytest.param("replicas=all", 1, "replicas=1 shard=2 zero=1", 2, marks=pytest.mark.soak),
    ("replicas=1 shard=3 zero=2", 3, "replicas=1 shard=2 zero=3", 2),
    ("central-storage", 2, "central-storage", 3),
    pytest.param(
        "replicas=1 shard=2 zero=3 route=native", 2, "replicas=1 shard=3 zero=2", 3, marks=pytest.mark.soak
    ),
    pytest.param("replicas=2 sync=local:2", 2, "replicas=2 sync=local:2", 2, marks=pytest.mark.soak),
    ("replicas=2 sync=diloco:2", 2, "replicas=2 sync=diloco:2", 2),
    soak_param("replicas=2 codec=int8", 2, "replicas=2 codec=int8", 2),
    ("replicas=1 shard=2 zero=3 codec=int8", 2, "replicas=1 shard=2 zero=3 codec=int8", 2),
    pytest.param("servers=2 sync=server", 4, "servers=3 sync=server", 4, marks=pytest.mark.soak),
    ("servers=2 sync=server codec=topk:0.1", 3, "servers=2 sync=server codec=topk:0.1", 3),
]


def digits(strategy: str, steps: int) -> Recipe:
    return Recipe(
        task="digits",
        options={"model": "convnet"},
        steps=steps,
        batch={"size": 46, "shards": 6},
        optimizer={"name": "adamw", "lr": 1e-3},
        strategy=Strategy.parse(strategy),
    )


def save_there(cluster: Cluster, strategy: str, run_dir: Path) -> dict[str, Any]:
    session = build_test_session(cluster, digits(strategy, 4))
    fit(session, run_dir)
    return {name: t.clone() for name, t in session.snapshot().tensors().items()}


def load_here(cluster: Cluster, strategy: str, run_dir: Path) -> tuple[dict[str, Any], int, str]:
    session = build_test_session(cluster, digits(strategy, 6))
    name = checkpointing.restore_checkpoint(session, StorageFolder(str(run_dir / "checkpoints")))
    found = {name: t.clone() for name, t in session.snapshot().tensors().items()}
    step = session.state.step
    fit(session, run_dir)
    return found, step, name


@pytest.mark.parametrize(("strategy", "num_ranks", "then", "num_then"), STRATEGIES)
def test_the_state_moves(strategy: str, num_ranks: int, then: str, num_then: int, tmp_path: Path) -> None:
    saved = run_ranks(save_there, num_ranks, strategy, tmp_path)[0]
    for rank, (found, step, name) in enumerate(run_ranks(load_here, num_then, then, tmp_path)):
        assert (step, name) == (4, "step-00000004")
        assert found.keys() == saved.keys()
        own = "optimizer/" if rank and "sync" in then else "-"  # replicas that train alone: see inner/
        assert all(torch.equal(found[name], t) for name, t in saved.items() if not name.startswith(own))
    assert [
        kept.step for kept in CheckpointCatalog.read(StorageFolder(str(tmp_path / "checkpoints"))).whole
    ] == [4, 6]


@pytest.mark.capability("N1")
def test_replicas_share_the_writing_and_parts_are_written_once(tmp_path: Path) -> None:
    run_ranks(save_there, 3, "replicas=all", tmp_path)
    files = (
        CheckpointCatalog.read(StorageFolder(str(tmp_path / "checkpoints"))),
        StorageFolder(str(tmp_path / "checkpoints")),
    )
    manifest = load_checkpoint(files[1], files[0].whole[0].name).manifest
    names = [chunk.name for file in manifest.files for chunk in file.chunks]
    assert len(manifest.files) == 3 and len(names) == len(set(names))
    sizes = [sum(chunk.num_bytes for chunk in file.chunks) for file in manifest.files]
    assert max(sizes) < 0.7 * sum(sizes)
    assert manifest.origin.world_size == 3 and manifest.origin.strategy == "replicas=3 sync=every-step"


@pytest.mark.capability("N13")
def test_a_file_that_one_rank_wrote_is_damaged_and_all_ranks_go_back_together(tmp_path: Path) -> None:
    run_ranks(save_there, 2, "replicas=all", tmp_path)
    run_ranks(load_here, 2, "replicas=all", tmp_path)
    path = tmp_path / "checkpoints" / "step-00000006" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ends = run_ranks(load_here, 2, "replicas=all", tmp_path)
    assert [(step, name) for _, step, name in ends] == [(4, "step-00000004")] * 2


def lose_a_rank(cluster: Cluster, run_dir: Path) -> str:
    """Rank 1 cannot write; rank 0 must not publish."""
    recipe = digits("replicas=all", 2)
    options = recipe.checkpoint.replace(deadline_seconds=1.0, folder=str(run_dir / "c"))
    if cluster.global_rank == 1:
        StorageFolder.write = StorageFolder.publish = _refuse
    try:
        fit(build_test_session(cluster, recipe.replace(checkpoint=options)), run_dir)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error.what}"
    except (PacelineError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def _refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.capability("N13", "N4")
def test_without_the_part_of_every_rank_there_is_no_checkpoint(tmp_path: Path) -> None:
    said = run_ranks(lose_a_rank, 2, tmp_path)
    assert "rank 1 has not written its part" in said[0] and "No space left" in said[1]
    shelf = CheckpointCatalog.read(StorageFolder(str(tmp_path / "c")))
    assert not shelf.whole and list(shelf.broken) == ["step-00000002"]
    assert json.loads((tmp_path / "c" / "step-00000002" / "rank-00000.json").read_text())["files"]


CODED = {"gradients": "replicas=2 codec=topk:0.1", "movements": "replicas=2 sync=local:2 codec=topk:0.1"}
THEN = {
    "replicas=2 codec=topk:0.1": (),
    "replicas=2 codec=int8 sync=local:2": (),
    "replicas=2": ("gradients",),
    "replicas=2 sync=local:2": ("gradients",),
    "servers=1 sync=server": ("gradients",),
    "replicas=2 sync=gossip:1": ("gradients", "movements"),
    "replicas=2 sync=hogwild": ("gradients", "movements"),
}


def save_coded(cluster: Cluster, folder: Path) -> None:
    for name, strategy in CODED.items():
        save_there(cluster, strategy, folder / name)


def warned(cluster: Cluster, folder: Path) -> dict[str, dict[str, list[str]]]:
    """By strategy, of which states it says that what was not sent is dropped."""
    found: dict[str, dict[str, list[str]]] = {}
    for strategy in THEN:
        found[strategy] = {}
        for name in CODED:
            session = build_test_session(cluster, digits(strategy, 6))
            checkpointing.restore_checkpoint(session, StorageFolder(str(folder / name / "checkpoints")))
            said = [record["text"] for event, record in session.events.take() if event == "warning"]
            found[strategy] |= {name: said} if said else {}
            session.close()
    return found


@pytest.mark.timeout(240)
@pytest.mark.capability("N3", "H4")
def test_what_coding_had_not_sent_is_not_dropped_unheard(tmp_path: Path) -> None:
    """Who has no use for it says so; who sends it, or moves the parameters by it, says nothing."""
    run_ranks(save_coded, 2, tmp_path)
    for rank in run_ranks(warned, 2, tmp_path):
        assert {strategy: tuple(said) for strategy, said in rank.items()} == THEN
        (text,) = rank["replicas=2"]["gradients"]
        assert text.startswith("step-00000004 has unsent quantisation errors of 'replicas=2 sync")
