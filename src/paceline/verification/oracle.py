"""The oracle: what one process computes, in plain PyTorch. No hooks, no buckets, no wrappers.

The sharded oracle runs the virtual shards of a step one after another; with one shard it is the
full-batch oracle. It shares with the distributed step only the definition of the order of samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from paceline.comm.reduction.norm import row_squares
from paceline.data import LockstepWork, Order, Unit, to_device
from paceline.models.dropout import name_dropouts, set_unit_key
from paceline.optim import Schedule
from paceline.task import Loss, Task
from paceline.verification.halves import halves

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Shard:
    """One shard's forward and backward: sums, gradients of the sum, and the buffers it left."""

    unit: Unit
    total: float
    count: float
    gradients: Tensors
    buffers: Tensors


class Oracle:
    """A model and its optimizer, trained by one process.

    Args:
        task: model, data and loss, in no other hands.
        order: of the samples.
        shards: virtual shards a step; 1: the whole batch in one forward.
        seed: of the run.
        optimizer: over the task's model.
        schedule: of the learning rate, by update.
        clip_norm, reduction: as in the recipe.
        autocast: makes the context of a forward.
        ordered: add shards in the tree of a reproducible run, and take its norm and its one multiplier.
    """

    def __init__(
        self,
        task: Task,
        order: Order,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        shards: int,
        seed: int,
        clip_norm: float | None = None,
        reduction: str = "mean",
        autocast: Any = None,
        ordered: bool = False,
    ) -> None:
        self.task, self.model, self.optimizer, self.schedule = task, task.model, optimizer, schedule
        self.work = LockstepWork(order, shards, seed)
        self.clip_norm, self.reduction = clip_norm, reduction
        self.ordered = ordered
        self._autocast = autocast or (lambda: torch.autocast("cpu", enabled=False))
        self._device = next(self.model.parameters()).device
        name_dropouts(self.model)

    def step(self, step: int, update: int) -> float:
        """One whole step; returns the mean loss."""
        before = self.buffers()
        sums = self.accumulate(self.work.units(step))
        self.set_buffers(moved(before, sums.buffers))
        self.apply(sums.gradients, sums.count, update)
        return sums.total / sums.count

    def shards(self, units: tuple[Unit, ...], scale: float = 1.0) -> Iterator[Shard]:
        """Forward and backward of each shard, all from the same parameters and buffers.

        Args:
            units: the shards, in order.
            scale: of the loss in backward (fp16); gradients are returned without it.
        """
        before = self.buffers()
        for unit in units:
            self.set_buffers(before)
            self.model.train()
            self.model.zero_grad()
            seed_all(self.model, unit.key)
            with self._autocast():
                loss: Loss = self.task.loss(self.model, self.load(unit))
            (loss.total * scale).backward()
            gradients = {n: p.grad / scale for n, p in self.model.named_parameters() if p.grad is not None}
            yield Shard(unit, float(loss.total.detach()), float(loss.count), gradients, self.buffers())
        self.set_buffers(before)

    def accumulate(self, units: tuple[Unit, ...], scale: float = 1.0) -> Totals:
        """What these shards add up to."""
        before = self.buffers()
        shards = list(self.shards(units, scale)) if self.ordered else self.shards(units, scale)
        sums = accumulate(shards, before)
        if self.ordered:
            sums.gradients = {n: halves(_by_shard(shards, n)) for n in sums.gradients}
        return sums

    def apply(self, sums: Tensors, count: float, update: int) -> float:
        """Divide, clip, update; returns the global norm before the clip."""
        divisor = count if self.reduction == "mean" else 1.0
        if self.ordered:
            return self._apply_in_order(sums, divisor, update)
        for name, p in self.model.named_parameters():
            p.grad = lying_as(p, sums[name] / divisor) if name in sums else None
        largest = float("inf") if self.clip_norm is None else self.clip_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        self.schedule.apply(self.optimizer, update)
        self.optimizer.step()
        return float(norm)

    def _apply_in_order(self, sums: Tensors, divisor: float, update: int) -> float:
        squares = [row_squares(sums.get(n, torch.zeros_like(p))) for n, p in self._trained()]
        norm = float(torch.cat(squares).sum().sqrt()) / divisor
        largest = float("inf") if self.clip_norm is None else self.clip_norm
        multiplier = (largest / norm if norm > largest else 1.0) / divisor
        for name, p in self._trained():
            p.grad = lying_as(p, sums[name] * multiplier) if name in sums else None
        self.schedule.apply(self.optimizer, update)
        self.optimizer.step()
        return norm

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def load(self, unit: Unit) -> Any:
        """The batch of one unit, sample by sample."""
        collate = self.task.collate or default_collate
        return to_device(collate([self.task.data[int(i)] for i in unit.indices]), self._device)

    def buffers(self) -> Tensors:
        """Copies of the persistent buffers."""
        state = self.model.state_dict()
        return {n: b.detach().clone() for n, b in self.model.named_buffers() if n in state}

    def set_buffers(self, values: Tensors) -> None:
        """Write the persistent buffers."""
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                if name in values:
                    b.copy_(values[name])


def lying_as(p: Tensor, values: Tensor) -> Tensor:
    """The values in memory in the order of the parameter's: fused kernels walk both side by side."""
    return torch.empty_like(p, dtype=values.dtype).copy_(values).detach()


def seed_all(model: nn.Module, key: int) -> None:
    """Every random number of a unit follows from its key."""
    torch.manual_seed(key)
    set_unit_key(model, key)


@dataclass
class Totals:
    """What the shards of one step add up to, in their order.

    Args:
        total, count: of the loss.
        gradients: sums, by parameter name; a parameter that no shard used is absent.
        magnitudes: sums of absolute values: what rounding errors of any order of summation are relative to.
        buffers: mean change over the shards, float64.
        num_shards: how many there were.
    """

    total: float
    count: float
    gradients: Tensors
    magnitudes: Tensors
    buffers: Tensors
    num_shards: int


def _by_shard(shards: Iterable[Shard], name: str) -> dict[int, Tensor]:
    return {s.unit.shard: s.gradients[name] for s in shards if name in s.gradients}


def accumulate(shards: Iterable[Shard], before: Tensors) -> Totals:
    """Add up shards as they come; `before` holds the buffers they all started from."""
    sums = Totals(
        0.0, 0.0, {}, {}, {n: torch.zeros_like(b, dtype=torch.float64) for n, b in before.items()}, 0
    )
    for shard in shards:
        sums.total += shard.total
        sums.count += shard.count
        sums.num_shards += 1
        for name, g in shard.gradients.items():
            sums.gradients[name] = sums.gradients[name] + g if name in sums.gradients else g
            sums.magnitudes[name] = sums.magnitudes[name] + g.abs() if name in sums.magnitudes else g.abs()
        for name, base in before.items():
            after = shard.buffers[name]
            changed = after.to(torch.float64) - base.to(torch.float64)
            sums.buffers[name] += torch.where(after == base, 0.0, changed)
    for change in sums.buffers.values():
        change /= max(1, sums.num_shards)
    return sums


def moved(before: Tensors, change: Tensors) -> Tensors:
    """Buffers after a step: what no shard changed keeps its bits, counters are rounded."""
    after = {}
    for name, base in before.items():
        value = base.to(torch.float64) + change[name]
        value = value if base.dtype.is_floating_point else value.round()
        after[name] = torch.where(change[name] == 0, base, value.to(base.dtype))
    return after
