"""Simulated ranks: what every rank of a job holds and runs, without its processes and memory.

Partitions are made as in a run: each layout word of the strategy places tensors on a mesh without process
groups. What a partition changes in modules is done on fake tensors, with collectives that send nothing and
return tensors of the right shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.comm.collectives.collective_protocol import Collective, ReceiveBuffer
from paceline.comm.handle import Handle
from paceline.comm.net import Net
from paceline.comm.race_detector import CommChecks
from paceline.job.cluster import Cluster
from paceline.job.membership import GroupLease
from paceline.job.mesh import AXES, Mesh, RankGroup
from paceline.models.training_mode import enter_training
from paceline.observe.step_stats import PhaseTimer
from paceline.parallel.model_runner import MetricNames
from paceline.parallel.pipeline.stage_partition import StagePartition
from paceline.parallel.placement import ModelPlacement, TensorPlacement
from paceline.parallel.recompute import recompute_blocks
from paceline.parallel.session_context import Components, RuleInputs, SessionContext, TaskMaterial
from paceline.parallel.sharded_model import ModelPartition, copy_to_meta, shard_model
from paceline.recipe.recipe import Recipe
from paceline.state.slot import TensorSlot, trained_parameters
from paceline.task import Task


@dataclass(frozen=True)
class FinishedCall:
    """A completed call of a process group.

    Args:
        tensors: tensors that the call keeps alive, as a call of Gloo does.
    """

    tensors: tuple[Tensor, ...]

    def wait(self, timeout: timedelta) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


@dataclass
class SimulatedGroup:
    """A process group without processes, and its own lease.

    Args:
        largest: bytes sent and received in the largest call so far.
    """

    largest: int = 0

    @property
    def handle(self) -> SimulatedGroup:
        return self

    def alltoall_base(
        self, out: Tensor, source: Tensor, coming: Sequence[int], sizes: Sequence[int]
    ) -> FinishedCall:
        """Leave `out` as it is, and record the size of the call."""
        self.largest = max(self.largest, out.nbytes + source.nbytes)
        return FinishedCall((out, source))


@dataclass(frozen=True)
class SimulatedGroups:
    """A `GroupLease` of simulated groups.

    Args:
        made: groups so far.
    """

    made: list[SimulatedGroup] = field(default_factory=list)

    def make(self, name: str, ranks: tuple[int, ...]) -> SimulatedGroup:
        """Make a group."""
        self.made.append(SimulatedGroup())
        return self.made[-1]

    @property
    def largest(self) -> int:
        """Return the bytes of the largest call of any group."""
        return max((group.largest for group in self.made), default=0)


CPU = torch.device("cpu")
_AXES_OF_WHOLE_MODULES = ("replica", "pipeline", "shard")
"""Axes whose ranks run unchanged modules: all or some of them, or with gathered parameters."""


@dataclass(frozen=True)
class SimulatedRank:
    """A rank of the first replica, without a process.

    Args:
        global_rank: its number in the job.
        coordinates: coordinate on each mesh axis.
        held: placement of the trained tensors that the rank holds, by name.
        stage: stage of the pipeline; None: there is none.
    """

    global_rank: int
    coordinates: dict[str, int]
    held: dict[str, TensorPlacement]
    stage: StagePartition | None

    def __str__(self) -> str:
        return f"rank {self.global_rank}"


class SimulatedCollective:
    """A collective without other ranks, whose results have the right shapes."""

    feedback = None

    def __init__(self, group: RankGroup, net: Net) -> None:
        self.group, self.net, self.exchanged = group, net, 0

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        self.exchanged += x.numel() * x.element_size()
        return Handle.ready(x)

    def reduce_scatter(self, x: Tensor, key: str, arriving: ReceiveBuffer = None) -> Handle:
        self.exchanged += x.numel() * x.element_size()
        return Handle.ready(x[self.group.rank].clone())

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        self.exchanged += self.group.size * x.numel() * x.element_size()
        rows = x.new_empty(self.group.size, *x.shape) if out is None else out
        return Handle.ready(rows.copy_(x.expand(rows.shape)))

    def all_to_all(self, x: Tensor, key: str, out: Tensor, tag: int = 0) -> Handle:
        return Handle.ready(out.copy_(x))

    def in_any_order(self, x: Tensor) -> bool:
        return True

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        return Handle.ready(x)

    def abort(self) -> None:
        """Do nothing: no call is in flight."""


@dataclass(frozen=True)
class _SimulatedContext(SessionContext):
    """Session context without connections to other ranks.

    Args:
        made: collectives so far.
        straight: process groups that are used without a collective.
    """

    made: list[SimulatedCollective] = field(default_factory=list)
    straight: SimulatedGroups = field(default_factory=SimulatedGroups)

    def exact_collective(self, group: RankGroup) -> Collective:
        self.made.append(SimulatedCollective(group, self.net))
        return self.made[-1]

    collective = exact_collective


def simulated_context(recipe: Recipe, processes: int, rank: int) -> _SimulatedContext:
    """Return the session context from which the partitions of one rank are made."""
    net, straight = Net(recipe.runtime.deadline_seconds, times_calls=False), SimulatedGroups()
    mesh = Mesh.without_groups(recipe.strategy.degrees, rank)
    # Attention sends over its process group directly, not through a collective.
    context_axis = replace(mesh.axes["context"], lease=cast(GroupLease, straight))
    return _SimulatedContext(
        recipe=recipe,
        cluster=replace(Cluster.single(), world_size=processes, global_rank=rank),
        mesh=replace(mesh, axes={**mesh.axes, "context": context_axis}),
        net=net,
        phases=PhaseTimer(),
        components=Components(),
        rule_inputs=RuleInputs(items_per_sample=1, stop_requested=lambda: False),
        device=CPU,
        warn=lambda text: None,
        note=lambda name, record: None,
        comm_checks=CommChecks(recipe.debug, net),
        straight=straight,
    )


def simulate_ranks(recipe: Recipe, task: Task, model: nn.Module, processes: int) -> Iterator[SimulatedRank]:
    """Yield every rank of the first replica, in ascending order.

    Args:
        recipe: its strategy has its replicas filled in.
        model: the task's, without values.
    Raises:
        StrategyError, TaskError: the model cannot be partitioned in this way.
    """
    degrees = recipe.strategy.degrees
    layout_by_stage: dict[int, tuple[ModelPlacement, StagePartition | None]] = {}
    # Ranks of one shard group differ in their place only.
    held_by_coordinates: dict[tuple[int, ...], dict[str, TensorPlacement]] = {}
    sizes = [1, *(degrees[axis] for axis in AXES[1:])]
    for rank, inside in enumerate(product(*map(range, sizes))):
        coordinates = dict(zip(AXES, inside, strict=True))
        stage, shard = coordinates["pipeline"], coordinates["shard"]
        if stage not in layout_by_stage:
            partitions = _partitions(simulated_context(recipe, processes, rank), task, model)
            placement = _placement_after(model, partitions)
            layout_by_stage[stage] = (
                placement,
                next((partition.stage for partition in partitions if partition.stage is not None), None),
            )
        placement, stage_partition = layout_by_stage[stage]
        key = tuple(n for axis, n in coordinates.items() if axis != "shard")
        if key not in held_by_coordinates:
            held_by_coordinates[key] = placement.at(coordinates)
        placements = held_by_coordinates[key]
        if degrees["shard"] > 1:
            placements = {
                name: replace(tensor_placement, place=shard) for name, tensor_placement in placements.items()
            }
        yield SimulatedRank(rank, coordinates, placements, stage_partition)


def _partitions(context: SessionContext, task: Task, model: nn.Module) -> list[ModelPartition]:
    material = TaskMaterial(task, model, MetricNames(), CPU, context.recipe.seed)
    return [spec.load()(context, material) for spec in context.recipe.strategy.cuts]


def _placement_after(model: nn.Module, partitions: Sequence[ModelPartition]) -> ModelPlacement:
    placement = ModelPlacement(tuple(trained_parameters(model)))
    for partition in partitions:
        placement = placement.cut(partition.transform)
    return placement


@dataclass(frozen=True)
class FakeModel:
    """The whole chain of layers as the tensor and context ranks at a place run it, made of fake tensors.

    Args:
        seen: see `ShardedModel.seen`.
        exchanged: bytes that tensor ranks would have sent each other so far.
        straight: process groups of context ranks, with the bytes of their largest calls.
    """

    model: nn.Module
    seen: Callable[[Any], AbstractContextManager[Any]]
    exchanged: Callable[[], int]
    straight: SimulatedGroups


def make_fake_model(
    recipe: Recipe, task: Task, rank: SimulatedRank, processes: int, fake: FakeTensorMode
) -> FakeModel:
    """Return the model of a rank, with its partitions applied, made of fake tensors of the mode `fake`."""
    model = enter_training(copy_to_meta(task.model))
    if recipe.memory.recomputes:
        recompute_blocks(model, task.blocks, recipe.memory.recompute)
    context = simulated_context(recipe, processes, rank.global_rank)
    partitions = [
        partition
        for partition in _partitions(context, task, model)
        if partition.transform.axis not in _AXES_OF_WHOLE_MODULES
    ]
    dtypes = {slot.name: p.dtype for slot, p in trained_parameters(model).items()}
    dtypes |= {name: p.dtype for name, p in model.named_parameters()}

    def make(slot: TensorSlot) -> Tensor:
        return torch.empty(slot.sizes, dtype=dtypes[slot.name])

    with fake:
        sharded_model = shard_model(
            model, _placement_after(model, partitions), rank.coordinates, links=[model], make=make
        )
        for module in model.modules():
            for name, value in module._buffers.items():
                if value is not None:
                    # Buffers are on `meta`, and operations with fake tensors need one device.
                    module._buffers[name] = torch.empty_like(value, device="cpu")
        for partition in partitions:
            sharded_model = partition.prepare(sharded_model)
    collectives = context.made
    return FakeModel(
        sharded_model.model,
        sharded_model.seen,
        lambda: sum(collective.exchanged for collective in collectives),
        context.straight,
    )
