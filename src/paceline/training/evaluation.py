"""Evaluation on held-out samples: the same number for every world size, to the bit.

The samples are cut into blocks of a fixed size; every rank runs some blocks, and the sums of all blocks
are put into one table and added in the order of the blocks. So neither a ragged end nor the number of
ranks changes the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from paceline.data import MicroBatch, in_memory, split
from paceline.task import Source, finish_metrics, sets_of
from paceline.training.agreed import agreed
from paceline.training.feeds import build_loader
from paceline.training.session import Session


@dataclass(frozen=True)
class Evaluation:
    """Means over all held-out items.

    Of several sets, `loss`, `num_samples` and `num_items` are those of the first, and the metrics of each
    have its name in front: "far.loss", "far.accuracy".

    Args:
        step: training steps taken before it.
        loss: mean loss.
        metrics: further means.
        num_samples: held-out samples that were used, each once.
        num_items: what the loss counts.
    """

    step: int
    loss: float
    metrics: Mapping[str, float]
    num_samples: int
    num_items: float


def evaluate(session: Session, source: Any = None) -> Evaluation | None:
    """Evaluate on the task's held-out data, with the average of the weights if there is one; collective.

    Args:
        source: other samples than the task's held-out ones; or several sets by name.
    Returns:
        None if there is nothing to evaluate on.
    Wire: for each set one all_reduce of 8 (2 + num_metrics) bytes a block.
    """
    sets = sets_of(session.task.held_out if source is None else source)
    found = {}
    for name, one in sets.items():
        samples = in_memory(name, one, session.recipe)
        found[name] = agreed(session, partial(_evaluate_set, session, samples))
    return _together(found) if found else None


def _together(found: Mapping[str, Evaluation]) -> Evaluation:
    """One evaluation of all sets."""
    first = next(iter(found.values()))
    metrics: dict[str, float] = {}
    for name, one in found.items():
        own = {"loss": one.loss, **one.metrics} if name else one.metrics
        metrics |= {f"{name}.{metric}" if name else metric: value for metric, value in own.items()}
    return replace(first, metrics=metrics)


def _evaluate_set(session: Session, held_out: Source) -> Evaluation:
    options, data = session.recipe.evaluate, session.mesh.data
    num_samples = min(len(held_out), options.max_samples or len(held_out))
    blocks = [range(i, min(i + options.batch, num_samples)) for i in range(0, num_samples, options.batch)]
    mine = split(len(blocks), data.size, data.rank)
    names = session.placed.metric_names.found or ()
    table = torch.zeros(len(blocks), 2 + len(names), dtype=torch.float64)
    with session.averaged():
        rows = _run(session, held_out, [blocks[i] for i in mine])
    table[mine.start : mine.start + len(rows)] = rows
    world = session.mesh.world
    agreed = session.net.all_reduce(table.to(session.placed.holding.device), world).wait()
    sums = agreed.cpu().numpy().sum(axis=0)
    count = sums[1] or 1.0
    means = {name: float(value / count) for name, value in zip(names, sums[2:], strict=True)}
    loss, num_items = float(sums[0] / count), float(sums[1])
    metrics = finish_metrics(session.task, loss, num_items, means)
    return Evaluation(session.state.step, loss, metrics, num_samples, num_items)


def _run(session: Session, source: Source, blocks: list[range]) -> torch.Tensor:
    loader = build_loader(session.recipe, session.task, source, session.placed.holding.device)
    micro_batches = (MicroBatch(step=0, shard=0, indices=np.arange(b.start, b.stop), key=0) for b in blocks)
    stream = loader.open(micro_batches)
    try:
        return session.placed.evaluate(stream).per_micro_batch()
    finally:
        stream.close()
