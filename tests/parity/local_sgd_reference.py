"""Local SGD and DiLoCo as a plain loop: all replicas in one process. Only torch is imported.

Source: Stich 2019, arXiv:1805.09767, Algorithm 1; Douillard et al. 2023, arXiv:2311.08105, Algorithm 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Samples = list[tuple[Tensor, Tensor]]
Meeting = list[tuple[int, int, int]]
"""The replicas of a round: the name of each, its share of the samples, and of how many shares."""


@dataclass(frozen=True)
class LocalPlan:
    """How to train.

    Args:
        replicas, local_steps, outer_lr, outer_momentum: of DiLoCo; 1 and 0 average.
        size, shards: samples and virtual shards of a step; replicas take consecutive shards.
        steps: of each replica.
    """

    replicas: int
    local_steps: int
    size: int
    shards: int
    steps: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0


class Replica:
    """One that trains alone."""

    def __init__(self, model: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        self.model = model
        self.optimizer = optimizer(model)

    def step(self, parts: list[Samples]) -> tuple[float, int]:
        """One update from some shards, all from the same buffers; how many samples and shards that was."""
        before, changes, count = _buffers(self.model), [], 0.0
        self.optimizer.zero_grad()
        for part in parts:
            x, y = (torch.stack(column) for column in zip(*part, strict=True))
            F.cross_entropy(self.model(x), y, reduction="sum").backward()
            count += len(part)
            changes.append({name: b - before[name] for name, b in _buffers(self.model).items()})
            _set(self.model, before)
        if changes:
            mean = {name: sum(c[name].double() for c in changes) / len(changes) for name in before}
            _set(self.model, {name: (b + mean[name]).to(b.dtype) for name, b in before.items()})
            for p in (p for p in self.model.parameters() if p.grad is not None):
                p.grad /= count
            self.optimizer.step()
        return count, len(changes)


def train_local(
    model: nn.Module,
    samples: Samples,
    plan: LocalPlan,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    meetings: list[Meeting] | None = None,
) -> dict[str, Tensor]:
    """Parameters and buffers after the last round.

    Args:
        meetings: of each round the replicas whose deltas count; a new one has the optimizer of the first.
    """
    everyone = [(r, r, plan.replicas) for r in range(plan.replicas)]
    known = {r: Replica(copy.deepcopy(model), optimizer) for r in range(plan.replicas)}
    momentum = [torch.zeros_like(p) for p in model.parameters()]
    step = 0
    while step < plan.steps:
        end = min(step + plan.local_steps, plan.steps)
        meeting = everyone if meetings is None else meetings.pop(0)
        for name, *_ in meeting:
            if name not in known:
                known[name] = Replica(copy.deepcopy(model), optimizer)
                first = known[meeting[0][0]].optimizer.state_dict()
                known[name].optimizer.load_state_dict(copy.deepcopy(first))
        replicas = [known[name] for name, *_ in meeting]
        for replica in replicas:
            replica.model.load_state_dict(model.state_dict())
        weights = [
            [
                sum(x)
                for x in zip(
                    *(replica.step(_mine(samples, plan, s, *share)) for s in range(step, end)), strict=True
                )
            ]
            for replica, (_, *share) in zip(replicas, meeting, strict=True)
        ]
        _meet(model, [replica.model for replica in replicas], weights, momentum, plan)
        step = end
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def _meet(
    model: nn.Module,
    models: list[nn.Module],
    weights: list[list[float]],
    momentum: list[Tensor],
    plan: LocalPlan,
) -> None:
    """Parameters by items, buffers by shards; then Nesterov of the mean movement."""
    items, shards = (sum(column) for column in zip(*weights, strict=True))
    with torch.no_grad():
        for place, p in enumerate(model.parameters()):
            ways = [(p - [*m.parameters()][place]) * w[0] for m, w in zip(models, weights, strict=True)]
            mean = sum(ways) / items
            momentum[place].mul_(plan.outer_momentum).add_(mean)
            p -= plan.outer_lr * (mean + plan.outer_momentum * momentum[place])
    before, after = _buffers(model), [_buffers(m) for m in models]
    _set(
        model,
        {
            name: (
                b
                + sum((own[name].double() - b) * w[1] for own, w in zip(after, weights, strict=True)) / shards
            ).to(b.dtype)
            for name, b in before.items()
        },
    )


def _mine(samples: Samples, plan: LocalPlan, step: int, replica: int, of: int) -> list[Samples]:
    """This replica's shards of a step that have samples."""
    first = step % -(-len(samples) // plan.size) * plan.size
    whole = samples[first : first + plan.size]
    ends = [len(whole) * k // plan.shards for k in range(plan.shards + 1)]
    own = range(plan.shards * replica // of, plan.shards * (replica + 1) // of)
    return [whole[ends[k] : ends[k + 1]] for k in own if ends[k] < ends[k + 1]]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def _set(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, b in model.named_buffers():
        b.copy_(values[name])
