"""The part of a model that one rank holds, and how a strategy word partitions a model.

Invariant: modules and names are those of the whole model. A tensor that this rank does not hold is on the
`meta` device, so nothing can read an outdated value of it, and it takes no memory. What the rank holds is
decided in `placement`; this file only allocates, frees and slices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from paceline.comm.reduction.scatter_schedule import ScatterPacer
from paceline.errors import StrategyError, TaskError
from paceline.models.initialize import replace_parameters
from paceline.models.module_copy import deep_copy
from paceline.parallel.placement import ModelPlacement, PlacementTransform, TensorPlacement
from paceline.state.slot import TensorSlot, trained_parameters

if TYPE_CHECKING:
    from paceline.parallel.model_runner import MetricNames, ModelRunner
    from paceline.parallel.pipeline.stage_partition import StagePartition
    from paceline.parallel.session_context import SessionContext


class ParameterLifecycle(Protocol):
    """Hooks around the use of a model whose parameters are not always in memory.

    Attributes:
        gathers: whether there is anything to do.
        pace: counts of scatters that ranks exchange where they wait for each other during backward; None if
            they do not.
    """

    @property
    def gathers(self) -> bool: ...
    @property
    def pace(self) -> ScatterPacer | None: ...

    def begin(self) -> None:
        """Begin a run, or an evaluation if gradients are off; collective."""

    def next(self) -> None:
        """Prepare for a micro-batch; collective. Ranks without one take part in `end`."""

    def end(self) -> None:
        """End the run; collective: also waits for ranks that have more micro-batches."""

    def drop(self) -> None:
        """Release everything after a failed run, without waiting for other ranks."""


class ResidentParameters:
    """Lifecycle of a model that is always in memory."""

    gathers, pace = False, None

    def begin(self) -> None:
        pass

    def next(self) -> None:
        pass

    def end(self) -> None:
        pass

    def drop(self) -> None:
        pass


@dataclass(frozen=True)
class ShardedModel:
    """One rank's part of a model.

    Args:
        model: the modules; names are those of the whole model.
        slots: all trained tensors of the model, whole, in its order, whichever rank holds them.
        held: placements of the tensors that this rank holds, by name.
        computes: parameters that it computes with.
        updates: parameters that its optimizer updates; each is a view of what it is a part of, unless the
            rank keeps only the part that it updates.
        buffer_axes: axes over which buffers are split: only some ranks hold one.
        frozen_axes: axes over which this rank holds some of the frozen parameters; empty: it holds all.
        use: hooks around every use of the model.
        seen: returns the context manager in which the model runs on a batch, forward and backward; it yields
            the part of the batch that this rank runs.
    """

    model: nn.Module
    slots: tuple[TensorSlot, ...]
    held: Mapping[str, TensorPlacement]
    computes: Mapping[TensorSlot, nn.Parameter]
    updates: Mapping[TensorSlot, nn.Parameter]
    buffer_axes: frozenset[str] = field(default_factory=frozenset)
    frozen_axes: frozenset[str] = field(default_factory=frozenset)
    use: ParameterLifecycle = field(default_factory=ResidentParameters)
    seen: Callable[[Any], AbstractContextManager[Any]] = nullcontext

    @property
    def parts(self) -> dict[TensorSlot, tuple[TensorSlot | None, ...]]:
        """Parts of every rank of the shard axis, by the tensor that is computed with."""
        return {placement.computes: placement.parts for placement in self.held.values()}

    def with_sums(self, names: Collection[str], axis: str) -> ShardedModel:
        """Return the same model, in which the gradients of these tensors are also summed over an axis."""
        held = {
            name: replace(placement, sums=(axis, *placement.sums)) if name in names else placement
            for name, placement in self.held.items()
        }
        return replace(self, held=held)

    @cached_property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        tensors = chain(self.computes.values(), self.model.parameters(), self.model.buffers())
        return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))

    @property
    def is_whole(self) -> bool:
        """True if this rank has all of the model in memory."""
        if not all(placement.kept and placement.computes.is_whole for placement in self.held.values()):
            return False
        return not any(t.is_meta for t in (*self.model.parameters(), *self.model.buffers()))

    @property
    def is_on_servers(self) -> bool:
        """True if several servers each hold a part of the model; equal on all ranks."""
        slots = (slot for placement in self.held.values() for slot in placement.parts)
        return any(slot is not None and "replica" in slot.axes for slot in slots)

    @property
    def reduction_axes(self) -> frozenset[str]:
        """Axes over which the reduction sums gradients; stages and tensor ranks sum before it."""
        axes = frozenset(axis for placement in self.held.values() for axis in placement.sums)
        return axes - {"pipeline", "tensor"}

    @property
    def frees_gradients(self) -> bool:
        """True if a gradient is freed after every micro-batch, once it was handed on."""
        return any(placement.frees_gradients for placement in self.held.values())

    @property
    def updates_partially(self) -> bool:
        """True if this rank, or one that shares its tensors, updates only a part of one."""
        slots = (slot for placement in self.held.values() for slot in placement.parts)
        return any(slot is not None and not slot.is_whole for slot in slots)


def unsharded_model(model: nn.Module) -> ShardedModel:
    """Return a model of which this rank holds and updates everything."""
    return shard_model(model, ModelPlacement(tuple(trained_parameters(model))), {})


def shard_model(
    model: nn.Module,
    placement: ModelPlacement,
    coordinates: Mapping[str, int],
    *,
    links: Iterable[nn.Module] | None = None,
    make: ParameterFactory | None = None,
) -> ShardedModel:
    """Free what other ranks hold and allocate what has no memory yet; changes the model in place.

    Args:
        model: the whole model, in memory or on `meta`.
        coordinates: mesh coordinates of this rank.
        links: modules that this rank runs; None for all.
        make: returns the values of a part of a parameter that has no memory.
    Raises:
        TaskError: a parameter has hooks, which would see only the part of it that is left.
    """
    held, kept_ids = placement.at(coordinates), {id(p) for p in model.parameters()}
    by_name = {slot.name: p for slot, p in trained_parameters(model).items()}
    if links is not None:
        modules = [m for link in links for m in link.modules()]
        # By id, not by name: a tied parameter is kept if any of these modules uses it.
        kept_ids = {id(t) for m in modules for t in (*m._parameters.values(), *m._buffers.values())}
        # Freed before anything is allocated below, so the peak is never more than the whole model.
        move_to_meta(model, kept_ids)
    replacements: dict[int, nn.Parameter] = {}
    computes: dict[TensorSlot, nn.Parameter] = {}
    updates: dict[TensorSlot, nn.Parameter] = {}
    for name, placed in held.items():
        values = _parameter_values(by_name[name], make)
        p = _computed_parameter(by_name[name], placed, values)
        if p is not by_name[name]:
            replacements[id(by_name[name])] = p
        computes[placed.computes] = p
        if placed.updates is not None:
            updates[placed.updates] = _updated_parameter(p, placed, values)
    for name, p in model.named_parameters():
        # Frozen parameters are in no placement, as nothing reduces or updates them: they are made whole.
        if p.is_meta and not p.requires_grad and make is not None and id(p) in kept_ids:
            replacements[id(p)] = nn.Parameter(make(TensorSlot.whole(name, p)), requires_grad=False)
    replace_parameters(model, replacements)
    axes = frozenset({"pipeline"}) if links is not None else frozenset[str]()
    return ShardedModel(model, placement.slots, held, computes, updates, axes)


def move_to_meta(model: nn.Module, kept_ids: Collection[int]) -> None:
    """Move all parameters and buffers to `meta` except those with an id in `kept_ids`; ties are preserved."""
    empty: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None and id(value) not in kept_ids:
                    table[name] = empty.setdefault(id(value), _meta_tensor(value))  # type: ignore[assignment]


def _meta_tensor(value: Tensor) -> Tensor:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().to("meta"), value.requires_grad)
    return value.to("meta")


ParameterFactory = Callable[[TensorSlot], Tensor]
"""Function that returns the values of a part of a parameter."""


def _parameter_values(p: nn.Parameter, make: ParameterFactory | None) -> ParameterFactory:
    """Return the function that makes the values of a part of a parameter."""
    if not p.is_meta:
        return lambda slot: p.detach()[slot.index]
    if make is None:
        raise TaskError(
            "the model was built on the meta device, and the task cannot initialize its parameters",
            next_step="pass Task(initialize=paceline.models.InitializeByName(...)), or build it on the CPU",
        )
    return make


def _computed_parameter(p: nn.Parameter, held: TensorPlacement, values: ParameterFactory) -> nn.Parameter:
    """Return the parameter with which a rank computes: the whole one, allocated if on `meta`, or a part."""
    slot = held.computes
    if slot.is_whole and not p.is_meta:
        return p
    _require_no_hooks(p, slot)
    if held.kept:
        # A copy: a view would keep the whole tensor in memory.
        return nn.Parameter(values(slot).clone(), p.requires_grad)
    empty = torch.empty(slot.sizes, dtype=p.dtype)
    # ZeRO 3 allocates the memory when a gather needs it.
    empty.untyped_storage().resize_(0)
    return nn.Parameter(empty, p.requires_grad)


def _updated_parameter(p: nn.Parameter, held: TensorPlacement, values: ParameterFactory) -> nn.Parameter:
    """Return the parameter that a rank updates: the computed one, a view of it, or a part of its own."""
    updated = held.updates
    assert updated is not None
    if not held.kept:
        # A copy: a view would keep the whole tensor in memory.
        return nn.Parameter(values(updated).clone())
    if updated.part == held.computes.part:
        # The same object even if other ranks have no part: code that knows the module must find its
        # parameter in the optimizer.
        return p
    # A view: the optimizer writes directly into the tensor that the rank computes with.
    return nn.Parameter(p.detach()[updated.inside(held.computes)])


def _require_no_hooks(p: nn.Parameter, slot: TensorSlot) -> None:
    if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
        raise TaskError(
            f"'{slot.name}' has gradient hooks, and this rank would hold only a part of it",
            next_step="leave it out of the tensor plan, or remove the hooks",
        )


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose tensors are all on `meta`."""
    tensors = [*model.parameters(), *model.buffers()]
    # The memo makes deepcopy take the meta tensors, so no values are copied.
    known: dict[int, Any] = {id(t): _meta_like(t) for t in tensors}
    return deep_copy(model, known)


