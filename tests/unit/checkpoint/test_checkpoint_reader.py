"""Damaged, half-written and foreign checkpoints are refused by name, and the newest valid one is used."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.strict_json import seal as _seal
from paceline.errors import CheckpointError
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import checkpointing, fit
from paceline.testing.parity import build_test_session
from tests.unit.checkpoint.states import flip_bit, holds, load, make_state, save, whole

pytestmark = pytest.mark.capability("N13")
TENSORS, MANIFEST = "rank-00000.safetensors", "manifest.json"


def flip_header(path: Path) -> None:
    flip_bit(path, place=3)


def cut_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)


def change_a_digit(path: Path) -> None:
    text = path.read_text()
    changed = text.replace('"step": ', '"step": 1', 1)
    assert changed != text
    path.write_text(changed)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads(path.read_text())
    del record["manifest_sha256"]
    change(record)
    path.write_text(json.dumps({**record, "manifest_sha256": _seal(record)}))


def other_format(path: Path) -> None:
    rewrite(path, lambda record: record.update(format=1))


def as_in_format_two(path: Path) -> None:
    """Every file had its SHA-256."""

    def change(record: dict[str, Any]) -> None:
        record["format"] = 2
        for file in record["files"]:
            del file["checksum"]
            file["sha256"] = hashlib.sha256((path.parent / file["name"]).read_bytes()).hexdigest()

    rewrite(path, change)


DAMAGES = [
    pytest.param(TENSORS, flip_bit, "checksum", id="bit"),
    pytest.param(TENSORS, flip_header, "checksum", id="bit of the header"),
    pytest.param(TENSORS, cut_short, "were written", id="cut short"),
    pytest.param(TENSORS, Path.unlink, "is missing", id="removed"),
    pytest.param(MANIFEST, cut_short, "damaged", id="manifest cut short"),
    pytest.param(MANIFEST, Path.unlink, "half-written", id="no manifest"),
    pytest.param(MANIFEST, change_a_digit, "SHA-256 does not fit", id="manifest changed"),
    pytest.param(MANIFEST, other_format, "another format", id="another format"),
    pytest.param(MANIFEST, lambda path: path.write_text("[]"), "damaged", id="a list"),
    pytest.param(MANIFEST, lambda path: path.write_bytes(b"\xff\xfe"), "damaged", id="no text"),
]


@pytest.mark.parametrize(("file", "damage", "reason"), DAMAGES)
def test_damage_is_refused_by_name(
    file: str, damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    name = save(tmp_path, make_state())
    damage(tmp_path / name / file)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load(tmp_path, name)
    assert name in caught.value.what and str(tmp_path) in caught.value.where and caught.value.next_step


def digits(run_dir: Path, steps: int, **changes: object) -> Recipe:
    return Recipe(
        task="digits",
        options={"model": "mlp", "hidden": [4]},
        steps=steps,
        batch={"size": 8, "shards": 2},
        checkpoint={"every_steps": 1, "keep": 9},
        **changes,
    )


@pytest.mark.parametrize(("file", "damage", "reason"), DAMAGES)
def test_a_run_goes_on_from_the_newest_valid_one(
    file: str, damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    fit(build_test_session(Cluster.single(), digits(tmp_path, 3)), tmp_path)
    damage(tmp_path / "checkpoints" / "step-00000003" / file)
    session, told = build_test_session(Cluster.single(), digits(tmp_path, 5)), []
    used = checkpointing.restore_checkpoint(
        session, checkpointing.checkpoint_files(session.recipe, tmp_path), warn=told.append
    )
    assert (used, session.state.step) == ("step-00000002", 2)
    assert len(told) == 1 and "step-00000003" in told[0] and reason in told[0]
    fit(session, tmp_path)
    assert whole(tmp_path / "checkpoints")[-1] == 5


def test_a_checkpoint_of_the_format_before_is_read_and_its_damage_found(tmp_path: Path) -> None:
    state = make_state()
    name = save(tmp_path, state)
    as_in_format_two(tmp_path / name / MANIFEST)
    assert holds(tmp_path, name, state)
    flip_bit(tmp_path / name / TENSORS)
    with pytest.raises(CheckpointError, match="checksum is sha256:"):
        load(tmp_path, name)


def test_without_a_valid_one_there_is_an_error_that_says_why(tmp_path: Path) -> None:
    fit(build_test_session(Cluster.single(), digits(tmp_path, 1)), tmp_path)
    flip_bit(tmp_path / "checkpoints" / "step-00000001" / TENSORS)
    session = build_test_session(Cluster.single(), digits(tmp_path, 2))
    with pytest.raises(CheckpointError, match=r"no valid checkpoint.*checksum"):
        checkpointing.restore_checkpoint(session, checkpointing.checkpoint_files(session.recipe, tmp_path))
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        checkpointing.restore_checkpoint(session, StorageFolder(str(tmp_path / "nowhere")))


def test_a_checkpoint_of_another_run_is_foreign(tmp_path: Path) -> None:
    save(tmp_path / "ours", make_state(2))
    save(tmp_path / "theirs", make_state(7))
    shutil.copytree(tmp_path / "theirs" / "step-00000007", tmp_path / "ours" / "step-00000007")
    shelf = CheckpointCatalog.read(StorageFolder(str(tmp_path / "ours")))
    assert [kept.step for kept in shelf.whole] == [2]
    assert "foreign" in shelf.broken["step-00000007"].what


def test_a_checkpoint_of_another_model_does_not_fit(tmp_path: Path) -> None:
    fit(build_test_session(Cluster.single(), digits(tmp_path, 1)), tmp_path)
    wider = digits(tmp_path, 2).replace(options={"model": "mlp", "hidden": [5]})
    session = build_test_session(Cluster.single(), wider)
    with pytest.raises(CheckpointError, match="does not fit"):
        checkpointing.restore_checkpoint(
            session, checkpointing.checkpoint_files(wider, tmp_path), "step-00000001"
        )
    assert session.state.step == 0


@pytest.mark.parametrize(("file", "damage", "reason"), DAMAGES[2:6])
def test_what_is_damaged_does_not_count_as_kept(
    file: str, damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    """The last good one stays, however many newer ones there are that are not whole."""
    good = save(tmp_path, make_state(1), newest=1)
    for step in (2, 3):
        name = save(tmp_path, make_state(step), newest=3)
        damage(tmp_path / name / file)
    shelf = CheckpointCatalog.read(StorageFolder(str(tmp_path)))
    shelf.remove_expired(1, 0)
    assert load(tmp_path, good).manifest.step == 1
