"""Evaluation on held-out samples, with the same bits for every world size.

The samples are divided into blocks of a fixed size. Every rank evaluates some blocks; the sums of all
blocks are put into one table and added in the order of the blocks. So neither a smaller last block nor the
number of ranks changes the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from paceline.data.build_feed import build_loader
from paceline.data.task_data import read_held_out
from paceline.data.work import MicroBatch, split_evenly
from paceline.session.session import Session, repeat_until_agreed
from paceline.task import SampleSource, finish_metrics, held_out_sets


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and metrics over all held-out items.

    With several held-out sets, `loss`, `num_samples` and `num_items` are those of the first, and metrics
    have the name of their set as prefix: "far.loss", "far.accuracy".

    Args:
        step: number of training steps before the evaluation.
        loss: mean over items.
        metrics: means over items.
        num_samples: number of held-out samples, each used once.
        num_items: number of items that the loss counts.
    """

    step: int
    loss: float
    metrics: Mapping[str, float]
    num_samples: int
    num_items: float


def evaluate(session: Session, source: Any = None) -> Evaluation | None:
    """Evaluate on the task's held-out data, with the averaged weights if there are any; collective.

    Args:
        source: samples in place of the task's held-out ones, or several sets by name.
    Returns:
        The means, equal on all ranks; None if there is nothing to evaluate on.
    Wire: for each set one all_reduce of 8 (2 + num_metrics) bytes a block.
    """
    sets = held_out_sets(session.task.held_out if source is None else source)
    evaluations = {}
    for name, held_out in sets.items():
        samples = read_held_out(name, held_out, session.recipe, session.task)
        evaluations[name] = repeat_until_agreed(session, partial(_evaluate_set, session, samples))
    return _merge_sets(evaluations) if evaluations else None


def _merge_sets(evaluations: Mapping[str, Evaluation]) -> Evaluation:
    """Return one evaluation with the metrics of all sets."""
    first = next(iter(evaluations.values()))
    metrics: dict[str, float] = {}
    for name, evaluation in evaluations.items():
        named = {"loss": evaluation.loss, **evaluation.metrics} if name else evaluation.metrics
        metrics |= {f"{name}.{metric}" if name else metric: value for metric, value in named.items()}
    return replace(first, metrics=metrics)


def _evaluate_set(session: Session, held_out: SampleSource) -> Evaluation:
    options = session.recipe.evaluate
    num_samples = min(len(held_out), options.max_samples or len(held_out))
    blocks = [range(i, min(i + options.batch, num_samples)) for i in range(0, num_samples, options.batch)]
    local = share_of_blocks(session, len(blocks))
    names = session.runner.metric_names.names or ()
    table = torch.zeros(len(blocks), 2 + len(names), dtype=torch.float64)
    with session.averaged():
        rows = _run_blocks(session, held_out, [blocks[i] for i in local])
    table[local.start : local.start + len(rows)] = rows  # fewer if this rank does not compute the loss
    world = session.mesh.world
    # Every row comes from one rank and the others add zeros, so the order of this sum changes no bit.
    agreed = session.net.all_reduce(table.to(session.runner.sharded_model.device), world).wait()
    sums = agreed.cpu().numpy().sum(axis=0)
    count = sums[1] or 1.0
    means = {name: float(value / count) for name, value in zip(names, sums[2:], strict=True)}
    loss, num_items = float(sums[0] / count), float(sums[1])
    metrics = finish_metrics(session.task, loss, num_items, means)
    return Evaluation(session.state.step, loss, metrics, num_samples, num_items)


def share_of_blocks(session: Session, num_blocks: int) -> range:
    """Return the blocks that this rank evaluates; none if it only holds a part of the model."""
    data, num_idle = session.mesh.data, session.strategy.storage_ranks
    if data.rank < num_idle:
        return range(0)
    return split_evenly(num_blocks, data.size - num_idle, data.rank - num_idle)


def _run_blocks(session: Session, source: SampleSource, blocks: list[range]) -> torch.Tensor:
    loader = build_loader(session.recipe, session.task, source, session.runner.sharded_model.device)
    micro_batches = (MicroBatch(step=0, shard=0, indices=np.arange(b.start, b.stop), key=0) for b in blocks)
    stream = loader.open(micro_batches)
    try:
        return session.runner.evaluate(stream).per_micro_batch()
    finally:
        stream.close()
