"""The norm of a whole gradient, written apart from `paceline.comm.reduction.gradient_norm`.

Persistent buffers of a model, and how a step moves them, written apart from `paceline.parallel.model_buffers`.

The tree of additions of a reproducible run, implemented independently of `comm.reduction.tree`.

The gradients of each use of a tied parameter, which may cancel in their sum.

Two sides that add up uses and shards in other orders differ by rounding errors of the terms, not of the
sum.
Not seen apart: uses of one module in several places of a forward.

The virtual shards of a step, how they are read and what is random in them, written apart from
`paceline.data` and `paceline.parallel.rng_state`.

Shared with the session, since two sides that choose them apart could not agree: the order of samples
(`Order`), the key function (`paceline.state.keys.key`) and the words that it is called with, which are written out
again here: "unit" for a shard, "loader" for reading one, and "dropout" with the module's name, which
`KeyedDropout` itself adds, being a part of the user's model.

The oracle: what one process computes, in plain PyTorch. No hooks, no buckets, no wrappers.

The sharded oracle runs the virtual shards of a step one after another; with one shard it is the
full-batch oracle. What it judges it has written apart: dealing and reading of shards, seeds
(`plain_micro_batches`), the learning rate (`plain_schedule`), the norm (`plain_norm`), the optimizer
(`plain_optimizer`) and the tree of additions (`tree_sum`). It shares with the session what defines the run: the
order of samples, the key function and its words, the initial weights, the loss scale of fp16, and the user's
model, loss and own optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from paceline.data.loader import to_device
from paceline.data.sample_order import BatchOrder
from paceline.data.work import MicroBatch
from paceline.models.dropout import KeyedDropout
from paceline.state.keys import key
from paceline.task import Loss, Task
from paceline.verification.plain_optimizer import PlainSchedule


def plain_norm(gradients: Iterable[Tensor]) -> float:
    """The Euclidean norm over all tensors together, summed in float64."""
    return sqrt(sum(float(as_reals(g).to(torch.float64).square().sum()) for g in gradients))


def ordered_norm(tensors: Iterable[Tensor]) -> float:
    """The norm of a reproducible run as it is defined: row after row, in the order of the model.

    Args:
        tensors: of every trained parameter; zeros where it has no gradient, which keeps its rows in the sum.
    Exactness: a row is what the first dimension counts. PyTorch's norm of the row alone, squared; then one
        sum over all of them. Everything in float64, so bits depend on PyTorch's kernels alone.
    """
    squares = []
    for tensor in tensors:
        t = as_reals(tensor)
        for row in t.unbind(0) if t.dim() else [t]:
            norm = torch.linalg.vector_norm(row.reshape(1, -1), dim=1, dtype=torch.float64)
            squares.append(norm.square())
    return float(torch.cat(squares).sum().sqrt()) if squares else 0.0


def as_reals(t: Tensor) -> Tensor:
    """Complex values as pairs of real ones."""
    t = t.detach()
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


Tensors = dict[str, Tensor]


def buffers_of(model: nn.Module) -> Tensors:
    """Copies of a model's persistent buffers."""
    state = model.state_dict()
    return {n: b.detach().clone() for n, b in model.named_buffers() if n in state}


def moved(before: Tensors, change: Tensors) -> Tensors:
    """Buffers after a step: what no shard changed keeps its bits, counters are rounded."""
    return {name: _buffer_after_step(base, change[name]) for name, base in before.items()}


def _buffer_after_step(base: Tensor, change: Tensor) -> Tensor:
    start = as_reals(base)
    value = start.to(torch.float64) + change
    value = value if start.dtype.is_floating_point else value.round()
    after = torch.where(change == 0, start, value.to(start.dtype))
    return torch.view_as_complex(after) if base.is_complex() else after


def tree_sum(leaves: Mapping[int, Tensor]) -> Tensor:
    """The sum over shards: of the sums of both halves of the shards, and so on; -0.0 becomes 0.0.

    Args:
        leaves: by shard; a shard that is not there counts as nothing.
    """
    found = _subtree_sum(leaves, 0, 1 << max(leaves).bit_length())
    assert found is not None
    return found + 0.0


