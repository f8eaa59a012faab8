"""The oracle: what one process computes in a step, in plain PyTorch, without hooks, buckets or wrappers.

It runs the virtual shards of a step one after another; with one shard it runs the whole batch in one forward.

Everything that a verification judges is implemented here a second time, independently of the session:
division and reading of a batch (`paceline.data`), random seeds (`parallel.rng_state`), buffers
(`parallel.model_buffers`), the norm (`comm.reduction.gradient_norm`), the tree of additions of a reproducible
run (`comm.reduction.summation_tree`), and in `plain_optimizer` the learning rate and the optimizer. A test
forbids imports of those modules.

Shared with the session is only what defines the run: the order of samples (`BatchOrder`), the key function
and its words, the initial weights, the loss scale of fp16, the user's model, loss and optimizer, and what
`paceline.gather` returns in the loss, which is the whole batch in the oracle. Two sides that chose those
independently could not agree.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
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
from paceline.parallel.batch_gather import WholeBatch, gather_scope
from paceline.state.keys import key
from paceline.task import BufferRule, Loss, Task, moving_average_decay
from paceline.verification.plain_optimizer import PlainMasks, PlainSchedule


def plain_norm(gradients: Iterable[Tensor]) -> float:
    """Return the joint Euclidean norm of all tensors, summed in float64."""
    return sqrt(sum(float(as_reals(g).to(torch.float64).square().sum()) for g in gradients))


def ordered_norm(tensors: Iterable[Tensor]) -> float:
    """Return the norm of a reproducible run, which is defined row by row in the order of the model.

    Args:
        tensors: gradients of all trained parameters; zeros where there is none, so its rows stay in the sum.
    Exactness: rows are counted by the first dimension. Each is squared from PyTorch's norm of the row alone,
        and all squares are added in one sum, in float64, so the bits depend only on PyTorch's kernels.
    """
    squares = []
    for tensor in tensors:
        t = as_reals(tensor)
        for row in t.unbind(0) if t.dim() else [t]:
            norm = torch.linalg.vector_norm(row.reshape(1, -1), dim=1, dtype=torch.float64)
            squares.append(norm.square())
    return float(torch.cat(squares).sum().sqrt()) if squares else 0.0


def as_reals(t: Tensor) -> Tensor:
    """Return complex values as pairs of real ones, and real values as they are."""
    t = t.detach()
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


Tensors = dict[str, Tensor]


def buffers_of(model: nn.Module) -> Tensors:
    """Return copies of the persistent buffers of a model, by name."""
    state = model.state_dict()
    return {n: b.detach().clone() for n, b in model.named_buffers() if n in state}


def buffers_after_step(before: Tensors, change: Tensors) -> Tensors:
    """Add the change of a step to buffers: unchanged values keep their bits, integers are rounded."""
    return {name: _add_change(base, change[name]) for name, base in before.items()}


def _add_change(base: Tensor, change: Tensor) -> Tensor:
    start = as_reals(base)
    value = start.to(torch.float64) + change
    value = value if start.dtype.is_floating_point else value.round()
    after = torch.where(change == 0, start, value.to(start.dtype))
    return torch.view_as_complex(after) if base.is_complex() else after


def tree_sum(leaves: Mapping[int, Tensor]) -> Tensor:
    """Sum over shards in the tree of a reproducible run: each node is the sum of its two halves.

    Args:
        leaves: one tensor per shard number; missing shards add nothing.
    """
    total = _subtree_sum(leaves, 0, 1 << max(leaves).bit_length())
    assert total is not None
    # Turns -0.0 into 0.0, as a run does, so that both sides have the same bits.
    return total + 0.0


def _subtree_sum(leaves: Mapping[int, Tensor], first: int, width: int) -> Tensor | None:
    if width == 1:
        return leaves.get(first)
    # Fixed halves, not a running sum: the bits must not depend on how shards are spread over ranks.
    left = _subtree_sum(leaves, first, width // 2)
    right = _subtree_sum(leaves, first + width // 2, width // 2)
    if left is None or right is None:
        return right if left is None else left
    return left + right


ParameterUses = Mapping[str, Sequence[nn.Parameter]]


@contextmanager
def untied_parameters(model: nn.Module) -> Iterator[ParameterUses]:
    """Give every use of a tied parameter a parameter of its own in the same memory; yields them by name.

    Gradients of the uses can cancel in their sum, so the bound of the sum needs their magnitudes: two sides
    that add uses and shards in different orders differ by rounding errors of the terms. Several calls of one
    module in a forward are not told apart.
    """
    tied = _tied_parameters(model)
    uses: dict[str, list[nn.Parameter]] = {}
    for name, p, places in tied:
        uses[name] = [nn.Parameter(p.detach()) for _ in places]
        for (table, attribute), untied in zip(places, uses[name], strict=True):
            table[attribute] = untied
    try:
        yield uses
    finally:
        for _, p, places in tied:
            for table, attribute in places:
                table[attribute] = p


def has_tied_parameters(model: nn.Module) -> bool:
    """Return whether several modules share a trained parameter."""
    return bool(_tied_parameters(model))


_ParameterPlace = tuple[dict[str, nn.Parameter | None], str]


def _tied_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter, list[_ParameterPlace]]]:
    """Return the trained parameters that several modules share, with their places in these modules."""
    places: dict[int, list[_ParameterPlace]] = {}
    for module in model.modules():
        for attribute, p in module._parameters.items():
            places.setdefault(id(p), []).append((module._parameters, attribute))
    named = [(name, p, places[id(p)]) for name, p in model.named_parameters() if p.requires_grad]
    return [entry for entry in named if len(entry[2]) > 1]


def gradient_magnitudes(uses: ParameterUses, scale: float) -> dict[str, Tensor]:
    """Return the sums of |gradient| over all uses, float64, divided by the scale of the loss."""
    sums = {}
    for name, parameters in uses.items():
        grads = [p.grad.abs().to(torch.float64) / scale for p in parameters if p.grad is not None]
        if grads:
            sums[name] = torch.stack(grads).sum(0)
    return sums


class PlainMicroBatches:
    """The virtual shards of a step, as contiguous and nearly equal parts of its batch.

    Args:
        order: order of the samples.
        shards: number of shards of a batch; those without a sample are left out.
        seed: seed of the run.
    """

    def __init__(self, order: BatchOrder, shards: int, seed: int) -> None:
        self.order, self.num_shards, self.seed = order, shards, seed

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        """Return the shards of a step in ascending order."""
        size = self.order.batch_size(step)
        whole = self.order.batch(step, range(size))
        ends = [size * number // self.num_shards for number in range(self.num_shards + 1)]
        return tuple(
            MicroBatch(
                step,
                shard,
                whole[ends[shard] : ends[shard + 1]],
                key(self.seed, "unit", step, shard),
                seed=self.seed,
            )
            for shard in range(self.num_shards)
            if ends[shard] < ends[shard + 1]
        )


def read_micro_batch(task: Task, micro_batch: MicroBatch) -> Any:
    """Read and collate the samples of a micro-batch.

    Random numbers that are drawn for a sample follow from its key in the step; those of the collate function
    from the key of the micro-batch.
    """
    samples: list[Any] = []
    for index in map(int, micro_batch.indices):
        with generators_seeded(key(micro_batch.seed, "sample", micro_batch.step, index)):
            samples += read_samples(task, [index])
    with generators_seeded(key(micro_batch.key, "loader")):
        return collate(task, samples)


def read_samples(task: Task, indices: list[int]) -> list[Any]:
    """Read samples, with one call of `__getitems__` if the data has it."""
    fetch_many = getattr(task.data, "__getitems__", None)
    return list(fetch_many(indices) if callable(fetch_many) else [task.data[i] for i in indices])


def collate(task: Task, samples: list[Any]) -> Any:
    """Collate samples to a batch, with the task's function or PyTorch's default."""
    return (task.collate or default_collate)(samples)


@contextmanager
def generators_seeded(seed: int) -> Iterator[None]:
    """Seed `random`, `numpy.random` and torch within the block, and restore their states after it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def loss_without_gradients(task: Task, model: nn.Module, batch: Any) -> Loss:
    """Return the loss of a batch without a graph, unless the loss takes gradients itself."""
    try:
        with torch.no_grad():
            return task.loss(model, batch)
    except RuntimeError as error:
        # A gradient penalty needs the graph of the model, in evaluation too.
        if "grad" not in str(error):
            raise
        with torch.enable_grad():
            return task.loss(model, batch)


