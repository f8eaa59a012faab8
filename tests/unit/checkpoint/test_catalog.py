"""What stays: the newest, the best, and never less than one."""

from pathlib import Path

import pytest

from paceline.checkpoint.catalog import CatalogEntry, CheckpointCatalog, checkpoint_name, choose_retained
from paceline.checkpoint.storage import StorageFolder
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import fit
from paceline.session.checkpointing import EveryMinutes, interval_passed
from paceline.testing.parity import build_test_session
from tests.unit.checkpoint.states import make_state, save, saver, whole

pytestmark = pytest.mark.capability("N1")
LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.0}


@pytest.mark.parametrize(
    ("newest", "best", "left"),
    [
        (1, 0, [5]),
        (0, 0, [5]),
        (2, 0, [4, 5]),
        (9, 0, [1, 2, 3, 4, 5]),
        (1, 1, [4, 5]),
        (1, 2, [2, 4, 5]),
        (1, 3, [2, 3, 4, 5]),
        (2, 1, [4, 5]),
    ],
)
def test_the_newest_and_the_best_are_kept(newest: int, best: int, left: list[int]) -> None:
    """Of equal losses the later counts as better; step 5 has none."""
    found = [CatalogEntry(checkpoint_name(step), step, serial=step) for step in range(1, 6)]
    assert choose_retained(found, newest, best, LOSSES) == {checkpoint_name(step) for step in left}


def test_newest_means_saved_last_also_in_a_run_that_went_back() -> None:
    found = [CatalogEntry("step-40", 40, 1), CatalogEntry("step-50", 50, 2), CatalogEntry("step-20", 20, 3)]
    assert choose_retained(found, 1, 0, {}) == {"step-20"}


@pytest.mark.parametrize(("newest", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_what_is_in_the_folder_afterwards(tmp_path: Path, newest: int, left: list[int]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "best").mkdir()
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, make_state(step), newest=newest)
    assert whole(tmp_path) == left
    assert {"notes.txt", "best"} < {path.name for path in tmp_path.iterdir()}


def test_the_best_by_evaluation_loss_survives(tmp_path: Path) -> None:
    with saver(tmp_path, state := make_state(), newest=1, best=1) as one:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.2), (4, 0.3)):
            state.step = step
            one.score(step, loss)
            one.save()
            one.finish()
    assert whole(tmp_path) == [2, 4]
    assert CheckpointCatalog.read(StorageFolder(str(tmp_path))).losses == {1: 0.5, 2: 0.1, 3: 0.2, 4: 0.3}


def test_a_run_keeps_its_best_by_the_loss_that_it_measured(tmp_path: Path) -> None:
    recipe = Recipe(
        task="digits",
        options={"model": "mlp", "hidden": [8]},
        steps=12,
        batch={"size": 8, "shards": 2},
        optimizer={"name": "sgd", "lr": 20.0},  # too much: the loss goes up and down
        evaluate={"every_steps": 2, "max_samples": 64},
        checkpoint={"every_steps": 2, "keep": 1, "keep_best": 1},
    )
    fit(build_test_session(Cluster.single(), recipe), tmp_path)
    losses = CheckpointCatalog.read(StorageFolder(str(tmp_path / "checkpoints"))).losses
    best = min(losses, key=lambda step: losses[step])
    assert set(whole(tmp_path / "checkpoints")) == {best, 12} and best != 12


def test_the_interval_in_steps_counts_from_the_beginning() -> None:
    assert [step for step in range(1, 13) if interval_passed(4, step - 1, step)] == [4, 8, 12]
    assert interval_passed(4, 6, 14) and not interval_passed(4, 4, 7) and not interval_passed(0, 0, 9)


def test_the_interval_in_minutes_is_kept_with_few_words_between_ranks() -> None:
    """Rank 0's clock counts. Steps take 1 s, and later 2 s."""
    clock, words = [0.0], []
    total = lambda value: (words.append(value), value)[1]  # noqa: E731
    timer = EveryMinutes(2.0, True, total, lambda: clock[0])
    saved = []
    for step in range(600):
        clock[0] += 1.0 if step < 300 else 2.0
        if timer.due(1):
            saved.append(clock[0])
            timer.restart()
    gaps = [b - a for a, b in zip([0.0, *saved], saved, strict=False)]
    assert len(saved) == 7 and all(120 <= gap <= 124 for gap in gaps)
    assert len(words) < 100


def test_without_an_interval_in_minutes_ranks_say_nothing() -> None:
    words: list[float] = []
    timer = EveryMinutes(0.0, True, lambda value: (words.append(value), value)[1])
    assert not any(timer.due(1) for _ in range(50)) and not words
