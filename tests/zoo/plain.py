"""What one process computes, as a plain loop: virtual shards one after another, and one update a step.

Only torch and the standard library: this is the definition of a run, written a second time. A gradient hook
of the user's sees one shard, and a loss that is divided by the power of two below the samples of its step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.zoo.kind import SIZE, STEPS, Made

Buffers = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """How to train.

    Args:
        shards: virtual shards of a step.
        momentum: of SGD.
        size: samples of a step; the last one of an epoch may have fewer.
    """

    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    clip_norm: float | None = None
    shards: int = 6
    seed: int = 0
    size: int = SIZE
    steps: int = STEPS


@dataclass(frozen=True)
class End:
    """Mean losses of all steps, and parameters and persistent buffers at the end."""

    losses: list[float]
    tensors: dict[str, Tensor]

    def distance(self, other: End) -> float:
        """The largest absolute difference over losses and tensors; infinite where one has another name."""
        if self.tensors.keys() != other.tensors.keys() or len(self.losses) != len(other.losses):
            return float("inf")
        losses = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        return max([*losses, *(gap(t, other.tensors[name]) for name, t in self.tensors.items())])


def gap(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; infinite where one has a value that is no number."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    found = (a.to(wide) - b.to(wide)).abs()
    return float(found.nan_to_num(float("inf")).max()) if found.numel() else 0.0


def train(made: Made, plan: Plan) -> End:
    """Train to the end."""
    model, optimizer, losses = made.model, optimizer_of(made.model, plan), []
    for step in range(plan.steps):
        before, changes, total, count, sums = buffers_of(model), [], 0.0, 0.0, dict[nn.Parameter, Tensor]()
        scale = 1.0 / 2 ** (size_of(made, plan, step).bit_length() - 1)
        for shard, batch in shards_of(made, plan, step):
            model.train()
            torch.manual_seed(key(plan.seed, "unit", step, shard))
            value, items = made.loss(model, batch)
            optimizer.zero_grad()
            (value * scale).backward()
            add_gradients(sums, model)
            total, count = total + float(value.detach()), count + items
            changes.append(change_of(model, before))
            put_back(model, before)
        move(model, before, changes)
        optimizer.zero_grad()
        trained = [*sums]
        for p in trained:
            p.grad = sums[p] / (count * scale)
        if plan.clip_norm is not None:
            clip(trained, plan.clip_norm)
        optimizer.step()
        losses.append(total / count)
    kept = model.state_dict()
    return End(losses, {name: t.detach().clone() for name, t in kept.items()})


def size_of(made: Made, plan: Plan, step: int) -> int:
    """How many samples a step has."""
    first = step % -(-len(made.samples) // plan.size) * plan.size
    return min(plan.size, len(made.samples) - first)


def add_gradients(sums: dict[nn.Parameter, Tensor], model: nn.Module) -> None:
    """Of one shard, as the user's hooks have left them."""
    for p in model.parameters():
        if p.grad is not None:
            sums[p] = sums[p] + p.grad if p in sums else p.grad


def optimizer_of(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """No fused kernel, one tensor after another."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if plan.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=plan.lr, weight_decay=0.0, foreach=False)
    return torch.optim.SGD(trained, lr=plan.lr, momentum=plan.momentum, foreach=False)


def clip(trained: list[nn.Parameter], largest: float) -> None:
    """Scale all gradients so that their norm together is at most this."""
    grads = [p.grad.coalesce().values() if p.grad.is_sparse else p.grad for p in trained]
    norm = sum(float(g.to(torch.complex128).abs().square().sum()) for g in grads) ** 0.5
    if norm > largest:
        for p in trained:
            p.grad *= largest / norm


def shards_of(made: Made, plan: Plan, step: int) -> Iterator[tuple[int, Any]]:
    """The batch of every virtual shard, as PyTorch's default puts samples together."""
    first = step % -(-len(made.samples) // plan.size) * plan.size
    samples = made.samples[first : first + plan.size]
    for shard in range(plan.shards):
        part = samples[len(samples) * shard // plan.shards : len(samples) * (shard + 1) // plan.shards]
        if part:
            yield shard, default_collate(part)


def key(*parts: int | str) -> int:
    """The seed of a shard: a hash of the run's seed and of what it is for."""
    spelled = "\x1f".join([f"{type(part).__name__}:{part}" for part in parts])
    return int.from_bytes(hashlib.blake2b(spelled.encode(), digest_size=8).digest(), "little") >> 1


def buffers_of(model: nn.Module) -> Buffers:
    """Copies of the persistent buffers."""
    kept = model.state_dict()
    return {name: b.detach().clone() for name, b in model.named_buffers() if name in kept}


def put_back(model: nn.Module, values: Buffers) -> None:
    """Write the persistent buffers."""
    with torch.no_grad():
        for name, b in model.named_buffers():
            if name in values:
                b.copy_(values[name])


def change_of(model: nn.Module, before: Buffers) -> Buffers:
    """What one shard made of the buffers."""
    return {name: wide(now) - wide(before[name]) for name, now in buffers_of(model).items()}


def move(model: nn.Module, before: Buffers, changes: list[Buffers]) -> None:
    """Every buffer goes on by the mean of its changes; whole numbers are rounded."""
    after = {}
    for name, base in before.items():
        moved = wide(base) + torch.stack([change[name] for change in changes]).mean(0)
        exact = base.is_floating_point() or base.is_complex()
        after[name] = (moved if exact else moved.round()).to(base.dtype)
    put_back(model, after)


def wide(x: Tensor) -> Tensor:
    """In twice the precision."""
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
