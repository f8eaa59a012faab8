"""Training state: what must be in a checkpoint, and nothing else.

Invariant: a run that is stopped, saved, loaded and continued computes what the run without a stop does.
If it is not here, it is not state: the order of samples, dropout and the learning rate are functions of
`step` and `updates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.optim.groups import GroupMemory
from paceline.slot import Keeper, Piece, Slot, first_names

_SMALLEST_SCALE = 2.0**-24


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
    def can_fall(self) -> bool:
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
        model: its parameters and persistent buffers are state.
        optimizer: its per-parameter tensors and group options are state.
        scale: of the loss.
        step: number of steps taken, the position in the data.
        updates: number of updates applied, the position in the schedule (skipped steps do not count).
        trained: what this rank's optimizer updates, where that is not the model's own parameters; a part
            shares its memory with the parameter that it is a part of.
        keepers: who else holds state, by a word for the first part of its names.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scale: LossScale = field(default_factory=LossScale)
    step: int = 0
    updates: int = 0
    trained: Mapping[Slot, nn.Parameter] = field(default_factory=dict)
    keepers: dict[str, Keeper] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.groups = GroupMemory(self.optimizer)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by logical name: `model/NAME`, `optimizer/NAME/KEY`. This rank's part, not copied."""
        return {piece.slot.name: piece.tensor for piece in self.pieces()}

    def pieces(self) -> list[Piece]:
        """Every tensor with its place in the whole. Not copied."""
        by_name = {slot.name: slot for slot in self.trained}
        found = [
            Piece(_model_slot(name, value, by_name), value) for name, value in self._model_tensors().items()
        ]
        found += self.optimizer_pieces()
        for word, keeper in self.keepers.items():
            found += [piece.under(word) for piece in keeper.pieces()]
        return found

    def optimizer_pieces(self) -> list[Piece]:
        """The optimizer's tensors: `optimizer/NAME/KEY`."""
        slots = {p: slot for slot, p in self.trained.items()}
        found = []
        for name, p in self._optimized():
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    found.append(Piece(_moment_slot(f"optimizer/{name}/{key}", value, slots.get(p)), value))
        return found

    def scalars(self) -> dict[str, Any]:
        """Everything that is not a tensor, as JSON values."""
        numbers = {
            f"{name}/{key}": value
            for name, p in self._optimized()
            for key, value in self.optimizer.state.get(p, {}).items()
            if isinstance(value, bool | int | float | str)
        }
        return {
            "step": self.step,
            "updates": self.updates,
            "scale": {"value": self.scale.value, "clean_steps": self.scale.clean_steps},
            "optimizer": numbers,
            "optimizer_kind": type(self.optimizer).__name__,
            "groups": self.groups.changed(),
            "tied": {name: first for name, first in first_names(self._named()).items() if name != first},
        }

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Take over the values; the inverse of `tensors` and `scalars`. Nothing changes if anything is wrong.

        Raises:
            CheckpointError: a name, a shape or the kind of optimizer does not fit.
        """
        moments = self._check(tensors, scalars)
        with torch.no_grad():
            for name, value in self._model_tensors().items():
                value.copy_(tensors[f"model/{name}"])
        self.optimizer.state.clear()
        self.groups.restore(scalars["groups"])
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p in moments:
                    self.optimizer.state[p] = {k: _placed(v, p, group) for k, v in moments[p].items()}
        for word, keeper in self.keepers.items():
            prefix = f"{word}/"
            keeper.load({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        self.step, self.updates = int(scalars["step"]), int(scalars["updates"])
        self.scale.value, self.scale.clean_steps = (scalars["scale"][k] for k in ("value", "clean_steps"))

    def _check(
        self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """The optimizer's entries by parameter, if all fits."""
        own = {f"model/{name}": value.shape for name, value in self._model_tensors().items()}
        given = {name: t.shape for name, t in tensors.items() if name.startswith("model/")}
        wrong = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
        moments = {name: t for name, t in tensors.items() if name.startswith("optimizer/")}
        numbers = {f"optimizer/{name}": value for name, value in scalars["optimizer"].items()}
        entries = self._entries(moments | numbers, wrong)
        kind = type(self.optimizer).__name__
        if entries and scalars["optimizer_kind"] != kind:
            wrong.append(f"{scalars['optimizer_kind']} saved it, the optimizer is {kind}")
        if wrong:
            raise CheckpointError(
                f"the checkpoint does not fit: {len(wrong)} entries differ, the first is '{wrong[0]}'",
                next_step="resume with the recipe that wrote it; the run folder holds it as recipe.toml",
            )
        return entries

    def _entries(self, values: Mapping[str, Any], wrong: list[str]) -> dict[nn.Parameter, dict[str, Any]]:
        """Values by parameter and key; names that fit no parameter go to `wrong`."""
        parameters, whole = dict(self._optimized()), dict(self.model.named_parameters())
        rows = {p: slot.rows for slot, p in self.trained.items()}
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for full, value in values.items():
            name, _, key = full.removeprefix("optimizer/").rpartition("/")
            if name not in whole or not _suits(value, whole[name]):
                wrong.append(full)
            elif name in parameters:
                p = parameters[name]
                found.setdefault(p, {})[key] = _part(value, rows.get(p), len(whole[name].shape))
            elif not self.trained:
                wrong.append(full)
        return found

    def _model_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers; tied tensors once, by their first name."""
        named = self._named()
        first = first_names(named)
        return {name: value for name, value in named.items() if first[name] == name}

    def _named(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by every name that they have."""
        found = dict(self.model.state_dict())
        for name, value in found.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"the model's '{name}' is {type(value).__name__}, and only tensors can be saved",
                    next_step="return a tensor from get_extra_state, or register a buffer instead",
                )
        return found

    def _optimized(self) -> list[tuple[str, nn.Parameter]]:
        names = {p: n for n, p in self.model.named_parameters()} | {
            p: s.name for s, p in self.trained.items()
        }
        return [(names[p], p) for group in self.optimizer.param_groups for p in group["params"]]


