"""What the constructors of a session's parts are given, and the parts that may be exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.cluster import Cluster
from paceline.comm import Collective, NativeCollective, Net, Reducer
from paceline.comm.collectives import Exchanging
from paceline.comm.reduction import Scatterer
from paceline.comm.routes.forecast import Forecast
from paceline.comm.workspace import Workspace
from paceline.data import LockstepWork
from paceline.layout import Precision, Replicate
from paceline.layout.pipeline import Pipeline
from paceline.layout.sums import MetricNames
from paceline.mesh import Group, Mesh, twin_group
from paceline.models import InitializeByName
from paceline.observe import Phases
from paceline.optim import build_schedule
from paceline.recipe import Recipe, num_micro_batches
from paceline.slot import Slot
from paceline.sync import EveryStep, Part
from paceline.sync.health import Note
from paceline.sync.recovery import Awaited
from paceline.sync.rule import Outliving
from paceline.sync.update import Norm
from paceline.task import Task
from paceline.training.codecs import code
from paceline.training.debugging import Debugging
from paceline.training.routes import Site


class Notes:
    """What has happened beside the steps, until somebody takes it."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Mapping[str, Any]]] = []
        self._fresh: dict[str, Mapping[str, Any]] = {}

    def add(self, name: str, record: Mapping[str, Any]) -> None:
        """An event, and what there is to know about it."""
        self._events.append((name, record))
        self._fresh[name] = record

    def fresh(self) -> Mapping[str, Mapping[str, Any]]:
        """All since the last call, by name, also those that were taken; of several of a name the last."""
        found, self._fresh = self._fresh, {}
        return found

    def take(self) -> list[tuple[str, Mapping[str, Any]]]:
        """All since the last call."""
        events, self._events = self._events, []
        return events


def _as_it_is(part: Any) -> Any:
    return part


@dataclass(frozen=True)
class Pieces:
    """Constructors of the parts that may be exchanged, under every strategy that has them.

    Args:
        work: deals micro-batches.
        whole, stage: forward and backward of a whole model, or of one stage.
        reducer: sums gradients over ranks, once a step.
        scatterer: sums them with every micro-batch.
        collective: sees every collective that sums gradients.
        norm: sees the norm of the whole gradient.
        gather: sees what brings parameters up to date after an update.
        update: sees the parts of the update step.
        rule: the class of every-step; other rules have no constructor here.
        schedule: of the learning rate.
    """

    work: Callable[..., LockstepWork] = LockstepWork
    whole: Callable[..., Replicate] = Replicate
    stage: Callable[..., Pipeline] = Pipeline
    reducer: Callable[..., Reducer] = Reducer
    scatterer: Callable[..., Scatterer] = Scatterer
    collective: Callable[[Collective], Collective] = _as_it_is
    norm: Callable[[Norm], Norm] = _as_it_is
    gather: Callable[[Callable[[], None]], Callable[[], None]] = _as_it_is
    update: Callable[[dict[str, Part]], dict[str, Part]] = _as_it_is
    rule: Callable[..., EveryStep] = EveryStep
    schedule: Callable[..., Any] = build_schedule


@dataclass(frozen=True)
class Setting:
    """What the constructors are given: equal on every rank but for the place in the mesh.

    Args:
        note: is told of what happens beside the steps; see `Notes`.
        debugging: watches what sums gradients.
        forecasts: what was measured of routes, by ranks.
        choices: the rules that the run may go on with, once its first steps were measured; empty: none.
        awaited: who has to recover, for the run to go back to every-step; None: nobody.
        moving: memory through which gradients leave and, after an update, parameters come.
    """

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
    note: Note
    debugging: Debugging
    closers: list[Callable[[], None]] = field(default_factory=list)
    presence: list[Outliving] = field(default_factory=list)
    forecasts: dict[tuple[int, ...], Forecast] = field(default_factory=dict)
    choices: Sequence[str] = ()
    awaited: Awaited | None = None
    moving: Workspace = field(default_factory=Workspace)

    def of_one_replica(self) -> Setting:
        """Of what the ranks of a replica do among themselves; there values travel as they are."""
        strategy = self.recipe.strategy.replace(codec="fp32")
        return replace(self, mesh=self.mesh.of_one_replica(), recipe=self.recipe.under(strategy))

    @property
    def bucket_bytes(self) -> int:
        return self.recipe.runtime.bucket_bytes

    @property
    def shards(self) -> int:
        """Micro-batches of a full batch, over all ranks."""
        return num_micro_batches(self.recipe, self.cluster.world_size)

    @property
    def precision(self) -> Precision:
        """Of forward and backward."""
        recipe = self.recipe
        return Precision(
            recipe.precision.compute,
            self.device.type,
            caches=not recipe.is_ordered,
            seeds_everything=recipe.reproducible,
        )

    @property
    def reports(self) -> bool:
        """Whether this rank tells the sums of its micro-batches; its tensor peers compute the same."""
        return self.mesh.place("tensor") == 0

    @property
    def counts(self) -> bool:
        """Whether its micro-batches count; its context peers run other positions of the same."""
        return self.mesh.place("context") == 0

    def collective(self, group: Group) -> Collective:
        """Sums over a group, by the recipe's route and codec; collective."""
        path = self._path(group, is_coded=self.recipe.strategy.is_coded)
        return self.pieces.collective(path if self.recipe.is_ordered else self.debugging.watched(path))

    def exact_collective(self, group: Group) -> Collective:
        """The same path, on which values travel as they are; collective."""
        return self._path(group, is_coded=False)

    def _path(self, group: Group, *, is_coded: bool) -> Collective:
        if group.size == 1:
            return NativeCollective(self.net, group)
        site = Site(
            cluster=self.cluster,
            world=self.mesh.world,
            net=self.net,
            device=self.device,
            warn=self.warn,
            closers=self.closers,
            coded=self._coded if is_coded else _as_it_is,
            is_coded=is_coded,
            is_ordered=self.recipe.is_ordered,
            told=self.note,
            largest_bytes=self.bucket_bytes,
            link_profile=self.recipe.runtime.link_profile,
            forecasts=self.forecasts,
        )
        if is_coded:  # a thread codes and sends, beside what others do in this group
            group = replace(twin_group(group, "coded"), name=group.name)
        found: Collective = self.recipe.strategy.path.load()(group, site)
        return found

    def _coded(self, path: Exchanging) -> Collective:
        found = code(path, self.recipe.strategy, self.recipe.seed)
        self.closers.append(found.close)
        return found


@dataclass(frozen=True)
class Material:
    """What a layout places.

    Args:
        model: whole, on its device, equal on every rank; large parameters may have a shape only.
        metric_names: of the loss; learned when it runs.
        seed: of what is made without the whole.
    """

    task: Task
    model: nn.Module
    metric_names: MetricNames
    device: torch.device
    seed: int = 0

    @property
    def make(self) -> Callable[[Slot], Tensor] | None:
        """Makes a part of a parameter that has no memory; None: the task cannot."""
        initialize = self.task.initialize
        if not isinstance(initialize, InitializeByName):
            return None
        model, seed, device = self.model, self.seed, self.device
        return lambda slot: initialize.part(model, seed, slot.name, slot.index).to(device)
