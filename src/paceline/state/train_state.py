"""Training state: what a checkpoint contains, and nothing else.

Invariant: a run that is stopped, saved, loaded and continued computes the same as the run without a stop.
Nothing else is state: the order of samples, dropout masks and the learning rate are functions of `step`
and `num_updates`. Writing and reading files is the task of `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError, format_count
from paceline.state.optimizer_state import OptimizerState, ParamGroupState
from paceline.state.slot import (
    ExtraState,
    InMemorySource,
    ModelShard,
    SlotIndex,
    TensorPiece,
    TensorSlot,
    TensorSource,
    first_tied_names,
    strip_prefix,
)
from paceline.state.stateful import Stateful, convert_updates, state_from_json, state_to_json

_SMALLEST_SCALE = 2.0**-24


class MisfitError(CheckpointError):
    """A saved state that belongs to another model or optimizer."""


@dataclass
class LossScale:
    """Dynamic scale of the fp16 loss; constant 1 for other precisions.

    Args:
        value: the factor of the loss before backward.
        growth_steps: updates without an overflow before the scale doubles; 0: constant.
        clean_steps: updates since the last overflow or doubling.
    Source: Micikevicius et al. 2018, Mixed Precision Training, arXiv:1710.03740, section 3.2.
    """

    value: float = 1.0
    growth_steps: int = 0
    clean_steps: int = 0

    @property
    def dynamic(self) -> bool:
        """Return whether the scale changes."""
        return self.growth_steps > 0

    @property
    def can_decrease(self) -> bool:
        """Return whether a lower scale may avoid an overflow."""
        return self.dynamic and self.value > _SMALLEST_SCALE

    def update(self, overflow: bool) -> None:
        """Halve after an overflow; double after `growth_steps` clean updates."""
        if not self.dynamic:
            return
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.value = max(self.value / 2, _SMALLEST_SCALE)
        elif self.clean_steps == self.growth_steps:
            self.value, self.clean_steps = self.value * 2, 0


@dataclass
class TrainState:
    """The state of one rank.

    Args:
        sharded_model: parameters and persistent buffers of the model that this rank holds.
        optimizer: over the parameters that the rank updates; its tensors are state, and so are the values
            that its steps change in its groups.
        scale: of the loss.
        step: number of steps taken, the position in the data.
        num_updates: updates applied, the position in the schedule (skipped steps do not count).
        extra_states: other state with tensors, by the first part of the tensors' names.
        stateful_objects: other state without tensors, equal on all ranks (callbacks, schedulers), by name.
        has_local_optimizer: the optimizer state differs between replicas, as under local rules.
        updates_per_step: of the sync rule; a state of another rule continues at the same place of the
            schedule.
    """

    sharded_model: ModelShard
    optimizer: torch.optim.Optimizer
    scale: LossScale = field(default_factory=LossScale)
    step: int = 0
    num_updates: int = 0
    extra_states: dict[str, ExtraState] = field(default_factory=dict)
    stateful_objects: dict[str, Stateful] = field(default_factory=dict)
    has_local_optimizer: bool = False
    updates_per_step: int = 1

    def __post_init__(self) -> None:
        self.groups = ParamGroupState(self.optimizer)
        self._unclaimed: dict[str, Any] = {}
        self.optimizer_state = OptimizerState(self.optimizer, self.sharded_model)

    @property
    def model(self) -> nn.Module:
        """Return the modules; what this rank does not hold is on `meta`."""
        return self.sharded_model.model

    def keep(self, name: str, stateful: Stateful) -> None:
        """Save the state of an object from now on, and load what a loaded state has under its name."""
        self.stateful_objects[name] = stateful
        if name in self._unclaimed:
            stateful.load_state_dict(state_from_json(self._unclaimed.pop(name)))

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of every tensor, by logical name: `model/NAME`, `optimizer/NAME/KEY`."""
        return {piece.slot.name: piece.tensor for piece in self.pieces()}

    def pieces(self) -> list[TensorPiece]:
        """Return every tensor of this rank with its slot; not copied."""
        pieces = [*self._model_pieces().values(), *self.optimizer_pieces()]
        for prefix, state in self.extra_states.items():
            pieces += [piece.under(prefix) for piece in state.pieces()]
        return pieces

    def nonpersistent_buffers(self) -> list[TensorPiece]:
        """Return the buffers that no checkpoint has, such as tables of rotary positions.

        They are needed to move a whole model to another rank.
        """
        saved, pieces = self._named(), list[TensorPiece]()
        for name, value in self.model.named_buffers(remove_duplicate=False):
            if name not in saved and not value.is_meta:
                slot = TensorSlot.whole(f"model/{name}", value)
                pieces.append(TensorPiece(replace(slot, axes=self.sharded_model.buffer_axes), value))
        return pieces

    def replicated_pieces(self) -> list[TensorPiece]:
        """Return the pieces that have the same bits on all ranks that hold them.

        Of a parameter on several servers, a worker returns the part of each, and a server its own.
        """
        of_replica = (
            {piece.slot.name for piece in self.optimizer_pieces()} if self.has_local_optimizer else set[str]()
        )
        others, pieces = list[TensorPiece](), list[TensorPiece]()
        for name, piece in self._model_pieces().items():
            placement = self.sharded_model.held.get(name)
            parts = [p for p in placement.parts if p is not None] if placement is not None else []
            if placement is None or not any("replica" in part.axes for part in parts):
                others.append(piece)
            elif placement.kept:
                whole = placement.computes
                views = [TensorPiece(part, piece.tensor[part.inside(whole)]) for part in parts]
                pieces += [view.under("model") for view in views]
            elif placement.updates is not None:
                pieces.append(piece)
        others += [piece for piece in self.pieces() if not piece.slot.name.startswith("model/")]
        shared = [p for p in others if "replica" not in p.slot.axes and p.slot.name not in of_replica]
        return pieces + shared

    def optimizer_pieces(self) -> list[TensorPiece]:
        """Return the optimizer's tensors: `optimizer/NAME/KEY`."""
        return self.optimizer_state.pieces()

    def scalars(self) -> dict[str, Any]:
        """Return everything that is not a tensor, as JSON values; the keys are those of checkpoints."""
        return {
            "step": self.step,
            "updates": self.num_updates,
            "updates_per_step": self.updates_per_step,
            "scale": {"value": self.scale.value, "clean_steps": self.scale.clean_steps},
            "optimizer": self.optimizer_state.values(),
            "optimizer_kind": type(self.optimizer).__name__,
            "groups": self.groups.changed(),
            "others": {
                name: state_to_json(name, other.state_dict()) for name, other in self.stateful_objects.items()
            },
            "tied": {name: first for name, first in first_tied_names(self._named()).items() if name != first},
        }

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Load whole tensors, or change nothing; see `read_from`. The inverse of `pieces` and `scalars`."""
        self.read_from(InMemorySource(tensors), scalars)()

    def read_from(self, source: TensorSource, scalars: Mapping[str, Any]) -> Callable[[], None]:
        """Read this rank's part of a saved state, and return the function that loads it.

        Nothing changes before that function is called, so ranks can first agree that all have read theirs.

        Args:
            source: the whole tensors.
            scalars: as `scalars` returned them.
        Raises:
            MisfitError: a name, a shape or the class of the optimizer differs.
            CheckpointError: something is missing or damaged.
        """
        self._check(source.shapes, scalars)
        pieces = {f"model/{name}": piece for name, piece in self._model_pieces().items()}
        extra = self._wanted_by_extra_states(source.shapes)
        local = {name: piece.slot.index for name, piece in pieces.items()}
        values = dict(source.read(local | dict(self.optimizer_state.wanted(source.shapes)) | extra))

        def take_over() -> None:
            # Values are removed as soon as they are copied: a state takes as much memory as the model.
            with torch.no_grad():
                for name, piece in pieces.items():
                    piece.tensor.copy_(values.pop(name))
            # A state without moments fits any optimizer, but its numbers belong to the one that saved them.
            is_same_kind = scalars["optimizer_kind"] == type(self.optimizer).__name__
            self.optimizer_state.take(values, scalars["optimizer"] if is_same_kind else {})
            self.groups.restore(scalars["groups"])
            self.step, self.num_updates = (
                int(scalars["step"]),
                convert_updates(scalars, self.updates_per_step),
            )
            self.scale = replace(self.scale, **scalars["scale"])
            # Callbacks may register after loading; `keep` then gives them their saved state.
            self._unclaimed = dict(scalars.get("others", {}))
            for name, other in self.stateful_objects.items():
                self.keep(name, other)
            for prefix, state in self.extra_states.items():
                state.load(strip_prefix({name: values[name] for name in extra}, f"{prefix}/"))

        return take_over

    def _wanted_by_extra_states(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, SlotIndex]:
        indices: dict[str, SlotIndex] = {}
        for prefix, state in self.extra_states.items():
            wanted = state.wanted(strip_prefix(shapes, f"{prefix}/"))
            indices |= {f"{prefix}/{name}": index for name, index in wanted.items()}
        return indices

    def _check(self, shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, Any]) -> None:
        """Compare names, shapes and the class of the optimizer with those of a saved state."""
        expected = {f"model/{name}": shape for name, shape in self._shapes().items()}
        saved = {name: shape for name, shape in shapes.items() if name.startswith("model/")}
        names = expected.keys() | saved.keys()
        wrong = sorted(name for name in names if expected.get(name) != saved.get(name))
        wrong += self.optimizer_state.mismatches(shapes, scalars["optimizer"])
        if len(scalars["groups"]) != len(self.optimizer.param_groups):
            wrong.append("the groups of the optimizer")
        kind = type(self.optimizer).__name__
        has_state = any(name.startswith("optimizer/") for name in shapes)
        has_state |= any(value is not None for value in scalars["optimizer"].values())
        if has_state and scalars["optimizer_kind"] != kind:
            wrong.append(f"{scalars['optimizer_kind']} saved it, the optimizer is {kind}")
        if wrong:
            raise MisfitError(
                f"the checkpoint does not fit: {format_count(len(wrong), 'difference')}, the first is"
                f" '{wrong[0]}'",
                next_step="resume with the recipe that wrote it; the run folder holds it as recipe.toml",
            )

    def _model_pieces(self) -> dict[str, TensorPiece]:
        """Return what this rank holds of each parameter and persistent buffer; tied ones by their first
        name.
        """
        pieces = {name: self._model_piece(name, value) for name, value in self._model_tensors().items()}
        return {name: piece for name, piece in pieces.items() if piece is not None}

    def _model_piece(self, name: str, value: Tensor) -> TensorPiece | None:
        """Return a parameter or buffer with its slot; of a sharded parameter the part that this rank updates.

        None: a scalar that another rank holds.
        """
        placement = self.sharded_model.held.get(name)
        if placement is None:
            slot, sharded_model = TensorSlot.whole(f"model/{name}", value), self.sharded_model
            axes = sharded_model.buffer_axes
            if sharded_model.frozen_axes and name in dict(self.model.named_parameters()):
                axes |= sharded_model.frozen_axes
            return TensorPiece(replace(slot, axes=axes), value)
        if placement.kept:
            return TensorPiece(placement.computes, value).under("model")
        part = placement.updates
        if part is None and not placement.computes.shape:
            return None  # a scalar has no empty part
        if part is None:  # all of it is on other ranks of an axis
            axes = frozenset(axis for other in placement.parts if other is not None for axis in other.axes)
            empty = tuple((0, 0) for _ in placement.computes.shape)
            slot = replace(placement.computes, part=empty, axes=axes or frozenset({"shard"}))
            return TensorPiece(slot, value.new_empty(slot.sizes)).under("model")
        return TensorPiece(part, self.sharded_model.updates[part].detach()).under("model")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors of the whole model, also of those on other ranks; tied ones
        once.
        """
        named = self._named()
        first = first_tied_names(named)
        shapes = {name: tuple(value.shape) for name, value in named.items() if first[name] == name}
        return shapes | {slot.name: slot.shape for slot in self.sharded_model.slots}

    def _model_tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters and persistent buffers; tied tensors once, by their first name."""
        named = self._named()
        first = first_tied_names(named)
        return {n: value for n, value in named.items() if first[n] == n and not value.is_meta}

    def _named(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by all of their names."""
        # A sharded parameter without memory must not be gathered here: only its name and shape are needed.
        with torch._C.DisableTorchFunctionSubclass():
            tensors = dict(self.model.state_dict())
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"the model's '{name}' is {type(value).__name__}, and only tensors can be saved",
                    next_step="return a tensor from get_extra_state, or register a buffer instead",
                )
        return tensors
