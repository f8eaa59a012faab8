"""From a strategy to its parts: where state lives, what goes over the wire, when replicas agree.

Each choice is a table from its word to a constructor; nothing else in the project looks at the words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.cluster import Cluster
from paceline.comm import (
    Codec,
    CodedWire,
    Int8,
    Net,
    PlainWire,
    Reducer,
    Wire,
    build_reducer,
)
from paceline.data import LockstepWork
from paceline.layout import Placed, Precision, Replicate
from paceline.layout.zero import adopt
from paceline.mesh import Group, Mesh
from paceline.observe import Phases
from paceline.optim import build_schedule
from paceline.recipe import Recipe
from paceline.slot import Slot
from paceline.state import TrainState
from paceline.sync import EveryStep, Gathered, Tail, UpdateTail
from paceline.task import Task
from paceline.training.routes import ROUTES, Site

CODECS: Mapping[str, Callable[[], Codec | None]] = {"fp32": lambda: None, "int8": Int8}


@dataclass(frozen=True)
class Pieces:
    """Constructors of the parts that may be exchanged."""

    work: Callable[..., LockstepWork] = LockstepWork
    placed: Callable[..., Replicate] = Replicate
    reducer: Callable[..., Reducer] = build_reducer
    tail: Callable[..., Tail] = UpdateTail
    rule: Callable[..., EveryStep] = EveryStep
    schedule: Callable[..., Any] = build_schedule


@dataclass(frozen=True)
class Setting:
    """What the constructors are given: equal on every rank but for the place in the mesh."""

    recipe: Recipe
    cluster: Cluster
    mesh: Mesh
    net: Net
    phases: Phases
    pieces: Pieces
    items_per_sample: int
    stop_requested: Callable[[], bool]
    device: torch.device
    warn: Callable[[str], None]
    closers: list[Callable[[], None]] = field(default_factory=list)

    @property
    def bucket_bytes(self) -> int:
        return self.recipe.runtime.bucket_bytes

    def precision(self, device: torch.device) -> Precision:
        """Of forward and backward."""
        recipe = self.recipe
        return Precision(recipe.precision.compute, device.type, caches=not recipe.is_ordered)

    def wire(self, group: Group) -> Wire:
        """Sums over a group, by the recipe's codec and route where there is a wire at all; collective."""
        if group.size == 1:
            return PlainWire(self.net, group)
        codec = CODECS[self.recipe.strategy.codec]()
        if codec is not None:
            return CodedWire(self.net, group, codec)
        site = Site(self.cluster, self.mesh.world, self.net, self.device, self.warn, self.closers)
        return ROUTES[self.recipe.strategy.route](group, site)


def _nothing() -> None:
    """The parameters are whole already."""


@dataclass(frozen=True)
class Arrangement:
    """A layout's share of a session.

    Args:
        placed: forward and backward.
        reducer: gives this rank the sums of what it updates.
        trained: what its optimizer updates, if that is not the model's own parameters.
        share: after an update, brings every rank's parameters up to date.
    """

    placed: Placed
    reducer: Reducer
    trained: Mapping[Slot, nn.Parameter] = field(default_factory=dict)
    share: Callable[[], None] = _nothing

    def adopt(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Hand this rank's parts to an optimizer that was built over the whole model."""
        if self.trained:
            parts = {slot.name: p for slot, p in self.trained.items()}
            whole = self.placed.slots.items()
            adopt(optimizer, {p: parts[slot.name] for slot, p in whole if slot.name in parts})
        return optimizer

    def tail(self, setting: Setting, state: TrainState, num_steps: int) -> Tail:
        """The tail over what this rank updates."""
        recipe = setting.recipe
        inner = setting.pieces.tail(
            state,
            self.updated(),
            setting.pieces.schedule(
                recipe.schedule, num_steps * recipe.strategy.updates_per_step, recipe.batch.size
            ),
            clip_norm=recipe.optimizer.clip_norm,
            reduction=recipe.batch.reduction,
        )
        return Gathered(inner, self.share) if self.trained else inner

    def updated(self) -> Sequence[nn.Parameter | None]:
        """By parameter index, what this rank updates of it."""
        if not self.trained:
            return self.placed.parameters
        parts = {slot.name: p for slot, p in self.trained.items()}
        return [parts.get(slot.name) for slot in self.placed.slots]


@dataclass(frozen=True)
class Material:
    """What a layout places.

    Args:
        model: whole, on its device, equal on every rank.
        metric_names: sorted names of the metrics that the task's loss returns.
    """

    task: Task
    model: nn.Module
    metric_names: tuple[str, ...]
    device: torch.device
