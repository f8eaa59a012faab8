"""What one rank holds of a model: its own parts are in memory, everything else has a name and a shape only.

Invariant: the modules and names are those of the whole model. A tensor that this rank does not hold lies on
the `meta` device, so that nothing reads an old value by mistake, and nothing pays for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from paceline.comm.reduction.scatter_schedule import ScatterPacer
from paceline.errors import StrategyError, TaskError
from paceline.models.initialize import replace_parameters
from paceline.parallel.placement import ModelPlacement, PlacementTransform, TensorPlacement
from paceline.state.slot import TensorSlot, trained_parameters

if TYPE_CHECKING:
    from paceline.parallel.pipeline.stage_partition import StagePartition
    from paceline.parallel.session_context import SessionContext


class ParameterLifecycle(Protocol):
    """What has to be done around the use of a model that is not all in memory.

    Attributes:
        gathers: whether there is anything to do.
        pace: what ranks tell each other where they wait for each other during backward; None: they do not.
    """

    @property
    def gathers(self) -> bool: ...
    @property
    def pace(self) -> ScatterPacer | None: ...

    def begin(self) -> None:
        """A run begins, or, where gradients are off, an evaluation; collective."""

    def next(self) -> None:
        """Before each micro-batch; collective. Ranks without one take part in `end`."""

    def end(self) -> None:
        """After the last micro-batch; collective: also waits for ranks that have more."""

    def drop(self) -> None:
        """The run has failed; nothing is waited for."""


class ResidentParameters:
    """The use of a model that is in memory."""

    gathers, pace = False, None

    def begin(self) -> None:
        """See `ParameterLifecycle`."""

    def next(self) -> None:
        """See `ParameterLifecycle`."""

    def end(self) -> None:
        """See `ParameterLifecycle`."""

    def drop(self) -> None:
        """See `ParameterLifecycle`."""


@dataclass(frozen=True)
class ShardedModel:
    """One rank's part of a model.

    Args:
        model: the modules; names are those of the whole.
        slots: all trained tensors of the model, whole, in its order, whoever holds them.
        held: what this rank holds of them, by name.
        computes: what it computes with.
        updates: what its optimizer updates; a part shares its memory with what it is a part of, unless the
            rank keeps its part only.
        buffer_axes: axes by which buffers are cut: only some ranks hold one.
        use: what is done around every use.
        seen: makes the block in which the model is run on a batch, forward and backward; what comes out of
            it is the part of the batch that this rank runs.
    """

    model: nn.Module
    slots: tuple[TensorSlot, ...]
    held: Mapping[str, TensorPlacement]
    computes: Mapping[TensorSlot, nn.Parameter]
    updates: Mapping[TensorSlot, nn.Parameter]
    buffer_axes: frozenset[str] = field(default_factory=frozenset)
    use: ParameterLifecycle = field(default_factory=ResidentParameters)
    seen: Callable[[Any], AbstractContextManager[Any]] = nullcontext

    @property
    def parts(self) -> dict[TensorSlot, tuple[TensorSlot | None, ...]]:
        """By what is computed with, the part of every rank of the shard axis."""
        return {one.computes: one.parts for one in self.held.values()}

    @cached_property
    def device(self) -> torch.device:
        """Where this rank computes."""
        found = chain(self.computes.values(), self.model.parameters(), self.model.buffers())
        return next((t.device for t in found if not t.is_meta), torch.device("cpu"))

    @property
    def reduction_axes(self) -> frozenset[str]:
        """Axes over which some gradient is summed by a reduction; stages and tensor ranks meet before."""
        axes = frozenset(axis for one in self.held.values() for axis in one.sums)
        return axes - {"pipeline", "tensor"}

    @property
    def frees_gradients(self) -> bool:
        """Whether a gradient is let go of with every micro-batch, once it was handed on."""
        return any(one.frees_gradients for one in self.held.values())

    @property
    def updates_partially(self) -> bool:
        """Whether this rank, or one that shares its tensors, updates less than all of one."""
        return any(part is not None and not part.is_whole for one in self.held.values() for part in one.parts)


def unsharded_model(model: nn.Module) -> ShardedModel:
    """A model of which this rank holds, and updates, everything."""
    return shard_model(model, ModelPlacement(tuple(trained_parameters(model))), {})


def shard_model(
    model: nn.Module,
    placement: ModelPlacement,
    coordinates: Mapping[str, int],
    *,
    links: Iterable[nn.Module] | None = None,
    make: ParameterFactory | None = None,
) -> ShardedModel:
    """Let go of what another rank holds, and make what has no memory yet; the model is changed in place.

    Args:
        model: whole, in memory or with a shape only.
        coordinates: of this rank.
        links: the modules that this rank runs; all if None.
        make: the values of a part of a parameter that has no memory.
    Raises:
        TaskError: a parameter has hooks that would not see the part of it that is left.
    """
    held, kept = placement.at(coordinates), {id(p) for p in model.parameters()}
    by_name = {slot.name: p for slot, p in trained_parameters(model).items()}
    if links is not None:
        modules = [m for link in links for m in link.modules()]
        kept = {id(t) for m in modules for t in (*m._parameters.values(), *m._buffers.values())}
        move_to_meta(model, kept)
    made: dict[int, nn.Parameter] = {}
    computes: dict[TensorSlot, nn.Parameter] = {}
    updates: dict[TensorSlot, nn.Parameter] = {}
    for name, one in held.items():
        values = _parameter_values(by_name[name], make)
        p = _computed_parameter(by_name[name], one, values)
        if p is not by_name[name]:
            made[id(by_name[name])] = p
        computes[one.computes] = p
        if one.updates is not None:
            updates[one.updates] = _updated_parameter(p, one, values)
    for name, p in model.named_parameters():
        if p.is_meta and not p.requires_grad and make is not None and id(p) in kept:
            made[id(p)] = nn.Parameter(make(TensorSlot.whole(name, p)), requires_grad=False)
    replace_parameters(model, made)
    axes = frozenset({"pipeline"}) if links is not None else frozenset[str]()
    return ShardedModel(model, placement.slots, held, computes, updates, axes)


def move_to_meta(model: nn.Module, kept: Collection[int]) -> None:
    """Put every parameter and buffer on `meta` but those whose `id` is kept; tied ones stay tied."""
    empty: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None and id(value) not in kept:
                    table[name] = empty.setdefault(id(value), _meta_tensor(value))  # type: ignore[assignment]


def _meta_tensor(value: Tensor) -> Tensor:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().to("meta"), value.requires_grad)
    return value.to("meta")


ParameterFactory = Callable[[TensorSlot], Tensor]
"""Makes the values of a part of a parameter."""


def _parameter_values(p: nn.Parameter, make: ParameterFactory | None) -> ParameterFactory:
    """Where the values of a parameter come from."""
    if not p.is_meta:
        return lambda slot: p.detach()[slot.index]
    if make is None:
        raise TaskError(
            "the model was built without memory, and nothing says how its parameters are made",
            next_step="pass Task(initialize=paceline.models.InitializeByName(...)), or build it as usual",
        )
    return make


def _computed_parameter(p: nn.Parameter, held: TensorPlacement, values: ParameterFactory) -> nn.Parameter:
    """What the rank computes with: the parameter, made if it has no memory, or a part of it."""
    slot = held.computes
    if slot.is_whole and not p.is_meta:
        return p
    _require_no_hooks(p, slot)
    if held.kept:
        return nn.Parameter(values(slot).clone(), p.requires_grad)
    empty = torch.empty(slot.sizes, dtype=p.dtype)
    empty.untyped_storage().resize_(0)  # it comes when it is used
    return nn.Parameter(empty, p.requires_grad)


def _updated_parameter(p: nn.Parameter, held: TensorPlacement, values: ParameterFactory) -> nn.Parameter:
    """What the optimizer gets: the parameter, a part that shares its memory, or a part of its own."""
    own = held.updates
    assert own is not None
    if not held.kept:
        return nn.Parameter(values(own).clone())
    if own.part == held.computes.part:  # all of it, whoever else has none: what knows the module knows this
        return p
    return nn.Parameter(p.detach()[own.inside(held.computes)])


def _require_no_hooks(p: nn.Parameter, slot: TensorSlot) -> None:
    if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
        raise TaskError(
            f"'{slot.name}' has gradient hooks, and this rank would hold a part of it only",
            next_step="leave it out of the tensor plan, or remove the hooks",
        )


def copy_to_meta(model: nn.Module) -> nn.Module:
    """A copy of a model all of whose tensors have a shape only."""
    tensors = [*model.parameters(), *model.buffers()]
    known: dict[int, Any] = {id(t): _meta_like(t) for t in tensors}
    return copy.deepcopy(model, known)


def _meta_like(t: Tensor) -> Tensor:
    found = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return nn.Parameter(found, t.requires_grad) if isinstance(t, nn.Parameter) else found


def _keep_model(sharded_model: ShardedModel) -> ShardedModel:
    return sharded_model


@dataclass(frozen=True)
class ModelPartition:
    """One cut of a model, as its word makes it.

    Args:
        transform: what it leaves to each rank.
        stage: the stage of this rank, if the cut is into stages.
        prepare: changes modules, or what is done around their use, once the rank has let go of the rest.
        gather: makes what is called after every update.
    """

    transform: PlacementTransform
    stage: StagePartition | None = None
    prepare: Callable[[ShardedModel], ShardedModel] = _keep_model
    gather: Callable[[ShardedModel], Callable[[], None]] | None = None


def outermost_dims(model: nn.Module) -> dict[str, int]:
    """By name, the dimension along which a part of a trained tensor is one run of memory."""
    return {
        slot.name: max(range(p.dim()), key=lambda d: (p.stride(d), -d)) if p.dim() else 0
        for slot, p in trained_parameters(model).items()
    }


def refuse_compile(context: SessionContext, word: str) -> None:
    if context.recipe.runtime.compile:
        raise StrategyError(
            f"runtime.compile traces the model once, and {word} changes how its modules run",
            next_step=f"set runtime.compile = false, or choose a strategy without {word}",
        )


def allocate_copy(link: nn.Module) -> nn.Module:
    """A copy; parameters without memory get some, with small values, and buffers with zeros."""
    twin = copy.deepcopy(link).train()
    for module in twin.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                values = torch.empty(p.shape, dtype=p.dtype).normal_(std=0.02)
                module._parameters[name] = nn.Parameter(values, p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                module._buffers[name] = torch.zeros(b.shape, dtype=b.dtype)
    return twin


def sample_input(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An input of a module: numbers of ordinary size, or zeros where it holds none."""
    if not dtype.is_floating_point:
        return torch.zeros(sizes, dtype=dtype)
    return torch.randn(sizes, dtype=dtype)
