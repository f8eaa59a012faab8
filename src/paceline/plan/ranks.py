"""What every rank of a job would hold, and the model that it would run, without a process or its memory.

The cuts are those of a run: each word of a layout is asked what it leaves to a rank, with a mesh that has no
process groups. Only what a cut does to modules is done, on fake tensors, with collectives that send nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.cluster import Cluster
from paceline.comm import Collective, Handle, Net
from paceline.comm.collectives.collective import Arriving
from paceline.layout.holding import hold, without_values
from paceline.layout.pipeline.stage import Cut
from paceline.layout.placement import Held, Placement
from paceline.layout.recompute import recompute_blocks
from paceline.layout.sums import MetricNames
from paceline.lease import Lease
from paceline.mesh import AXES, Group, Mesh
from paceline.observe import Phases
from paceline.plan.absent import AbsentGroups
from paceline.recipe import Recipe
from paceline.slot import Slot, trained_parameters
from paceline.task import Task
from paceline.training.arrange import Material, Pieces, Setting
from paceline.training.debugging import Debugging
from paceline.training.layouts import Cutting

CPU = torch.device("cpu")
_OTHERWISE = ("replica", "pipeline", "shard")
"""Axes whose ranks run modules as they are: some of them, or with parts gathered."""


@dataclass(frozen=True)
class Place:
    """One rank of the first replica, or a server.

    Args:
        rank: its number.
        coordinates: by axis.
        held: by name, what it holds of trained tensors.
        stage: of a pipeline; None: there is none.
    """

    rank: int
    coordinates: dict[str, int]
    held: dict[str, Held]
    stage: Cut | None

    def __str__(self) -> str:
        return f"rank {self.rank}"


class SendsNothing:
    """A collective of ranks that are not there: what comes back has the right shape."""

    feedback = None

    def __init__(self, group: Group, net: Net, *, any_order: bool = True) -> None:
        self.group, self.net, self.exchanged, self._any_order = group, net, 0, any_order

    def buffer(self, num_values: int, like: Tensor, key: str) -> Tensor:
        return like.new_zeros(num_values)

    def all_reduce(self, x: Tensor, key: str) -> Handle:
        self.exchanged += x.numel() * x.element_size()
        return Handle.ready(x)

    def reduce_scatter(self, x: Tensor, key: str, arriving: Arriving = None) -> Handle:
        self.exchanged += x.numel() * x.element_size()
        return Handle.ready(x[self.group.rank].clone())

    def all_gather(self, x: Tensor, key: str, out: Tensor | None = None) -> Handle:
        self.exchanged += self.group.size * x.numel() * x.element_size()
        rows = x.new_empty(self.group.size, *x.shape) if out is None else out
        return Handle.ready(rows.copy_(x.expand(rows.shape)))

    def all_to_all(self, x: Tensor, key: str, out: Tensor, tag: int = 0) -> Handle:
        return Handle.ready(out.copy_(x))

    def in_any_order(self, x: Tensor) -> bool:
        return self._any_order

    def broadcast(self, x: Tensor, key: str, source: int = 0) -> Handle:
        return Handle.ready(x)

    def abort(self) -> None:
        """Nothing was launched."""


@dataclass(frozen=True)
class _Asked(Setting):
    """A setting that connects to nobody.

    Args:
        made: collectives so far.
        straight: what goes straight through a process group.
    """

    made: list[SendsNothing] = field(default_factory=list)
    straight: AbsentGroups = field(default_factory=AbsentGroups)

    def exact_collective(self, group: Group) -> Collective:
        self.made.append(SendsNothing(group, self.net))
        return self.made[-1]

    collective = exact_collective


def setting_of(recipe: Recipe, processes: int, rank: int) -> _Asked:
    """What the cuts are given on one rank of a job."""
    net, straight = Net(recipe.runtime.deadline_seconds, times_calls=False), AbsentGroups()
    mesh = Mesh.planned(recipe.strategy.degrees, rank)
    context = replace(mesh.axes["context"], groups=cast(Lease, straight))
    return _Asked(
        recipe=recipe,
        cluster=replace(Cluster.single(), world_size=processes, global_rank=rank),
        mesh=replace(mesh, axes={**mesh.axes, "context": context}),
        net=net,
        phases=Phases(),
        pieces=Pieces(),
        items_per_sample=1,
        stop_requested=lambda: False,
        device=CPU,
        warn=lambda text: None,
        note=lambda name, record: None,
        debugging=Debugging(recipe.debug, net),
        straight=straight,
    )


def places(recipe: Recipe, task: Task, model: nn.Module, processes: int) -> Iterator[Place]:
    """Every server, and every rank of the first replica, in the order of their numbers.

    Args:
        recipe: its strategy has its replicas filled in.
        model: the task's, without values.
    Raises:
        StrategyError, TaskError: the model cannot be cut so.
    """
    degrees = recipe.strategy.degrees
    cuts: dict[int, tuple[Placement, Cut | None]] = {}
    alike: dict[tuple[int, ...], dict[str, Held]] = {}  # ranks of one shard group differ in their place only
    sizes = [recipe.strategy.servers + 1, *(degrees[axis] for axis in AXES[1:])]
    for rank, inside in enumerate(product(*map(range, sizes))):
        coordinates = dict(zip(AXES, inside, strict=True))
        stage, place = coordinates["pipeline"], coordinates["shard"]
        if stage not in cuts:
            cuttings = _cuttings(setting_of(recipe, processes, rank), task, model)
            placement = _placed(model, cuttings)
            cuts[stage] = placement, next((c.stage for c in cuttings if c.stage is not None), None)
        placement, cut = cuts[stage]
        others = tuple(n for axis, n in coordinates.items() if axis != "shard")
        if others not in alike:
            alike[others] = placement.at(coordinates)
        held = alike[others]
        if degrees["shard"] > 1:
            held = {name: replace(one, place=place) for name, one in held.items()}
        yield Place(rank, coordinates, held, cut)


def _cuttings(setting: Setting, task: Task, model: nn.Module) -> list[Cutting]:
    material = Material(task, model, MetricNames(), CPU, setting.recipe.seed)
    return [spec.load()(setting, material) for spec in setting.recipe.strategy.cuts]


def _placed(model: nn.Module, cuttings: Sequence[Cutting]) -> Placement:
    placement = Placement(tuple(trained_parameters(model)))
    for cutting in cuttings:
        placement = placement.cut(cutting.transform)
    return placement


@dataclass(frozen=True)
class FakeModel:
    """The whole chain of layers as the tensor and context ranks at a place run it, made of fake tensors.

    Args:
        seen: see `Holding.seen`.
        exchanged: bytes that tensor ranks would have sent each other so far.
        straight: what context ranks would have sent each other so far.
    """

    model: nn.Module
    seen: Callable[[Any], AbstractContextManager[Any]]
    exchanged: Callable[[], int]
    straight: AbsentGroups


def fake_model(recipe: Recipe, task: Task, place: Place, processes: int, fake: FakeTensorMode) -> FakeModel:
    """Make it, in a mode."""
    model = without_values(task.model)
    if recipe.memory.recomputes:
        recompute_blocks(model, task.blocks, recipe.memory.recompute)
    setting = setting_of(recipe, processes, place.rank)
    cuttings = [c for c in _cuttings(setting, task, model) if c.transform.axis not in _OTHERWISE]
    dtypes = {slot.name: p.dtype for slot, p in trained_parameters(model).items()}
    dtypes |= {name: p.dtype for name, p in model.named_parameters()}

    def make(slot: Slot) -> Tensor:
        return torch.empty(slot.sizes, dtype=dtypes[slot.name])

    with fake:
        holding = hold(model, _placed(model, cuttings), place.coordinates, links=[model], make=make)
        for module in model.modules():
            for name, value in module._buffers.items():
                if value is not None:
                    module._buffers[name] = torch.empty_like(value, device="cpu")
        for cutting in cuttings:
            holding = cutting.prepare(holding)
    collectives = setting.made
    return FakeModel(
        holding.model, holding.seen, lambda: sum(one.exchanged for one in collectives), setting.straight
    )