def _model_slot(name: str, value: Tensor, trained: Mapping[str, Slot]) -> Slot:
    """Whole, unless its rank alone holds the right values of it (a stage of a pipeline)."""
    slot = Slot.whole(f"model/{name}", value)
    held = trained.get(name)
    return replace(slot, axes=held.axes) if held is not None and "pipeline" in held.axes else slot


def _moment_slot(name: str, value: Tensor, of: Slot | None) -> Slot:
    """The place of a moment: that of its parameter, where the shapes agree.

    One that is whole still has the parameter's axes: ranks that hold nothing of that have to be told.
    """
    if of is None or value.dim() == 0:
        return replace(Slot.whole(name, value), axes=frozenset() if of is None else of.axes)
    if value.dim() == len(of.shape) and value.shape[0] == of.part[0][1] - of.part[0][0]:
        shape = (of.shape[0], *value.shape[1:])
        return Slot(name, shape, (of.part[0], *((0, n) for n in value.shape[1:])), of.axes)
    return replace(Slot.whole(name, value), axes=of.axes)


def _part(value: Any, rows: slice | None, num_dims: int) -> Any:
    """The rows of a whole moment; what has no rows is whole on every rank."""
    if rows is None or not isinstance(value, Tensor) or value.dim() < max(1, num_dims):
        return value
    return value[rows]


def _suits(value: Any, p: nn.Parameter) -> bool:
    """Moments have the parameter's shape, or one that broadcasts to it (factored moments, counters)."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return True
    shape = zip(reversed(value.shape), reversed(p.shape), strict=False)
    return value.dim() <= p.dim() and all(n in (1, of) for n, of in shape)


def _placed(value: Any, p: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """Moments live with their parameter; so do counters of fused optimizers, the others stay on the host."""
    if not isinstance(value, Tensor):
        return value
    with_parameter = value.dim() > 0 or group.get("fused") or group.get("capturable")
    return value.to(p.device, copy=True) if with_parameter else value.clone()
