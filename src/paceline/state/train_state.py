"""Training state: what must be in a checkpoint, and nothing else.

Invariant: a run that is stopped, saved, loaded and continued computes what the run without a stop does.
If it is not here, it is not state: the order of samples, dropout and the learning rate are functions of
`step` and `updates`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.state.optimizer_state import OptimizerState, ParamGroupState
from paceline.state.slot import (
    ExtraState,
    InMemorySource,
    SlotIndex,
    TensorPiece,
    TensorSlot,
    TensorSource,
    first_tied_names,
    strip_prefix,
)
from paceline.state.stateful import Stateful, convert_updates, state_from_json, state_to_json

if TYPE_CHECKING:
    from paceline.parallel.sharded_model import ShardedModel

_SMALLEST_SCALE = 2.0**-24


class MisfitError(CheckpointError):
    """A state of another model or optimizer."""


@dataclass
class LossScale:
    """Dynamic scale of the fp16 loss; 1 and constant for the other precisions.

    Args:
        value: what the loss is multiplied with before backward.
        growth_steps: number of updates without an overflow before the scale doubles; 0: constant.
    Source: Micikevicius et al. 2018, Mixed Precision Training, arXiv:1710.03740, section 3.2.
    """

    value: float = 1.0
    growth_steps: int = 0
    clean_steps: int = 0

    @property
    def dynamic(self) -> bool:
        return self.growth_steps > 0

    @property
    def can_decrease(self) -> bool:
        """Whether a lower scale may cure an overflow."""
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
        sharded_model: parameters and persistent buffers of the model, as far as this rank holds them.
        optimizer: over what the rank updates; its tensors, and what it has changed in its groups, are state.
        scale: of the loss.
        step: number of steps taken, the position in the data.
        updates: number of updates applied, the position in the schedule (skipped steps do not count).
        extra_states: other holders of tensors, by the first part of the tensors' names.
        others: holders of other values, equal on all ranks: callbacks, schedulers; by name.
        alone: the optimizer is this replica's own: others have learned something else.
        updates_per_step: of the rule; a state of another rule goes on at the same place of the schedule.
    """

    sharded_model: ShardedModel
    optimizer: torch.optim.Optimizer
    scale: LossScale = field(default_factory=LossScale)
    step: int = 0
    updates: int = 0
    extra_states: dict[str, ExtraState] = field(default_factory=dict)
    others: dict[str, Stateful] = field(default_factory=dict)
    alone: bool = False
    updates_per_step: int = 1

    def __post_init__(self) -> None:
        self.groups = ParamGroupState(self.optimizer)
        self._unclaimed: dict[str, Any] = {}
        self.kept = OptimizerState(self.optimizer, self.sharded_model)

    @property
    def model(self) -> nn.Module:
        """The modules; what this rank does not hold is on `meta`."""
        return self.sharded_model.model

    def keep(self, name: str, one: Stateful) -> None:
        """Save the state of one more; it takes over what a state that was loaded holds under its name."""
        self.others[name] = one
        if name in self._unclaimed:
            one.load_state_dict(state_from_json(self._unclaimed.pop(name)))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by logical name: `model/NAME`, `optimizer/NAME/KEY`. This rank's part, not copied."""
        return {piece.slot.name: piece.tensor for piece in self.pieces()}

    def pieces(self) -> list[TensorPiece]:
        """Every tensor with its place in the whole. Not copied."""
        found = [self._model_piece(name, value) for name, value in self._model_tensors().items()]
        found += self.optimizer_pieces()
        for word, keeper in self.extra_states.items():
            found += [piece.under(word) for piece in keeper.pieces()]
        return found

    def nonpersistent_buffers(self) -> list[TensorPiece]:
        """Buffers that no state has, such as tables of rotary positions: a whole model needs those too."""
        saved, found = self._named(), list[TensorPiece]()
        for name, value in self.model.named_buffers(remove_duplicate=False):
            if name not in saved and not value.is_meta:
                slot = TensorSlot.whole(f"model/{name}", value)
                found.append(TensorPiece(replace(slot, axes=self.sharded_model.buffer_axes), value))
        return found

    def replicated_pieces(self) -> list[TensorPiece]:
        """Those that have the same bits on all ranks that hold them."""
        own = {piece.slot.name for piece in self.optimizer_pieces()} if self.alone else set[str]()
        return [p for p in self.pieces() if "replica" not in p.slot.axes and p.slot.name not in own]

    def optimizer_pieces(self) -> list[TensorPiece]:
        """The optimizer's tensors: `optimizer/NAME/KEY`."""
        return self.kept.pieces()

    def scalars(self) -> dict[str, Any]:
        """Everything that is not a tensor, as JSON values."""
        return {
            "step": self.step,
            "updates": self.updates,
            "updates_per_step": self.updates_per_step,
            "scale": {"value": self.scale.value, "clean_steps": self.scale.clean_steps},
            "optimizer": self.kept.values(),
            "optimizer_kind": type(self.optimizer).__name__,
            "groups": self.groups.changed(),
            "others": {name: state_to_json(name, one.state_dict()) for name, one in self.others.items()},
            "tied": {name: first for name, first in first_tied_names(self._named()).items() if name != first},
        }

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Take over whole tensors, or nothing, see `read_from`; the inverse of `pieces` and `scalars`."""
        self.read_from(InMemorySource(tensors), scalars)()

    def read_from(self, source: TensorSource, scalars: Mapping[str, Any]) -> Callable[[], None]:
        """Read what this rank holds of a state; nothing changes before the result is called.

        Raises:
            MisfitError: a name, a shape or the kind of optimizer does not fit.
            CheckpointError: what is read is missing or damaged.
        """
        self._check(source.shapes, scalars)
        pieces = {f"model/{n}": self._model_piece(n, value) for n, value in self._model_tensors().items()}
        kept = self._kept_by_keepers(source.shapes)
        own = {name: piece.slot.index for name, piece in pieces.items()}
        values = dict(source.read(own | dict(self.kept.wanted(source.shapes)) | kept))

        def take_over() -> None:  # what has found its place is let go of
            with torch.no_grad():
                for name, piece in pieces.items():
                    piece.tensor.copy_(values.pop(name))
            same = scalars["optimizer_kind"] == type(self.optimizer).__name__
            self.kept.take(values, scalars["optimizer"] if same else {})
            self.groups.restore(scalars["groups"])
            self.step, self.updates = int(scalars["step"]), convert_updates(scalars, self.updates_per_step)
            self.scale = replace(self.scale, **scalars["scale"])
            self._unclaimed = dict(scalars.get("others", {}))
            for name, one in self.others.items():
                self.keep(name, one)
            for word, keeper in self.extra_states.items():
                keeper.load(strip_prefix({name: values[name] for name in kept}, f"{word}/"))

        return take_over

    def _kept_by_keepers(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, SlotIndex]:
        """Of what was saved by keepers, what those of this rank go on from."""
        found: dict[str, SlotIndex] = {}
        for word, keeper in self.extra_states.items():
            wanted = keeper.wanted(strip_prefix(shapes, f"{word}/"))
            found |= {f"{word}/{name}": index for name, index in wanted.items()}
        return found

    def _check(self, shapes: Mapping[str, tuple[int, ...]], scalars: Mapping[str, Any]) -> None:
        """Compare names, shapes and the kind of optimizer."""
        own = {f"model/{name}": shape for name, shape in self._shapes().items()}
        given = {name: shape for name, shape in shapes.items() if name.startswith("model/")}
        wrong = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
        wrong += self.kept.mismatches(shapes, scalars["optimizer"])
        if len(scalars["groups"]) != len(self.optimizer.param_groups):
            wrong.append("the groups of the optimizer")
        kind = type(self.optimizer).__name__
        has_learned = any(name.startswith("optimizer/") for name in shapes)
        has_learned |= any(value is not None for value in scalars["optimizer"].values())
        if has_learned and scalars["optimizer_kind"] != kind:
            wrong.append(f"{scalars['optimizer_kind']} saved it, the optimizer is {kind}")
        if wrong:
            raise MisfitError(
                f"the checkpoint does not fit: {len(wrong)} entries differ, the first is '{wrong[0]}'",
                next_step="resume with the recipe that wrote it; the run folder holds it as recipe.toml",
            )

    def _model_piece(self, name: str, value: Tensor) -> TensorPiece:
        """A parameter or a buffer, and its place; of one that is gathered for its use only, the own part."""
        held = self.sharded_model.held.get(name)
        if held is None:
            slot = TensorSlot.whole(f"model/{name}", value)
            return TensorPiece(replace(slot, axes=self.sharded_model.buffer_axes), value)
        if held.kept:
            return TensorPiece(held.computes, value).under("model")
        part = held.updates
        if part is None:  # others hold all of it
            empty = replace(held.computes, part=tuple((0, 0) for _ in held.computes.shape))
            return TensorPiece(empty.on("shard"), value.new_empty(empty.sizes)).under("model")
        return TensorPiece(part, self.sharded_model.updates[part].detach()).under("model")

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor of the model, whole, also of what other ranks hold; tied ones once."""
        named = self._named()
        first = first_tied_names(named)
        shapes = {name: tuple(value.shape) for name, value in named.items() if first[name] == name}
        return shapes | {slot.name: slot.shape for slot in self.sharded_model.slots}

    def _model_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers that this rank holds; tied tensors once, by their first name."""
        named = self._named()
        first = first_tied_names(named)
        return {n: value for n, value in named.items() if first[n] == n and not value.is_meta}

    def _named(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by every name that they have."""
        with torch._C.DisableTorchFunctionSubclass():  # what has no memory now gives its name and shape
            found = dict(self.model.state_dict())
        for name, value in found.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"the model's '{name}' is {type(value).__name__}, and only tensors can be saved",
                    next_step="return a tensor from get_extra_state, or register a buffer instead",
                )
        return found
