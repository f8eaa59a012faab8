"""The sides: Paceline's session, and the loop that a careful user writes by hand around any wrapping.

The hand-written loop does per step: set the rate, fetch samples, forward, backward, clip, fused AdamW, read
the loss. What a library changes in it (`Wrapping`) is passed in, so that all of them share every other line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from benchmarks.measure import Side
from benchmarks.subjects import Subject
from paceline.data import KeyedOrder, LockstepWork
from paceline.job.cluster import Cluster
from paceline.recipe import Recipe
from paceline.session import Session, build_session

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PLANNED_STEPS = 5_000


def paceline_side(name: str, subject: Subject, cluster: Cluster, threads: int) -> Side:
    """Paceline as users run it: a session on the connected cluster, step by step."""
    torch.set_num_threads(threads)
    session = build_session(subject.recipe, subject.fresh(), cluster, subject.device)
    return Side(name, partial(next_loss, session, session.rounds()), partial(torch.set_num_threads, threads))


def next_loss(session: Session, rounds: Any) -> float:
    """Of one step more."""
    return float(next(rounds).loss)


@dataclass(frozen=True)
class Wrapping:
    """What a library changes in a hand-written loop.

    Args:
        model: called with the batch; wrapped or not.
        optimizer: stepped; wrapped or not.
        clip: `clip(max_norm)`.
        backward: `backward(loss)`.
        autocast: the context of one forward.
        quiet: the context of a micro-batch whose gradients are not sent yet.
    """

    name: str
    model: nn.Module
    optimizer: Any
    clip: Callable[[float], Any]
    backward: Callable[[Tensor], Any] = Tensor.backward
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    quiet: Callable[[], AbstractContextManager[Any]] = nullcontext


def adamw(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """The recipe's optimizer, made by hand: fused AdamW that decays matrices."""
    options = recipe.optimizer
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)


def bare(subject: Subject, name: str = "bare PyTorch") -> Wrapping:
    """No library at all."""
    model = subject.fresh().model.train().to(subject.device)
    return Wrapping(
        name,
        model,
        adamw(model, subject.recipe),
        clip=partial(torch.nn.utils.clip_grad_norm_, list(model.parameters())),
        autocast=autocast_of(subject.recipe, subject.device.type),
    )


def autocast_of(recipe: Recipe, device_type: str = "cpu") -> Callable[[], AbstractContextManager[Any]]:
    """What the recipe's precision asks for."""
    compute = recipe.precision.compute
    if compute == "fp32":
        return nullcontext
    return partial(torch.autocast, device_type, dtype=_TYPES[compute])


@dataclass
class HandLoop:
    """A training loop of about twenty lines.

    Args:
        replica_rank, num_replicas: whose part of each global batch it takes; the parts are Paceline's, worked
            out before the clock starts.
    """

    subject: Subject
    wrapping: Wrapping
    replica_rank: int = 0
    num_replicas: int = 1
    plan: list[list[list[int]]] = field(init=False)
    taken: int = 0

    def __post_init__(self) -> None:
        batch = self.subject.recipe.batch
        order = KeyedOrder(len(self.subject.task.data), batch.size, self.subject.recipe.seed)
        work = LockstepWork(
            order, batch.shards or 1, self.subject.recipe.seed, self.replica_rank, self.num_replicas
        )
        self.plan = [
            [micro_batch.indices.tolist() for micro_batch in work.micro_batches(step)]
            for step in range(_PLANNED_STEPS)
        ]

    def step(self) -> float:
        """One update; returns this rank's mean loss."""
        w, data, recipe = self.wrapping, self.subject.task.data, self.subject.recipe
        device = self.subject.device
        collate = self.subject.task.collate or default_collate
        micro_batches = self.plan[self.taken]
        set_rate(w.optimizer, recipe, self.taken)
        w.optimizer.zero_grad(set_to_none=True)
        whole = torch.zeros((), device=device)
        for i, indices in enumerate(micro_batches):
            batch = collate([data[j] for j in indices])
            if device.type != "cpu":
                batch = tree_map_only(Tensor, lambda t: t.to(device), batch)
            with w.quiet() if i < len(micro_batches) - 1 else nullcontext():
                with w.autocast():
                    loss = self.subject.mean_loss(w.model, batch)
                loss = loss / len(micro_batches) if len(micro_batches) > 1 else loss
                w.backward(loss)
            whole += loss.detach()
        w.clip(recipe.optimizer.clip_norm or math.inf)
        w.optimizer.step()
        self.taken += 1
        return whole.item()

    def side(self) -> Side:
        """As a side of a comparison."""
        return Side(self.wrapping.name, self.step)


def set_rate(optimizer: Any, recipe: Recipe, step: int) -> None:
    """Linear warm-up, then cosine: what both recipes of the benchmarks ask for."""
    warmup, steps, final = recipe.schedule.warmup_steps, recipe.steps or 1, recipe.schedule.final
    if step < warmup:
        factor = step / warmup
    else:
        progress = (step - warmup) / (steps - warmup)
        factor = final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    for group in optimizer.param_groups:
        group["lr"] = recipe.optimizer.lr * factor