def seed_all(model: nn.Module, micro_batch_key: int) -> None:
    """Seed all generators, and the dropouts of a model, from the key of a micro-batch.

    The session seeds the generators of Python and NumPy only in a reproducible run; in other runs a model
    that draws from them has no single right answer.
    """
    torch.manual_seed(micro_batch_key)
    random.seed(micro_batch_key)
    np.random.seed(micro_batch_key % 2**32)
    for name, module in model.named_modules():
        if isinstance(module, KeyedDropout):
            module.name, module.micro_batch_key = name or "dropout", micro_batch_key


@dataclass(frozen=True)
class ShardResult:
    """The result of a forward and backward of one shard.

    Args:
        micro_batch: the shard.
        total, count: sums of the loss.
        gradients: gradients of `total`, by name.
        buffers: persistent buffers after the forward.
        uses: sums of the gradient magnitudes over all uses of each tied parameter.
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
        task: model, data and loss, used by nothing else.
        order: order of the samples.
        optimizer: optimizer of the task's model.
        schedule: learning rate by update.
        shards: virtual shards of a step; 1: the whole batch in one forward.
        seed: seed of the run.
        clip_norm, clip_value, reduction: as in the recipe.
        autocast: makes the autocast context of a forward; None: full precision.
        ordered: use the tree of additions and the norm of a reproducible run.

    Attributes:
        options: returns the options of each optimizer group for an update; an own loop may replace it.
        masks: of magnitude pruning; None: there are none.
        at_once: a step is one forward of its whole batch, of which the ranks of a run compute parts.
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
        clip_value: float | None = None,
        reduction: str = "mean",
        autocast: Any = None,
        ordered: bool = False,
    ) -> None:
        self.task, self.model, self.optimizer, self._schedule = task, task.model, optimizer, schedule
        self._base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.options = self._scheduled
        self.work = PlainMicroBatches(order, shards, seed)
        self.clip_norm, self.clip_value, self.reduction = clip_norm, clip_value, reduction
        self._evaluated_values: list[float] = []
        self.ordered, self.at_once = ordered, False
        self.masks: PlainMasks | None = None
        self.autocast = autocast or (lambda: torch.autocast("cpu", enabled=False))
        self._device = next(self.model.parameters()).device
        # Modules that the task has put into evaluation mode, and not the model as a whole.
        self._evaluated = [n for n, m in self.model.named_modules() if self.model.training and not m.training]

    def enter_training(self, model: nn.Module) -> None:
        """Put a model into training mode, except for what the task has put into evaluation mode."""
        model.train()
        for name in self._evaluated:
            model.get_submodule(name).training = False

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self._device

    def run_at_once(self) -> None:
        """Run each step as one forward of its whole batch."""
        self.work, self.at_once = PlainMicroBatches(self.work.order, 1, self.work.seed), True

    def gathers(self) -> bool:
        """Return whether the loss calls `paceline.gather`, which returns its argument in one process."""
        with gather_scope(WholeBatch()) as calls:
            for _ in self.shards(self.work.micro_batches(0)[:1]):
                pass
        return calls.num_calls > 0

    def switch_mode(self, name: str, *, training: bool) -> None:
        """Put a module into training or evaluation mode from now on."""
        self._evaluated = [other for other in self._evaluated if other != name]
        if not training:
            self._evaluated.append(name)

    def step(self, step: int, update: int) -> float:
        """Run one whole step and return the mean loss."""
        before = self.buffers()
        sums = self.accumulate(self.work.micro_batches(step))
        self.end_buffers(before, sums.buffers)
        self.apply(sums.gradients, sums.count, update)
        return sums.total / sums.count

    def shards(self, micro_batches: tuple[MicroBatch, ...], scale: float = 1.0) -> Iterator[ShardResult]:
        """Run forward and backward of each shard, all from the same parameters and buffers.

        Args:
            micro_batches: the shards, in order.
            scale: factor of the loss in backward (fp16); gradients are returned without it.
        """
        before = self.buffers()
        for micro_batch in micro_batches:
            with untied_parameters(self.model) as uses:
                # A pass of its own, since it gives the gradients of the single uses and not their sum.
                if uses:
                    self._forward_backward(micro_batch, before, scale)
            sizes = gradient_magnitudes(uses, scale)
            loss = self._forward_backward(micro_batch, before, scale)
            gradients = {n: p.grad / scale for n, p in self.model.named_parameters() if p.grad is not None}
            yield ShardResult(
                micro_batch, float(loss.total.detach()), float(loss.count), gradients, self.buffers(), sizes
            )
        self.set_buffers(before)

    def _forward_backward(self, micro_batch: MicroBatch, before: Tensors, scale: float) -> Loss:
        self.model.zero_grad()
        loss = self._forward(micro_batch, before)
        (loss.total * scale).backward()
        return loss

    def _forward(self, micro_batch: MicroBatch, before: Tensors) -> Loss:
        self.set_buffers(before)
        self.enter_training(self.model)
        batch = self.load(micro_batch)
        seed_all(self.model, micro_batch.key)
        with self.autocast():
            loss: Loss = self.task.loss(self.model, batch)
        return loss

    def _losses(self, micro_batches: tuple[MicroBatch, ...]) -> Iterator[Loss]:
        """Yield the loss of each shard with its graph, at the present weights; buffers keep their values."""
        before = self.buffers()
        for micro_batch in micro_batches:
            yield self._forward(micro_batch, before)
        self.set_buffers(before)

    def accumulate(self, micro_batches: tuple[MicroBatch, ...], scale: float = 1.0) -> StepTotals:
        """Return the sums over shards; in an ordered run in its tree of additions."""
        before = self.buffers()
        # An optimizer that collects curvature gets what it needs from these passes only.
        if (begin_backward := getattr(self.optimizer, "begin_backward", None)) is not None:
            begin_backward(scale, partial(self._losses, micro_batches))
        shards = (
            list(self.shards(micro_batches, scale)) if self.ordered else self.shards(micro_batches, scale)
        )
        sums = accumulate_shards(shards, before, self.task.buffers)
        if self.ordered:
            sums.gradients = {n: tree_sum(_by_shard(shards, n)) for n in sums.gradients}
        if self.masks is not None:
            sums.gradients = {n: g.clone() for n, g in sums.gradients.items()}
            self.masks.clear(sums.gradients)
        return sums

    def apply(self, sums: Tensors, count: float, update: int) -> float:
        """Divide, clip and update; return the global norm before the clip."""
        norm = self.set_gradients(sums, count)
        self.update(update)
        return norm

    def set_gradients(self, sums: Tensors, count: float) -> float:
        """Divide and clip the sums, and set them as gradients; return the global norm before the clip."""
        divisor = count if self.reduction == "mean" else 1.0
        # One multiplier for division and clip, as in the session: two multiplications would round twice.
        if self.ordered:
            norm = ordered_norm(sums.get(n, torch.zeros_like(p)) for n, p in self._trained()) / divisor
        else:
            norm = plain_norm(sums.values()) / divisor
        shorter = self.clip_norm / norm if self.clip_norm is not None and norm > self.clip_norm else 1.0
        for name, p in self._trained():
            p.grad = in_memory_order_of(p, sums[name] * (shorter / divisor)) if name in sums else None
            if self.clip_value is not None and p.grad is not None:
                parts = torch.view_as_real(p.grad) if p.grad.is_complex() else p.grad
                torch.clamp(parts, -self.clip_value, self.clip_value, out=parts)
        return norm

    def update(self, update: int) -> None:
        """Take one step of the optimizer with the options of this update, and mask its result."""
        for group, options in zip(self.optimizer.param_groups, self.options(update), strict=True):
            group.update(options)
        self.optimizer.step()
        if self.masks is not None:
            self.masks.prune(self.model, update + 1)

    def _scheduled(self, update: int) -> Sequence[Mapping[str, Any]]:
        """Return the learning rate of each group in the schedule of the recipe."""
        factor = self._schedule.factor(update)
        multiplier = self._schedule.multiplier(self._evaluated_values)
        return [{"lr": rate * factor * multiplier} for rate in self._base_rates]

    def record_evaluation(self, value: float) -> None:
        """Record the value of an evaluation that the schedule follows."""
        self._evaluated_values.append(value)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def load(self, micro_batch: MicroBatch) -> Any:
        """Read the batch of a micro-batch, and move it to the device."""
        return to_device(read_micro_batch(self.task, micro_batch), self._device)

    def buffers(self) -> Tensors:
        """Return copies of the persistent buffers."""
        return buffers_of(self.model)

    def end_buffers(self, before: Tensors, change: Tensors) -> None:
        """Write the buffers after a step, and then those that are functions of others."""
        self.set_buffers(buffers_after_step(before, change))
        for name, moved in change.items():
            rule = rule_of_buffer(name, self.task.buffers)
            if callable(rule) and bool(moved.any()):
                module = self.model.get_submodule(name.rpartition(".")[0])
                self.set_buffers({name: rule(module)})

    def set_buffers(self, values: Tensors) -> None:
        """Write the persistent buffers."""
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                if name in values:
                    b.copy_(values[name])


def in_memory_order_of(p: Tensor, values: Tensor) -> Tensor:
    """Return the values with the memory layout of the parameter, which fused kernels need."""
    return torch.empty_like(p, dtype=values.dtype).copy_(values).detach()


@dataclass
class StepTotals:
    """The sums over the shards of one step.

    Args:
        total, count: sums of the loss.
        gradients: sums by parameter name; parameters that no shard used are absent.
        magnitudes: sums of absolute values, to which the rounding errors of any summation order are relative.
        buffers: change of the buffers, float64: the mean over shards unless the task names another reduction.
        num_shards: number of shards.
    """

    total: float
    count: float
    gradients: Tensors
    magnitudes: Tensors
    buffers: Tensors
    num_shards: int


def _by_shard(shards: Iterable[ShardResult], name: str) -> dict[int, Tensor]:
    return {s.micro_batch.shard: s.gradients[name] for s in shards if name in s.gradients}


def copy_optimizer_attributes(optimizer: torch.optim.Optimizer, *skipped: str) -> dict[str, Any]:
    """Return deep copies of the public attributes of an optimizer, such as a generator or a counter.

    Parameters are shared with the original.

    Args:
        skipped: names of attributes that are left out.
    """
    shared = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    attributes = vars(optimizer).items()
    chosen = {name: x for name, x in attributes if not name.startswith("_") and name not in skipped}
    return copy.deepcopy(chosen, shared)


def rule_of_buffer(name: str, rules: Mapping[str, BufferRule]) -> BufferRule:
    """Return the rule of the first pattern that fits the name of a buffer."""
    return next((rule for pattern, rule in rules.items() if fnmatchcase(name, pattern)), "mean")


def accumulate_shards(
    shards: Iterable[ShardResult], before: Tensors, buffer_reductions: Mapping[str, BufferRule]
) -> StepTotals:
    """Add up shards in the order in which they come.

    Args:
        before: buffers at the beginning of the step.
        buffer_reductions: reduction by pattern of a buffer's name, as `Task.buffers`; "mean" where none fits.
    """
    reductions = {b: rule_of_buffer(b, buffer_reductions) for b in before}
    unchanged = {n: torch.zeros_like(as_reals(b), dtype=torch.float64) for n, b in before.items()}
    sums = StepTotals(0.0, 0.0, {}, {}, unchanged, 0)
    for shard in shards:
        sums.total += shard.total
        sums.count += shard.count
        sums.num_shards += 1
        for name, g in shard.gradients.items():
            sums.gradients[name] = sums.gradients[name] + g if name in sums.gradients else g
            size = shard.uses[name] if name in shard.uses else g.abs().to(torch.float64)
            sums.magnitudes[name] = sums.magnitudes[name] + size if name in sums.magnitudes else size
        for name, base in before.items():
            if reductions[name] == "first" and shard.micro_batch.shard != 0:
                continue
            a, b = as_reals(shard.buffers[name]), as_reals(base)
            # Equal values change by 0, also where both are infinite and their difference is not a number.
            sums.buffers[name] += torch.where(a == b, 0.0, a.to(torch.float64) - b.to(torch.float64))
    for name, change in sums.buffers.items():
        rule = reductions[name]
        change /= max(1, sums.num_shards) if rule == "mean" else 1
        decay = moving_average_decay(rule)
        if decay is not None and bool(change.any()):
            # Each shard has moved the value towards its own statistic; a step moves it once.
            change += (sums.num_shards - 1) * (1 - decay) * as_reals(before[name]).to(torch.float64)
    return sums
