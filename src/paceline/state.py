"""Training state: what must be in a checkpoint, and nothing else.

Invariant: a run that is stopped, saved, loaded and continued computes what the run without a stop does.
If it is not here, it is not state: the order of samples, dropout and the learning rate are functions of
`step` and `updates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError, TaskError


@dataclass(frozen=True)
class Slot:
    """One trained tensor by its logical name: the key of reduction, comparison and checkpoint.

    Args:
        name: the parameter's first name in the model; tied weights are one slot.
        shape: of the whole tensor.
        part: what this rank holds of it: (start, stop) for each dimension.
        axes: mesh axes that split it; empty if every rank of a replica holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[tuple[int, int], ...]
    axes: frozenset[str] = frozenset()

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Slot:
        """A slot that this rank holds in full."""
        return cls(name, tuple(tensor.shape), tuple((0, n) for n in tensor.shape))


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
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scale: LossScale = field(default_factory=LossScale)
    step: int = 0
    updates: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by logical name: `model/NAME`, `optimizer/NAME/KEY`. Not copied."""
        found = {f"model/{name}": value for name, value in self._model_tensors().items()}
        for name, p in self._optimized():
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    found[f"optimizer/{name}/{key}"] = value
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
            "group_steps": [group.get("step") for group in self.optimizer.param_groups],
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
        for group, step in zip(self.optimizer.param_groups, scalars["group_steps"], strict=True):
            if step is not None:
                group["step"] = step
            for p in group["params"]:
                if p in moments:
                    self.optimizer.state[p] = {k: _placed(v, p, group) for k, v in moments[p].items()}
        self.step, self.updates = int(scalars["step"]), int(scalars["updates"])
        self.scale.value = float(scalars["scale"]["value"])
        self.scale.clean_steps = int(scalars["scale"]["clean_steps"])

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
        parameters = dict(self._optimized())
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for full, value in values.items():
            name, _, key = full.removeprefix("optimizer/").rpartition("/")
            p = parameters.get(name)
            if p is None or not _suits(value, p):
                wrong.append(full)
            else:
                found.setdefault(p, {})[key] = value
        return found

    def _model_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers; tied tensors once, by their first name."""
        first: dict[tuple[int, torch.Size], str] = {}
        found = {}
        for name, value in self.model.state_dict().items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"the model's '{name}' is {type(value).__name__}, and only tensors can be saved",
                    next_step="return a tensor from get_extra_state, or register a buffer instead",
                )
            if not value.numel() or first.setdefault((value.data_ptr(), value.shape), name) == name:
                found[name] = value
        return found

    def _optimized(self) -> list[tuple[str, nn.Parameter]]:
        names = {p: name for name, p in self.model.named_parameters()}
        return [(names[p], p) for group in self.optimizer.param_groups for p in group["params"]]


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


def trained_parameters(model: nn.Module) -> dict[Slot, nn.Parameter]:
    """The parameters that take gradients, by slot, in the model's order; tied weights once.

    Raises:
        TaskError: there are none.
    """
    found = {Slot.whole(name, p): p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise TaskError(
            "the model has no parameter that takes a gradient",
            next_step="unfreeze what should be trained: parameter.requires_grad_(True)",
        )
    return found