def _subtree_sum(leaves: Mapping[int, Tensor], first: int, width: int) -> Tensor | None:
    if width == 1:
        return leaves.get(first)
    left = _subtree_sum(leaves, first, width // 2)
    right = _subtree_sum(leaves, first + width // 2, width // 2)
    if left is None or right is None:
        return right if left is None else left
    return left + right


ParameterUses = Mapping[str, Sequence[nn.Parameter]]


@contextmanager
def untied_parameters(model: nn.Module) -> Iterator[ParameterUses]:
    """In the block every place of a tied parameter has one of its own, of the same memory; by name."""
    tied = _tied_parameters(model)
    uses: dict[str, list[nn.Parameter]] = {}
    for name, p, places in tied:
        uses[name] = [nn.Parameter(p.detach()) for _ in places]
        for (table, attribute), own in zip(places, uses[name], strict=True):
            table[attribute] = own
    try:
        yield uses
    finally:
        for _, p, places in tied:
            for table, attribute in places:
                table[attribute] = p


def has_tied_parameters(model: nn.Module) -> bool:
    """Whether a trained parameter is in several modules."""
    return bool(_tied_parameters(model))


_ParameterPlace = tuple[dict[str, nn.Parameter | None], str]


def _tied_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter, list[_ParameterPlace]]]:
    """Trained parameters that are in several modules, and where."""
    places: dict[int, list[_ParameterPlace]] = {}
    for module in model.modules():
        for attribute, p in module._parameters.items():
            places.setdefault(id(p), []).append((module._parameters, attribute))
    named = [(name, p, places[id(p)]) for name, p in model.named_parameters() if p.requires_grad]
    return [found for found in named if len(found[2]) > 1]


def magnitudes(uses: ParameterUses, scale: float) -> dict[str, Tensor]:
    """Sums of |gradient| over the uses, float64, without the scale of the loss."""
    found = {}
    for name, own in uses.items():
        grads = [p.grad.abs().to(torch.float64) / scale for p in own if p.grad is not None]
        if grads:
            found[name] = torch.stack(grads).sum(0)
    return found


