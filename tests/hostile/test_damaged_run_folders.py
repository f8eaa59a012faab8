"""Run folders that are damaged, or made by an enemy: what is wrong is named, and what is right is used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.catalog import CheckpointCatalog, has_published
from paceline.checkpoint.lock import FolderLock
from paceline.checkpoint.model_weights import export_weights, find_checkpoint
from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.strict_json import seal as _seal
from paceline.errors import CheckpointError
from paceline.job.cluster import Cluster
from paceline.observe.file_writing import LineAppender
from paceline.recipe import Recipe
from paceline.report import write_report
from paceline.session import checkpointing, fit
from paceline.testing.parity import build_test_session
from tests.marks import soak_param
from tests.unit.checkpoint.states import load, make_state, save, whole

pytestmark = [pytest.mark.capability("N13"), pytest.mark.timeout(240)]


def flips(data: bytes) -> list[bytes]:
    """Every text that differs in one bit."""
    return [
        data[:i] + bytes([data[i] ^ (1 << bit)]) + data[i + 1 :] for i in range(len(data)) for bit in range(8)
    ]


EVERY = pytest.mark.parametrize("stride", [7, soak_param(1)], ids=["every seventh bit", "every bit"])


@EVERY
def test_no_flipped_bit_in_run_json_makes_the_checkpoints_foreign(stride: int, tmp_path: Path) -> None:
    save(tmp_path, make_state(2))
    place = tmp_path / "run.json"
    written = place.read_bytes()
    run = CheckpointCatalog.read(StorageFolder(str(tmp_path))).run
    for damaged in flips(written)[::stride]:
        place.write_bytes(damaged)
        shelf = CheckpointCatalog.read(StorageFolder(str(tmp_path)))
        assert (shelf.run, [kept.step for kept in shelf.whole]) == (run, [2]), damaged
    CheckpointCatalog.read(StorageFolder(str(tmp_path))).claim()
    assert place.read_bytes() == written, "it is repaired by the run that goes on"


def test_a_file_of_an_older_version_with_a_flipped_bit_is_not_believed(tmp_path: Path) -> None:
    save(tmp_path, make_state(2))
    run = CheckpointCatalog.read(StorageFolder(str(tmp_path))).run
    for text in (json.dumps({"run": run}), json.dumps({"run": run[:-1] + "z"}), "{}", "[]", '{"run": 3}'):
        (tmp_path / "run.json").write_text(text)
        assert whole(tmp_path) == [2], text


def test_a_run_that_is_killed_before_its_first_save_orphans_nothing(tmp_path: Path) -> None:
    save(tmp_path, make_state(2))
    (tmp_path / "run.json").unlink()
    CheckpointCatalog.read(StorageFolder(str(tmp_path))).claim()  # and then it is killed
    assert whole(tmp_path) == [2]


@EVERY
def test_a_damaged_losses_json_ends_nothing_and_the_best_one_is_still_known(
    stride: int, tmp_path: Path
) -> None:
    shelf = CheckpointCatalog.read(StorageFolder(str(tmp_path))).claim()
    shelf.record_loss(2, 0.25)
    save(tmp_path, make_state(2))
    save(tmp_path, make_state(3))
    place = tmp_path / "losses.json"
    written = place.read_bytes()
    for damaged in (
        *flips(written)[::stride],
        b"",
        b"[" * 100_000,
        b'{"2x": 1}',
        b'{"2": [1]}',
        b'{"2": NaN}',
    ):
        place.write_bytes(damaged)
        shelf = CheckpointCatalog.read(StorageFolder(str(tmp_path)))
        assert shelf.losses == {2: 0.25}, damaged
    save(tmp_path, make_state(4), newest=1, best=1)
    assert whole(tmp_path) == [2, 4]


# Manifests that carry a right SHA-256, and lie


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    record = json.loads(path.read_text())
    del record["manifest_sha256"]
    change(record)
    path.write_text(json.dumps({**record, "manifest_sha256": _seal(record)}))


def first(record: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = record["files"][0]
    return found


def chunk(record: dict[str, Any], **changes: Any) -> None:
    first(record)["chunks"][0].update(changes)


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a chunk is left out": lambda r: chunk(r, sizes=[1], offsets=[0], shape=[2]),
    "a tensor grows": lambda r: chunk(r, shape=[2**40], sizes=[2**40], offsets=[0]),
    "sizes below zero": lambda r: chunk(r, sizes=[-1]),
    "outside of the tensor": lambda r: chunk(r, offsets=[9, 9]),
    "an axis too many": lambda r: chunk(r, offsets=[0] * 9),
    "twice": lambda r: first(r)["chunks"].append(first(r)["chunks"][0]),
    "an unknown type": lambda r: chunk(r, dtype="F7"),
    "a type that is no word": lambda r: chunk(r, dtype=["F32"]),
    "another type": lambda r: chunk(r, dtype="I32"),
    "another name": lambda r: chunk(r, name="model/other"),
    "a file outside": lambda r: first(r).update(name="../../outside"),
    "a file elsewhere": lambda r: first(r).update(name="/etc/passwd"),
    "a file twice": lambda r: r["files"].append(first(r)),
    "a key too many": lambda r: r.update(more=1),
    "a key too few": lambda r: r.pop("serial"),
    "no files": lambda r: r.pop("files"),
    "files are a number": lambda r: r.update(files=3),
    "a file is a text": lambda r: r.update(files=["rank-00000.safetensors"]),
    "step is a text": lambda r: r.update(step="3"),
    "step is below zero": lambda r: r.update(step=-3),
    "step is huge": lambda r: r.update(step=10**400),
    "serial is true": lambda r: r.update(serial=True),
    "scalars are none": lambda r: r.update(scalars=None),
    "scalars lack a key": lambda r: r["scalars"].pop("updates"),
    "scale is a number": lambda r: r["scalars"].update(scale=1.0),
    "tied to a number": lambda r: r["scalars"].update(tied={"a": 1}),
    "origin lacks a key": lambda r: r["origin"].pop("versions"),
    "run is a list": lambda r: r["origin"].update(run=["a"]),
}


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_manifest_that_lies_is_refused_by_name_and_blocks_no_other(lie: str, tmp_path: Path) -> None:
    good, bad = save(tmp_path, make_state(2)), save(tmp_path, make_state(3))
    rewrite(tmp_path / bad, LIES[lie])
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, bad)
    assert bad in caught.value.what and caught.value.next_step
    assert load(tmp_path, good).manifest.step == 2
    if lie not in ("another type", "another name"):  # that is seen when the file is opened
        assert whole(tmp_path) == [2]


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "loop"])
@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors", "../run.json", "../losses.json"])
def test_what_is_no_file_is_never_waited_for(what: str, file: str, tmp_path: Path) -> None:
    save(tmp_path, make_state(2))
    bad = save(tmp_path, make_state(3))
    path = tmp_path / bad / file
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if what == "device" else path)
    assert 2 in whole(tmp_path)
    if not file.startswith(".."):
        with pytest.raises(CheckpointError):
            load(tmp_path, bad)


def test_weights_that_are_refused_leave_the_state_untouched(tmp_path: Path) -> None:
    recipe = Recipe(
        task="digits", options={"model": "mlp", "hidden": [4]}, steps=1, batch={"size": 8, "shards": 2}
    )
    fit(build_test_session(Cluster.single(), recipe), tmp_path)
    rewrite(
        tmp_path / "checkpoints" / "step-00000001", lambda record: record["scalars"].update(groups=[{}] * 7)
    )
    session = build_test_session(Cluster.single(), recipe)
    before = session.snapshot()
    with pytest.raises(CheckpointError, match="the groups of the optimizer"):
        checkpointing.restore_checkpoint(session, checkpointing.checkpoint_files(recipe, tmp_path))
    after = session.snapshot()
    assert all(value.equal(after.tensors()[name]) for name, value in before.tensors().items())


@pytest.mark.parametrize("recipe", ["no TOML", "", "a" * 9 + " = " + "[" * 5000])
def test_weights_of_a_run_with_a_recipe_that_lies_are_not_exported(recipe: str, tmp_path: Path) -> None:
    name = save(tmp_path, make_state(2))
    rewrite(tmp_path / name, lambda record: record["origin"].update(recipe=recipe))
    with pytest.raises(CheckpointError, match="cannot be exported: its recipe is damaged"):
        export_weights(find_checkpoint(StorageFolder(str(tmp_path)), print), tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with what it contains."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("what", ["checkpoint", "draft"])
def test_nothing_behind_a_link_is_removed(what: str, tmp_path: Path) -> None:
    """A step that leads to a checkpoint of the same run, or to any folder, outside of the run folder."""
    here, outside = tmp_path / "run", tmp_path / "outside"
    name = save(here, make_state(2))
    (here / name).rename(outside)
    if what == "draft":
        (outside / "manifest.json").rename(outside / "precious")
    (here / name).symlink_to(outside)
    before = tree(outside)
    for step in (3, 4, 5):
        save(here, make_state(step), newest=1)
    assert (here / name).is_symlink() and tree(outside) == before
    assert whole(here) == ([2, 5] if what == "checkpoint" else [5])


def is_a_file(step: Path) -> None:
    step.write_text("mine")


def has_a_loop(step: Path) -> None:
    step.mkdir()
    (step / "manifest.json").symlink_to("manifest.json")


def is_a_loop(step: Path) -> None:
    step.symlink_to(step.name)


@pytest.mark.parametrize("spoil", [is_a_file, has_a_loop, is_a_loop])
def test_a_step_that_is_no_checkpoint_blocks_no_later_one(
    spoil: Callable[[Path], None], tmp_path: Path
) -> None:
    name = save(tmp_path, make_state(2))
    odd = tmp_path / name.replace("2", "3")
    spoil(odd)
    assert has_published(StorageFolder(str(tmp_path)))
    saved = save(tmp_path, make_state(3))
    assert saved != odd.name and whole(tmp_path) == [2, 3] and os.path.lexists(odd)


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl", "report.html", "lock", "recipe.toml"])
def test_nothing_is_written_through_a_link_in_a_run_folder(name: str, tmp_path: Path) -> None:
    """The draft of a file that is published is a link as well: its name can be guessed."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.write_text("precious\n")
    (run / name).symlink_to(outside)
    (run / f".{name}.{os.getpid()}").symlink_to(outside)
    warnings: list[str] = []
    if name == "lock":
        with pytest.raises(OSError, match="symbolic link"):
            FolderLock(StorageFolder(str(run)), print)
    elif name == "recipe.toml":
        StorageFolder(str(run)).publish(name, b"new")
        assert (run / name).read_bytes() == b"new" and not (run / name).is_symlink()
    elif name == "report.html":
        (run / "recipe.toml").write_text('task = "sum"\n')
        (run / "metrics.jsonl").write_text("")
        write_report(run)
        assert not (run / name).is_symlink()
    else:
        lines = LineAppender(run / name, lambda path: None, warn=warnings.append)
        lines.append("a line\n")
        lines.close()
        assert "it is a symbolic link" in warnings[0]
    assert outside.read_text() == "precious\n"
