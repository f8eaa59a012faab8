"""A crash or a full disk at any moment of a save leaves what was saved before, and no half checkpoint."""

from pathlib import Path

import pytest

from paceline.checkpoint import publish, write_plan
from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.publish import FullDiskPatience
from paceline.checkpoint.storage import StorageFolder
from paceline.errors import CheckpointError
from tests.unit.checkpoint.states import holds, make_state, raising, save, saver, whole

pytestmark = pytest.mark.capability("N13", "N4")


@pytest.fixture(autouse=True, params=[1, 3], ids=["one file", "three files"])
def num_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many files a part is cut into."""
    if request.param > 1:
        monkeypatch.setattr(write_plan, "_MIN_FILE_BYTES", 64)
        monkeypatch.setattr(write_plan, "_MAX_FILES", request.param)
    return int(request.param)


class Killed(BaseException):
    """The process dies here: nothing in the code under test may run after it."""


MOMENTS = ("write tensors", "report", "manifest", "tidy: manifest", "tidy: folder")


def break_at(moment: str, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    """Let one call fail."""
    publish, remove = StorageFolder.publish, StorageFolder.remove

    def refuse_publish(self: StorageFolder, name: str, data: bytes) -> None:
        if {"report": "rank-00000.json", "manifest": "manifest.json"}[moment] in name:
            raise error
        publish(self, name, data)

    def refuse_remove(self: StorageFolder, name: str) -> None:
        if ("manifest" in name) == (moment == "tidy: manifest"):
            raise error
        remove(self, name)

    if moment == "write tensors":
        patch.setattr(StorageFolder, "write", raising(error))
    elif moment in ("report", "manifest"):
        patch.setattr(StorageFolder, "publish", refuse_publish)
    else:
        patch.setattr(StorageFolder, "remove", refuse_remove)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_crash_leaves_a_whole_one_and_the_next_save_cleans_up(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = make_state(1), make_state(2, seed=1)
    save(tmp_path, old, newest=1)
    with monkeypatch.context() as patch:
        break_at(moment, Killed(), patch)
        with pytest.raises(Killed):
            save(tmp_path, new, newest=1)
    left = CheckpointCatalog.read(StorageFolder(str(tmp_path))).whole
    assert left and holds(tmp_path, left[-1].name, new if "tidy" in moment else old)
    last = make_state(3, seed=2)
    name = save(tmp_path, last, newest=1)
    assert whole(tmp_path) == [3] and holds(tmp_path, name, last)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]


@pytest.mark.parametrize("moment", MOMENTS[:3])
def test_a_disk_that_refuses_is_an_error_and_the_old_one_stays(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_state(1)
    name = save(tmp_path, old, newest=1)
    with monkeypatch.context() as patch:
        break_at(moment, OSError(28, "No space left on device"), patch)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            save(tmp_path, make_state(2), newest=1)
    assert "step-00000002" in caught.value.where and "full_disk_seconds" in caught.value.next_step
    assert whole(tmp_path) == [1] and holds(tmp_path, name, old)


@pytest.mark.parametrize("moment", MOMENTS[:3])
def test_with_patience_a_full_disk_is_waited_for(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_RETRY_SECONDS", 0.01)
    told, state = [], make_state(2)
    with monkeypatch.context() as patch:

        def make_room(text: str) -> None:
            told.append(text)
            patch.undo()

        break_at(moment, OSError(28, "No space left on device"), patch)
        with saver(tmp_path, state, patience=FullDiskPatience(200.0, make_room)) as one:
            name = one.save()
            one.finish()
    assert holds(tmp_path, name, state)
    assert len(told) == 1 and "full" in told[0] and "200 s" in told[0]


def test_files_reach_the_disk_before_the_manifest_appears(
    num_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    log: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def logged(descriptor: int) -> None:
        log.append("flush " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", logged)
    monkeypatch.setattr(Path, "replace", lambda a, b: (log.append(f"publish {b.name}"), replace(a, b))[1])
    save(tmp_path / "c", make_state())
    before, after = log[: log.index("publish manifest.json")], log[log.index("publish manifest.json") :]
    names = [write_plan.rank_file_name(0, i, num_files) for i in range(num_files)]
    assert {*(f"flush {name}" for name in names), "publish rank-00000.json"} <= set(before)
    assert any(line.startswith("flush .manifest.json") for line in before)
    assert "flush step-00000003" in after
