"""Small states, and a saver of one rank for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline import checkpoint
from paceline.checkpoint import ByThreads, Files, Keep, Loaded, Origin, Patience, Saver, Saving, Shelf
from paceline.layout.holding import hold_whole
from paceline.state import LossScale, TrainState

ORIGIN = {"recipe": 'task = "x"\n', "strategy": "replicas=1", "world_size": 1, "versions": {"torch": "2"}}


def make_state(step: int = 3, seed: int = 0) -> TrainState:
    """A model with BatchNorm, Adam moments, a counter and an fp16 scale."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    state = TrainState(hold_whole(model), torch.optim.Adam(model.parameters(), lr=0.1), LossScale(512.0, 8))
    change(state)
    state.step, state.updates = step, step - 1
    return state


def change(state: TrainState, settle: Callable[[], None] = lambda: None) -> None:
    """One update: parameters, moments, counters and statistics change; `settle` comes before it."""
    state.model(torch.randn(5, 4)).square().sum().backward()
    settle()
    state.optimizer.step()


@contextmanager
def saver(url: object, state: TrainState, **changes: Any) -> Iterator[Saver]:
    """A saver of a single rank; `newest`, `best`, `exchange` and the fields of `Saving` may be given."""
    shelf = Shelf.look(Files(str(url))).claim()
    exchange = changes.pop("exchange", lambda text: [text])
    keep = Keep(changes.pop("newest", 2), changes.pop("best", 0))
    options = {
        "background": True,
        "steady": True,
        "shared": True,
        "deadline_seconds": 20.0,
        "patience": Patience(0.0, print),
        "writer": ByThreads(changes.pop("writers", 2)),
    }
    saving = Saving(rank=0, keep=keep, **(options | changes))
    found = Saver(state, shelf, Origin(run=shelf.run, **ORIGIN), saving, lambda make: exchange(make()))
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


def load(url: object, name: str) -> Loaded:
    """Read one back."""
    return checkpoint.load(Files(str(url)), name)


def holds(url: object, name: str, state: TrainState) -> bool:
    """The checkpoint can be loaded and holds this state."""
    found = load(url, name)
    own = state.tensors()
    same = found.tensors.keys() == own.keys() and all(torch.equal(found.tensors[n], own[n]) for n in own)
    return same and dict(found.scalars) == state.scalars()


def whole(url: object) -> list[int]:
    """Steps of the checkpoints that can be loaded, oldest first."""
    return [kept.step for kept in Shelf.look(Files(str(url))).whole]


def raising(error: BaseException) -> Callable[..., None]:
    """A function that fails."""

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail
