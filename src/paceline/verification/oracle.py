"""The oracle: what one process computes, in plain PyTorch. No hooks, no buckets, no wrappers.

The sharded oracle runs the virtual shards of a step one after another; with one shard it is the
full-batch oracle. What it judges it has written apart: dealing and reading of shards, seeds
(`plain_micro_batches`), the learning rate (`plain_schedule`), the norm (`plain_norm`), the optimizer
(`plain_optimizer`) and the tree of additions (`halves`). It shares with the session what defines the run: the
order of samples, the key function and its words, the initial weights, the loss scale of fp16, and the user's
model, loss and own optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data import Batches, MicroBatch, to_device
from paceline.task import Loss, Task
from paceline.verification.halves import halves
from paceline.verification.plain_buffers import Tensors, buffers_of, moved
from paceline.verification.plain_micro_batches import PlainMicroBatches, read, seed_all
from paceline.verification.plain_norm import norm_by_rows, plain_norm, reals
from paceline.verification.plain_schedule import PlainSchedule
from paceline.verification.tied import apart, magnitudes


@dataclass(frozen=True)
class Shard:
    """One shard's forward and backward: sums, gradients of the sum, and the buffers it left.

    Of a tied parameter `uses` has the sum of the magnitudes of the gradients of its uses, which may cancel.
    """

    micro_batch: MicroBatch
    total: float
    count: float
    gradients: Tensors
    buffers: Tensors
    uses: Tensors


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

    Attributes:
        options: of every group of the optimizer, in an update of a number; another's schedule may take over.
    """

    def __init__(
        self,
        task: Task,
        order: Batches,
        optimizer: torch.optim.Optimizer,
        schedule: PlainSchedule,
        *,
        shards: int,
        seed: int,
        clip_norm: float | None = None,
        reduction: str = "mean",
        autocast: Any = None,
        ordered: bool = False,
    ) -> None:
        self.task, self.model, self.optimizer, self._schedule = task, task.model, optimizer, schedule
        self._base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.options = self._scheduled
        self.work = PlainMicroBatches(order, shards, seed)
        self.clip_norm, self.reduction = clip_norm, reduction
        self.ordered = ordered
        self.autocast = autocast or (lambda: torch.autocast("cpu", enabled=False))
        self._device = next(self.model.parameters()).device

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    def step(self, step: int, update: int) -> float:
        """One whole step; returns the mean loss."""
        before = self.buffers()
        sums = self.accumulate(self.work.micro_batches(step))
        self.set_buffers(moved(before, sums.buffers))
        self.apply(sums.gradients, sums.count, update)
        return sums.total / sums.count

    def shards(self, micro_batches: tuple[MicroBatch, ...], scale: float = 1.0) -> Iterator[Shard]:
        """Forward and backward of each shard, all from the same parameters and buffers.

        Args:
            micro_batches: the shards, in order.
            scale: of the loss in backward (fp16); gradients are returned without it.
        """
        before = self.buffers()
        for micro_batch in micro_batches:
            with apart(self.model) as uses:
                if uses:
                    self._forward_backward(micro_batch, before, scale)
            sizes = magnitudes(uses, scale)
            loss = self._forward_backward(micro_batch, before, scale)
            gradients = {n: p.grad / scale for n, p in self.model.named_parameters() if p.grad is not None}
            yield Shard(
                micro_batch, float(loss.total.detach()), float(loss.count), gradients, self.buffers(), sizes
            )
        self.set_buffers(before)

    def _forward_backward(self, micro_batch: MicroBatch, before: Tensors, scale: float) -> Loss:
        self.set_buffers(before)
        self.model.train()
        self.model.zero_grad()
        batch = self.load(micro_batch)
        seed_all(self.model, micro_batch.key)
        with self.autocast():
            loss: Loss = self.task.loss(self.model, batch)
        (loss.total * scale).backward()
        return loss

    def accumulate(self, micro_batches: tuple[MicroBatch, ...], scale: float = 1.0) -> Totals:
        """What these shards add up to."""
        before = self.buffers()
        shards = (
            list(self.shards(micro_batches, scale)) if self.ordered else self.shards(micro_batches, scale)
        )
        sums = accumulate(shards, before, self.task.buffers)
        if self.ordered:
            sums.gradients = {n: halves(_by_shard(shards, n)) for n in sums.gradients}
        return sums

    def apply(self, sums: Tensors, count: float, update: int) -> float:
        """Divide, clip, update; returns the global norm before the clip."""
        norm = self.set_gradients(sums, count)
        self.update(update)
        return norm

    def set_gradients(self, sums: Tensors, count: float) -> float:
        """Divide and clip; returns the global norm before the clip."""
        divisor = count if self.reduction == "mean" else 1.0
        if self.ordered:
            norm = norm_by_rows(sums.get(n, torch.zeros_like(p)) for n, p in self._trained()) / divisor
        else:
            norm = plain_norm(sums.values()) / divisor
        shorter = self.clip_norm / norm if self.clip_norm is not None and norm > self.clip_norm else 1.0
        for name, p in self._trained():
            p.grad = lying_as(p, sums[name] * (shorter / divisor)) if name in sums else None
        return norm

    def update(self, update: int) -> None:
        """One step of the optimizer, with the rate of this update."""
        for group, options in zip(self.optimizer.param_groups, self.options(update), strict=True):
            group.update(options)
        self.optimizer.step()

    def _scheduled(self, update: int) -> Sequence[Mapping[str, Any]]:
        """What the recipe's schedule says of each group."""
        factor = self._schedule.factor(update)
        return [{"lr": rate * factor} for rate in self._base_rates]

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def load(self, micro_batch: MicroBatch) -> Any:
        """The batch of one micro-batch, sample by sample."""
        return to_device(read(self.task, micro_batch), self._device)

    def buffers(self) -> Tensors:
        """Copies of the persistent buffers."""
        return buffers_of(self.model)

    def set_buffers(self, values: Tensors) -> None:
        """Write the persistent buffers."""
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                if name in values:
                    b.copy_(values[name])


