"""What the constructors of a session's parts are given, and the parts that may be exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.comm.codecs.strategy_codec import build_coded_collective
from paceline.comm.collectives.collective_protocol import AllToAllCollective, Collective
from paceline.comm.net import Net
from paceline.comm.race_detector import CommChecks
from paceline.comm.reduction.bucket_reducer import BucketReducer
from paceline.comm.reduction.scatter_reducer import ScatterReducer
from paceline.comm.routes.native import NativeCollective
from paceline.comm.routes.route_builders import RouteContext
from paceline.comm.routes.route_by_size import RouteForecast
from paceline.comm.workspace import Workspace
from paceline.data.work import LockstepWork
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup, duplicate_group
from paceline.models.initialize import InitializeByName
from paceline.observe.step_stats import PhaseTimer
from paceline.optim.lr_schedule import build_schedule
from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.model_runner import MetricNames
from paceline.parallel.pipeline.pipeline_runner import PipelineRunner
from paceline.recipe.recipe import Recipe, num_micro_batches
from paceline.state.slot import TensorSlot
from paceline.task import Task

if TYPE_CHECKING:
    from paceline.sync.every_step import EveryStep
    from paceline.sync.health import EventCallback
    from paceline.sync.straggler_recovery import AwaitedRank
    from paceline.sync.sync_rule import SurvivingRule
    from paceline.sync.update import GradientNorm, UpdatePart


class EventQueue:
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


def _identity(part: Any) -> Any:
    return part


@dataclass(frozen=True)
class Components:
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
    whole: Callable[..., ReplicatedRunner] = ReplicatedRunner
    stage: Callable[..., PipelineRunner] = PipelineRunner
    reducer: Callable[..., BucketReducer] = BucketReducer
    scatterer: Callable[..., ScatterReducer] = ScatterReducer
    collective: Callable[[Collective], Collective] = _identity
    norm: Callable[[GradientNorm], GradientNorm] = _identity
    gather: Callable[[Callable[[], None]], Callable[[], None]] = _identity
    update: Callable[[dict[str, UpdatePart]], dict[str, UpdatePart]] = _identity
    rule: Callable[..., EveryStep] | None = None
    schedule: Callable[..., Any] = build_schedule


@dataclass(frozen=True)
class SessionContext:
    """What the constructors are given: equal on every rank but for the place in the mesh.

    Args:
        note: is told of what happens beside the steps; see `EventQueue`.
        debugging: watches what sums gradients.
        route_forecasts: what was measured of routes, by ranks.
        choices: the rules that the run may go on with, once its first steps were measured; empty: none.
        awaited: who has to recover, for the run to go back to every-step; None: nobody.
        moving: memory through which gradients leave and, after an update, parameters come.
    """

    recipe: Recipe
    cluster: Cluster
    mesh: Mesh
    net: Net
    phases: PhaseTimer
    pieces: Components
    items_per_sample: int
    stop_requested: Callable[[], bool]
    device: torch.device
    warn: Callable[[str], None]
    note: EventCallback
    debugging: CommChecks
    closers: list[Callable[[], None]] = field(default_factory=list)
    loss_tolerant_rules: list[SurvivingRule] = field(default_factory=list)
    route_forecasts: dict[tuple[int, ...], RouteForecast] = field(default_factory=dict)
    choices: Sequence[str] = ()
    awaited: AwaitedRank | None = None
    moving: Workspace = field(default_factory=Workspace)

    def single_replica_mesh(self) -> SessionContext:
        """Of what the ranks of a replica do among themselves; there values travel as they are."""
        strategy = self.recipe.strategy.replace(codec="fp32")
        return replace(self, mesh=self.mesh.single_replica_mesh(), recipe=self.recipe.under(strategy))

    @property
    def bucket_bytes(self) -> int:
        return self.recipe.runtime.bucket_bytes

    @property
    def shards(self) -> int:
        """Micro-batches of a full batch, over all ranks."""
        return num_micro_batches(self.recipe, self.cluster.world_size)

    @property
    def precision(self) -> MixedPrecision:
        """Of forward and backward."""
        recipe = self.recipe
        return MixedPrecision(
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

    def collective(self, group: RankGroup) -> Collective:
        """Sums over a group, by the recipe's route and codec; collective."""
        path = self._path(group, is_coded=self.recipe.strategy.is_coded)
        return self.pieces.collective(path if self.recipe.is_ordered else self.debugging.watched(path))

    def exact_collective(self, group: RankGroup) -> Collective:
        """The same path, on which values travel as they are; collective."""
        return self._path(group, is_coded=False)

    def _path(self, group: RankGroup, *, is_coded: bool) -> Collective:
        if group.size == 1:
            return NativeCollective(self.net, group)
        site = RouteContext(
            cluster=self.cluster,
            world=self.mesh.world,
            net=self.net,
            device=self.device,
            warn=self.warn,
            closers=self.closers,
            coded=self._coded if is_coded else _identity,
            is_coded=is_coded,
            is_ordered=self.recipe.is_ordered,
            told=self.note,
            largest_bytes=self.bucket_bytes,
            link_profile=self.recipe.runtime.link_profile,
            route_forecasts=self.route_forecasts,
        )
        if is_coded:  # a thread codes and sends, beside what others do in this group
            group = replace(duplicate_group(group, "coded"), name=group.name)
        found: Collective = self.recipe.strategy.path.load()(group, site)
        return found

    def _coded(self, path: AllToAllCollective) -> Collective:
        found = build_coded_collective(path, self.recipe.strategy, self.recipe.seed)
        self.closers.append(found.close)
        return found


@dataclass(frozen=True)
class TaskMaterial:
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
    def make(self) -> Callable[[TensorSlot], Tensor] | None:
        """Makes a part of a parameter that has no memory; None: the task cannot."""
        initialize = self.task.initialize
        if not isinstance(initialize, InitializeByName):
            return None
        model, seed, device = self.model, self.seed, self.device
        return lambda slot: initialize.part(model, seed, slot.name, slot.index).to(device)
