"""Small states, and a saver of one rank for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.catalog import CheckpointCatalog
from paceline.checkpoint.checkpoint_reader import LoadedCheckpoint, load_checkpoint
from paceline.checkpoint.manifest import CheckpointOrigin
from paceline.checkpoint.publish import FullDiskPatience, RetentionCounts
from paceline.checkpoint.saver import CheckpointSaver, SaveSettings
from paceline.checkpoint.storage import StorageFolder
from paceline.checkpoint.writers import ThreadWriter
from paceline.parallel.sharded_model import unsharded_model
from paceline.state.train_state import LossScale, TrainState

ORIGIN = {"recipe": 'task = "x"\n', "strategy": "replicas=1", "world_size": 1, "versions": {"torch": "2"}}


def make_state(step: int = 3, seed: int = 0) -> TrainState:
    """A model with BatchNorm, Adam moments, a counter and an fp16 scale."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    state = TrainState(
        unsharded_model(model), torch.optim.Adam(model.parameters(), lr=0.1), LossScale(512.0, 8)
    )
    change(state)
    state.step, state.num_updates = step, step - 1
    return state


def change(state: TrainState, settle: Callable[[], None] = lambda: None) -> None:
    """One update: parameters, moments, counters and statistics change; `settle` comes before it."""
    state.model(torch.randn(5, 4)).square().sum().backward()
    settle()
    state.optimizer.step()


@contextmanager
def saver(url: object, state: TrainState, **changes: Any) -> Iterator[CheckpointSaver]:
    """A saver of one rank; `newest`, `best`, `exchange` and the fields of `SaveSettings` may be given."""
    shelf = CheckpointCatalog.read(StorageFolder(str(url))).claim()
    exchange = changes.pop("exchange", lambda text: [text])
    keep = RetentionCounts(changes.pop("newest", 2), changes.pop("best", 0))
    options = {
        "background": True,
        "steady": True,
        "shared": True,
        "deadline_seconds": 20.0,
        "patience": FullDiskPatience(0.0, print),
        "writer": ThreadWriter(changes.pop("writers", 2)),
    }
    saving = SaveSettings(rank=0, keep=keep, **(options | changes))
    found = CheckpointSaver(
        state, shelf, CheckpointOrigin(run=shelf.run, **ORIGIN), saving, lambda make: exchange(make())
    )
    try:
        yield found
    finally:
        found.close()


def save(url: object, state: TrainState, **changes: Any) -> str:
    """Save once, and wait; returns the name."""
    with saver(url, state, **changes) as one:
        name = one.save()
        one.finish()
        return name


def load(url: object, name: str) -> LoadedCheckpoint:
    """Read one back."""
    return load_checkpoint(StorageFolder(str(url)), name)


def holds(url: object, name: str, state: TrainState) -> bool:
    """The checkpoint can be loaded and holds this state."""
    found = load(url, name)
    own = state.tensors()
    same = found.tensors.keys() == own.keys() and all(torch.equal(found.tensors[n], own[n]) for n in own)
    return same and dict(found.scalars) == state.scalars()


def whole(url: object) -> list[int]:
    """Steps of the checkpoints that can be loaded, oldest first."""
    return [kept.step for kept in CheckpointCatalog.read(StorageFolder(str(url))).whole]


def raising(error: BaseException) -> Callable[..., None]:
    """A function that fails."""

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


def flip_bit(path: Path, place: int = -1, bit: int = 0) -> None:
    """Damage a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)
