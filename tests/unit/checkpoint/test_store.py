"""Checkpoints on disk: whole or not there, checked before they are used, and the newest kept."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import checkpoint
from paceline.checkpoint import store
from paceline.errors import CheckpointError
from paceline.state import LossScale, TrainState

pytestmark = pytest.mark.capability("N1")


class Killed(BaseException):
    """The process dies here: nothing in the code under test may run after it."""


def make_state(step: int = 3, seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    state = TrainState(model, torch.optim.Adam(model.parameters(), lr=0.1), LossScale(512.0, 8))
    model(torch.randn(5, 4)).square().sum().backward()
    state.optimizer.step()
    state.step, state.updates = step, step - 1
    return state


def steps_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def whole(path: Path, state: TrainState) -> bool:
    """The checkpoint can be loaded and holds this state."""
    found = checkpoint.load(path)
    same = all(torch.equal(found.tensors[name], t) for name, t in state.tensors().items())
    return same and found.scalars["step"] == state.step


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    state = make_state()
    found = checkpoint.load(checkpoint.save(tmp_path, state, keep=2))
    assert found.tensors.keys() == state.tensors().keys()
    assert found.path == tmp_path / checkpoint.name_of(3)
    other = make_state(step=8, seed=9)
    other.load(found.tensors, found.scalars)
    assert other.scalars() == state.scalars()
    for name, value in state.tensors().items():
        assert torch.equal(other.tensors()[name], value), name


def test_every_type_and_shape_survives(tmp_path: Path) -> None:
    model = nn.Module()
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool):
        model.register_buffer(str(dtype).replace(".", "_"), torch.tensor([[0, 1], [1, 1]]).to(dtype))
    model.register_buffer("scalar", torch.tensor(1.25))
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("transposed", torch.arange(6).view(2, 3).t())
    model.weight = nn.Parameter(torch.zeros(1))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert whole(checkpoint.save(tmp_path, state, keep=1), state)


def test_tensors_that_share_memory_are_saved(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    model.register_buffer("first_row", model.weight.detach()[0])
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert whole(checkpoint.save(tmp_path, state, keep=1), state)


def test_no_pickle_is_written(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, make_state(), keep=1)
    assert sorted(p.name for p in path.iterdir()) == ["state.json", "state.safetensors"]
    assert json.loads((path / "state.json").read_text())["step"] == 3


# Retention


@pytest.mark.parametrize(
    "keep, left", [(1, [5]), (2, [4, 5]), (3, [3, 4, 5]), (9, [1, 2, 3, 4, 5]), (0, [5])]
)
def test_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (1, 2, 3, 4, 5):
        checkpoint.save(tmp_path, make_state(step), keep)
    assert steps_in(tmp_path) == [checkpoint.name_of(step) for step in left]


def test_what_was_just_saved_is_kept_also_by_a_run_that_went_back(tmp_path: Path) -> None:
    """A run that resumes from an early checkpoint finds later ones of its first life in the folder."""
    for step in (40, 50):
        checkpoint.save(tmp_path, make_state(step), keep=2)
    state = make_state(20)
    assert whole(checkpoint.save(tmp_path, state, keep=2), state)


def test_the_newest_is_the_one_of_the_highest_step_however_long_the_run_is(tmp_path: Path) -> None:
    for step in (9, 99_999_999, 100_000_000):
        checkpoint.save(tmp_path, make_state(step), keep=2)
    assert checkpoint.latest(tmp_path) == tmp_path / checkpoint.name_of(100_000_000)
    assert len(steps_in(tmp_path)) == 2


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "best").mkdir()
    for step in (1, 2):
        checkpoint.save(tmp_path, make_state(step), keep=1)
    assert steps_in(tmp_path) == ["best", "notes.txt", checkpoint.name_of(2)]


# Atomicity


INTERRUPTIONS: dict[str, tuple[object, str]] = {
    "before the tensors": (store, "save_file"),
    "between tensors and scalars": (store, "_digest"),
    "before the flush": (store, "_flush"),
    "before the rename": (Path, "rename"),
}


@pytest.mark.parametrize("moment", INTERRUPTIONS)
def test_a_crash_leaves_the_old_one_and_no_half_one(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_state(1)
    path = checkpoint.save(tmp_path, old, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(*INTERRUPTIONS[moment], raising(Killed()))
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, make_state(2), keep=1)
    assert checkpoint.latest(tmp_path) == path
    assert whole(path, old)
    newer = make_state(3)
    assert whole(checkpoint.save(tmp_path, newer, keep=1), newer)
    assert checkpoint.latest(tmp_path) == tmp_path / checkpoint.name_of(3)


@pytest.mark.parametrize("moment", INTERRUPTIONS)
def test_a_crash_while_the_same_step_is_saved_again_leaves_a_whole_one(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that resumes at its last step saves it once more."""
    state = make_state(5)
    checkpoint.save(tmp_path, state, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(*INTERRUPTIONS[moment], raising(Killed()))
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, state, keep=1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert whole(found, state)


@pytest.mark.parametrize("moment", INTERRUPTIONS)
def test_a_disk_that_refuses_is_an_error_that_leaves_no_draft(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_state(1)
    path = checkpoint.save(tmp_path, old, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(*INTERRUPTIONS[moment], raising(OSError(28, "No space left on device")))
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            checkpoint.save(tmp_path, make_state(2), keep=1)
    assert checkpoint.name_of(2) in caught.value.where
    assert steps_in(tmp_path) == [checkpoint.name_of(1)]
    assert whole(path, old)


def test_the_draft_of_a_crashed_process_does_not_stay_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)  # it was another process
        patch.setattr(Path, "rename", raising(Killed()))
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, make_state(1), keep=1)
    for step in (2, 3):
        checkpoint.save(tmp_path, make_state(step), keep=1)
    assert steps_in(tmp_path) == [checkpoint.name_of(3)]


def test_files_reach_the_disk_before_the_folder_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    flush, rename = store._flush, Path.rename
    monkeypatch.setattr(store, "_flush", lambda path: (log.append(f"flush {path.name}"), flush(path)))
    monkeypatch.setattr(Path, "rename", lambda self, to: (log.append("rename"), rename(self, to))[1])
    checkpoint.save(tmp_path / "checkpoints", make_state(), keep=1)
    before, after = log[: log.index("rename")], log[log.index("rename") + 1 :]
    assert {"flush state.safetensors", "flush state.json"} <= set(before)
    assert "flush checkpoints" in after


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


# Which one


def test_the_newest_whole_one_is_chosen(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for step in (9, 10):
        checkpoint.save(tmp_path, make_state(step), keep=5)
    shutil.copytree(tmp_path / checkpoint.name_of(10), tmp_path / ".step-00000011.77")  # a draft
    (tmp_path / checkpoint.name_of(12)).mkdir()  # somebody emptied it
    assert checkpoint.latest(tmp_path) == tmp_path / checkpoint.name_of(10)