def lying_as(p: Tensor, values: Tensor) -> Tensor:
    """The values in memory in the order of the parameter's: fused kernels walk both side by side."""
    return torch.empty_like(p, dtype=values.dtype).copy_(values).detach()


@dataclass
class Totals:
    """What the shards of one step add up to, in their order.

    Args:
        total, count: of the loss.
        gradients: sums, by parameter name; a parameter that no shard used is absent.
        magnitudes: sums of absolute values: what rounding errors of any order of summation are relative to.
        buffers: change of a step: the mean over the shards, or what the task says, float64.
        num_shards: how many there were.
    """

    total: float
    count: float
    gradients: Tensors
    magnitudes: Tensors
    buffers: Tensors
    num_shards: int


def _by_shard(shards: Iterable[Shard], name: str) -> dict[int, Tensor]:
    return {s.micro_batch.shard: s.gradients[name] for s in shards if name in s.gradients}


def accumulate(shards: Iterable[Shard], before: Tensors, hows: Mapping[str, str]) -> Totals:
    """Add up shards as they come; buffers started `before`, and `hows` is `Task.buffers`."""
    how = {b: next((h for p, h in hows.items() if fnmatchcase(b, p)), "mean") for b in before}
    still = {n: torch.zeros_like(reals(b), dtype=torch.float64) for n, b in before.items()}
    sums = Totals(0.0, 0.0, {}, {}, still, 0)
    for shard in shards:
        sums.total += shard.total
        sums.count += shard.count
        sums.num_shards += 1
        for name, g in shard.gradients.items():
            sums.gradients[name] = sums.gradients[name] + g if name in sums.gradients else g
            size = shard.uses[name] if name in shard.uses else g.abs().to(torch.float64)
            sums.magnitudes[name] = sums.magnitudes[name] + size if name in sums.magnitudes else size
        for name, base in before.items():
            if how[name] == "first" and shard.micro_batch.shard != 0:
                continue
            a, b = reals(shard.buffers[name]), reals(base)
            sums.buffers[name] += torch.where(a == b, 0.0, a.to(torch.float64) - b.to(torch.float64))
    for name, change in sums.buffers.items():
        change /= max(1, sums.num_shards) if how[name] == "mean" else 1
    return sums
