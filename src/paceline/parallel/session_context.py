"""Arguments of the constructors of a session's parts: layouts, reductions, feeds, sync rules.

Every constructor that a strategy word names is called with a `SessionContext` (or, for layouts, also with
the `TaskMaterial`), so the builder of a session names no algorithm. A context is frozen; a switch of rules
or a change of members makes a copy with other fields. This module builds collectives, since a route needs
most of the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from paceline.comm.routes.route_by_size import RouteForecast
from paceline.comm.routes.route_context import RouteContext
from paceline.comm.workspace import Workspace
from paceline.data.work import LockstepWork
from paceline.job.cluster import Cluster
from paceline.job.mesh import Mesh, RankGroup, duplicate_group
from paceline.models.initialize import InitializeByName
from paceline.observe.sinks import EventCallback
from paceline.observe.step_stats import PhaseTimer
from paceline.optim.lr_schedule import build_schedule
from paceline.optim.slot_norms import SlotGroup
from paceline.parallel.data_parallel import ReplicatedRunner
from paceline.parallel.mixed_precision import MixedPrecision
from paceline.parallel.model_runner import MetricNames
from paceline.parallel.pipeline.pipeline_runner import PipelineRunner
from paceline.privacy.private_sum import PrivateSum
from paceline.recipe.recipe import Recipe, num_micro_batches
from paceline.state.slot import TensorSlot
from paceline.task import Task

if TYPE_CHECKING:
    from paceline.federated.rounds import FederatedRounds
    from paceline.sync.every_step import EveryStep
    from paceline.sync.straggler_recovery import AwaitedRank
    from paceline.sync.sync_rule import SurvivingRule
    from paceline.sync.update import GradientNorm, UpdatePart


def _identity(part: Any) -> Any:
    return part


@dataclass(frozen=True)
class Components:
    """Constructors of the parts that may be exchanged, under every strategy that has them.

    Args:
        work: deals micro-batches.
        whole, stage: forward and backward of a whole model, or of one stage.
        reducer: reduces gradients over ranks, once a step.
        scatterer: reduces them after every micro-batch.
        collective: wraps every collective that sums gradients.
        norm: wraps the norm of the whole gradient.
        slot_group: wraps the group whose ranks hold whole tensors, for optimizers that need their norms.
        gather: wraps the function that gathers parameters after an update.
        update: changes the parts of the update step.
        rule: class in place of `EveryStep`; the other rules have no constructor here.
        schedule: builds the learning-rate schedule.
        federated: class in place of `FederatedRounds`.
    """

    work: Callable[..., LockstepWork] = LockstepWork
    whole: Callable[..., ReplicatedRunner] = ReplicatedRunner
    stage: Callable[..., PipelineRunner] = PipelineRunner
    reducer: Callable[..., BucketReducer] = BucketReducer
    scatterer: Callable[..., ScatterReducer] = ScatterReducer
    collective: Callable[[Collective], Collective] = _identity
    norm: Callable[[GradientNorm], GradientNorm] = _identity
    slot_group: Callable[[SlotGroup], SlotGroup] = _identity
    gather: Callable[[Callable[[], None]], Callable[[], None]] = _identity
    update: Callable[[dict[str, UpdatePart]], dict[str, UpdatePart]] = _identity
    rule: Callable[..., EveryStep] | None = None
    schedule: Callable[..., Any] = build_schedule
    federated: Callable[..., FederatedRounds] | None = None


@dataclass(frozen=True)
class RuleInputs:
    """Fields of a session context that only sync rules read.

    Args:
        items_per_sample: about how many items the loss counts in a sample, for example its tokens.
        stop_requested: returns whether this rank was asked to stop.
        loss_tolerant_rules: filled by the constructor of a rule that continues without some ranks.
        choices: rules among which the run chooses after its first steps were measured; empty: no choice.
        awaited_rank: the slow rank whose recovery ends the present rule, if there is one.
        keeper: what the task keeps of each client of federated rounds (`Task.keeper`).
        private: the noise of the sums of the run (`PrivateSum`); None: they have none.
    """

    items_per_sample: int
    stop_requested: Callable[[], bool]
    loss_tolerant_rules: list[SurvivingRule] = field(default_factory=list)
    choices: Sequence[str] = ()
    awaited_rank: AwaitedRank | None = None
    keeper: Any = None
    private: PrivateSum | None = None


@dataclass(frozen=True)
class SessionContext:
    """Arguments of the constructors of a session's parts; ranks differ in their mesh coordinates only.

    Args:
        recipe: with the strategy of the present rule, all degrees filled in.
        components: constructors that replace the usual ones, for tests and faults.
        rule_inputs: what only sync rules read.
        warn: receives sentences for the user.
        note: receives an event of the run: its name and a record.
        comm_checks: debug checks around collectives that sum gradients.
        close_callbacks: called when the rule ends; constructors append to it.
        route_forecasts: measured times of routes, by the ranks of a group.
        workspace: memory through which gradients are sent and, after an update, parameters are received.
        trains: the session makes updates, and not only evaluations or predictions.
    """

    recipe: Recipe
    cluster: Cluster
    mesh: Mesh
    net: Net
    device: torch.device
    phases: PhaseTimer
    components: Components
    rule_inputs: RuleInputs
    warn: Callable[[str], None]
    note: EventCallback
    comm_checks: CommChecks
    close_callbacks: list[Callable[[], None]] = field(default_factory=list)
    route_forecasts: dict[tuple[int, ...], RouteForecast] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)
    trains: bool = True

    def single_replica_mesh(self) -> SessionContext:
        """Return the context of the ranks of one replica, between which values are sent without a codec."""
        strategy = self.recipe.strategy.replace(codec="fp32")
        return replace(self, mesh=self.mesh.single_replica_mesh(), recipe=self.recipe.with_strategy(strategy))

    @property
    def bucket_bytes(self) -> int:
        return self.recipe.runtime.bucket_bytes

    @property
    def shards(self) -> int:
        """Number of micro-batches of a full batch, over all ranks."""
        return num_micro_batches(self.recipe, self.cluster.world_size)

    @property
    def precision(self) -> MixedPrecision:
        """Number format of forward and backward."""
        recipe = self.recipe
        return MixedPrecision(
            recipe.precision.compute,
            self.device.type,
            caches=not recipe.is_ordered,
        )

    @property
    def reports(self) -> bool:
        """Return whether this rank reports the sums of its micro-batches; its tensor peers have the same."""
        return self.mesh.coordinate("tensor") == 0

    @property
    def counts(self) -> bool:
        """Return whether this rank counts its micro-batches; context peers run other positions of them."""
        return self.mesh.coordinate("context") == 0

    def collective(self, group: RankGroup) -> Collective:
        """Build the collective that sums gradients over a group, with route and codec; collective."""
        path = self._path(group, is_coded=self.recipe.strategy.is_coded)
        return self.components.collective(path if self.recipe.is_ordered else self.comm_checks.watched(path))

    def exact_collective(self, group: RankGroup) -> Collective:
        """Build the collective of the recipe's route without a codec; collective."""
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
            close_callbacks=self.close_callbacks,
            apply_codec=self._coded if is_coded else _identity,
            is_coded=is_coded,
            is_ordered=self.recipe.is_ordered,
            record=self.note,
            largest_bytes=self.bucket_bytes,
            link_profile=self.recipe.runtime.link_profile,
            route_forecasts=self.route_forecasts,
        )
        if is_coded:
            # A thread encodes and sends, concurrently with other collectives of this group.
            group = replace(duplicate_group(group, "coded"), name=group.name)
        collective: Collective = self.recipe.strategy.route_spec.load()(group, site)
        return collective

    def _coded(self, path: AllToAllCollective) -> Collective:
        collective = build_coded_collective(path, self.recipe.strategy, self.recipe.seed)
        self.close_callbacks.append(collective.close)
        return collective


@dataclass(frozen=True)
class TaskMaterial:
    """Task and model that a layout places on the ranks.

    Args:
        model: whole, on its device, equal on every rank; large parameters may be on the meta device.
        metric_names: of the loss, learned when it runs.
        seed: for parameters that are initialized by name, part by part.
    """

    task: Task
    model: nn.Module
    metric_names: MetricNames
    device: torch.device
    seed: int = 0

    @property
    def make(self) -> Callable[[TensorSlot], Tensor] | None:
        """Function that makes a part of a meta parameter; None if the task cannot initialize by name."""
        initialize = self.task.initialize
        if not isinstance(initialize, InitializeByName):
            return None
        model, seed, device = self.model, self.seed, self.device
        return lambda slot: initialize.part(model, seed, slot.name, slot.index).to(device)