def _meta_like(t: Tensor) -> Tensor:
    # The strides decide along which dimension parts are contiguous, so they are kept.
    empty = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty


def _keep_model(sharded_model: ShardedModel) -> ShardedModel:
    return sharded_model


@dataclass(frozen=True)
class ModelPartition:
    """Partition of a model by one word of a strategy.

    Args:
        transform: what it leaves to each rank.
        stage: the stage of this rank, if the model is split into stages.
        prepare: changes modules, or the hooks around their use, after the rank has freed what it does not
            hold.
        gather: returns the function that is called after every update; None if there is nothing to gather.
        runner: builds the runner of a rank that runs no samples; None if it runs some.
    """

    transform: PlacementTransform
    stage: StagePartition | None = None
    prepare: Callable[[ShardedModel], ShardedModel] = _keep_model
    gather: Callable[[ShardedModel], Callable[[], None]] | None = None
    runner: Callable[[ShardedModel, MetricNames], ModelRunner] | None = None


def outermost_dims(model: nn.Module) -> dict[str, int]:
    """Return by name the dimension along which a part of a trained tensor is contiguous in memory."""
    return {
        # -d: of dimensions with equal strides the first one.
        slot.name: max(range(p.dim()), key=lambda d: (p.stride(d), -d)) if p.dim() else 0
        for slot, p in trained_parameters(model).items()
    }


def refuse_compile(context: SessionContext, word: str) -> None:
    """Raise StrategyError if `runtime.compile` is set, since `word` changes modules after they are traced."""
    if context.recipe.runtime.compile:
        raise StrategyError(
            f"runtime.compile traces the model once, and {word} changes how its modules run",
            next_step=f"set runtime.compile = false, or choose a strategy without {word}",
        )


def allocate_copy(link: nn.Module) -> nn.Module:
    """Return a copy of a module in its mode, with memory for all of its tensors.

    Parameters on `meta` get small random values, buffers on `meta` get zeros.
    """
    twin = deep_copy(link)
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
    """Return an input for a module: standard normal values, or zeros for integer dtypes."""
    if not dtype.is_floating_point:
        return torch.zeros(sizes, dtype=dtype)
    return torch.randn(sizes, dtype=dtype)