class PlainMicroBatches:
    """All shards of a step.

    Args:
        order: of the samples.
        shards: into how many a batch is cut, evenly; those that get no sample are left out.
        seed: of the run.
    """

    def __init__(self, order: BatchOrder, shards: int, seed: int) -> None:
        self.order, self.num_shards, self.seed = order, shards, seed

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        """The shards of a step, in their order."""
        size = self.order.batch_size(step)
        whole = self.order.batch(step, range(size))
        ends = [size * number // self.num_shards for number in range(self.num_shards + 1)]
        return tuple(
            MicroBatch(step, shard, whole[ends[shard] : ends[shard + 1]], key(self.seed, "unit", step, shard))
            for shard in range(self.num_shards)
            if ends[shard] < ends[shard + 1]
        )


def read_micro_batch(task: Task, micro_batch: MicroBatch) -> Any:
    """Its samples, collated; what the data or the collate function draw follows from its key."""
    with generators_seeded(key(micro_batch.key, "loader")):
        return collate(task, read_samples(task, [int(i) for i in micro_batch.indices]))


def read_samples(task: Task, indices: list[int]) -> list[Any]:
    """Some samples, all at once where the data can."""
    fetch_many = getattr(task.data, "__getitems__", None)
    return list(fetch_many(indices) if callable(fetch_many) else [task.data[i] for i in indices])


def collate(task: Task, samples: list[Any]) -> Any:
    """Samples as a batch."""
    return (task.collate or default_collate)(samples)


@contextmanager
def generators_seeded(seed: int) -> Iterator[None]:
    """Seed `random`, `numpy.random` and torch in the block, and put their states back."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def seed_all(model: nn.Module, micro_batch_key: int) -> None:
    """Every random number of a micro-batch's forward and backward follows from its key.

    Python's and NumPy's generators too, which the session seeds in a reproducible run only: elsewhere a model
    that draws from them has no one right answer.
    """
    torch.manual_seed(micro_batch_key)
    random.seed(micro_batch_key)
    np.random.seed(micro_batch_key % 2**32)
    for name, module in model.named_modules():
        if isinstance(module, KeyedDropout):
            module.name, module.micro_batch_key = name or "dropout", micro_batch_key


@dataclass(frozen=True)
class ShardResult:
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
        order: BatchOrder,
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

    def shards(self, micro_batches: tuple[MicroBatch, ...], scale: float = 1.0) -> Iterator[ShardResult]:
        """Forward and backward of each shard, all from the same parameters and buffers.

        Args:
            micro_batches: the shards, in order.
            scale: of the loss in backward (fp16); gradients are returned without it.
        """
        before = self.buffers()
        for micro_batch in micro_batches:
            with untied_parameters(self.model) as uses:
                if uses:
                    self._forward_backward(micro_batch, before, scale)
            sizes = magnitudes(uses, scale)
            loss = self._forward_backward(micro_batch, before, scale)
            gradients = {n: p.grad / scale for n, p in self.model.named_parameters() if p.grad is not None}
            yield ShardResult(
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

    def accumulate(self, micro_batches: tuple[MicroBatch, ...], scale: float = 1.0) -> StepTotals:
        """What these shards add up to."""
        before = self.buffers()
        shards = (
            list(self.shards(micro_batches, scale)) if self.ordered else self.shards(micro_batches, scale)
        )
        sums = accumulate_shards(shards, before, self.task.buffers)
        if self.ordered:
            sums.gradients = {n: tree_sum(_by_shard(shards, n)) for n in sums.gradients}
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
            norm = ordered_norm(sums.get(n, torch.zeros_like(p)) for n, p in self._trained()) / divisor
        else:
            norm = plain_norm(sums.values()) / divisor
        shorter = self.clip_norm / norm if self.clip_norm is not None and norm > self.clip_norm else 1.0
        for name, p in self._trained():
            p.grad = in_memory_order_of(p, sums[name] * (shorter / divisor)) if name in sums else None
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
        return to_device(read_micro_batch(self.task, micro_batch), self._device)

    def buffers(self) -> Tensors:
        """Copies of the persistent buffers."""
        return buffers_of(self.model)

    def set_buffers(self, values: Tensors) -> None:
        """Write the persistent buffers."""
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                if name in values:
                    b.copy_(values[name])


def in_memory_order_of(p: Tensor, values: Tensor) -> Tensor:
    """The values in memory in the order of the parameter's: fused kernels walk both side by side."""
    return torch.empty_like(p, dtype=values.dtype).copy_(values).detach()


@dataclass
class StepTotals:
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


def _by_shard(shards: Iterable[ShardResult], name: str) -> dict[int, Tensor]:
    return {s.micro_batch.shard: s.gradients[name] for s in shards if name in s.gradients}


def accumulate_shards(
    shards: Iterable[ShardResult], before: Tensors, buffer_reductions: Mapping[str, str]
) -> StepTotals:
    """Add up shards as they come; buffers started `before`, and `buffer_reductions` is `Task.buffers`."""
    how = {b: next((h for p, h in buffer_reductions.items() if fnmatchcase(b, p)), "mean") for b in before}
    still = {n: torch.zeros_like(as_reals(b), dtype=torch.float64) for n, b in before.items()}
    sums = StepTotals(0.0, 0.0, {}, {}, still, 0)
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
            a, b = as_reals(shard.buffers[name]), as_reals(base)
            sums.buffers[name] += torch.where(a == b, 0.0, a.to(torch.float64) - b.to(torch.float64))
    for name, change in sums.buffers.items():
        change /= max(1, sums.num_shards) if how[name] == "mean" else 1
    return sums
