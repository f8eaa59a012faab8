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

from paceline.data.build_feed import build_loader
from paceline.data.task_data import read_held_out
from paceline.data.work import MicroBatch, split_evenly
from paceline.session.session import Session, repeat_until_agreed
from paceline.task import SampleSource, finish_metrics, held_out_sets


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
    sets = held_out_sets(session.task.held_out if source is None else source)
    found = {}
    for name, one in sets.items():
        samples = read_held_out(name, one, session.recipe)
        found[name] = repeat_until_agreed(session, partial(_evaluate_set, session, samples))
    return _merge_sets(found) if found else None


def _merge_sets(found: Mapping[str, Evaluation]) -> Evaluation:
    """One evaluation of all sets."""
    first = next(iter(found.values()))
    metrics: dict[str, float] = {}
    for name, one in found.items():
        own = {"loss": one.loss, **one.metrics} if name else one.metrics
        metrics |= {f"{name}.{metric}" if name else metric: value for metric, value in own.items()}
    return replace(first, metrics=metrics)


def _evaluate_set(session: Session, held_out: SampleSource) -> Evaluation:
    options, data = session.recipe.evaluate, session.mesh.data
    num_samples = min(len(held_out), options.max_samples or len(held_out))
    blocks = [range(i, min(i + options.batch, num_samples)) for i in range(0, num_samples, options.batch)]
    mine = split_evenly(len(blocks), data.size, data.rank)
    names = session.runner.metric_names.found or ()
    table = torch.zeros(len(blocks), 2 + len(names), dtype=torch.float64)
    with session.averaged():
        rows = _run_blocks(session, held_out, [blocks[i] for i in mine])
    table[mine.start : mine.start + len(rows)] = rows
    world = session.mesh.world
    agreed = session.net.all_reduce(table.to(session.runner.sharded_model.device), world).wait()
    sums = agreed.cpu().numpy().sum(axis=0)
    count = sums[1] or 1.0
    means = {name: float(value / count) for name, value in zip(names, sums[2:], strict=True)}
    loss, num_items = float(sums[0] / count), float(sums[1])
    metrics = finish_metrics(session.task, loss, num_items, means)
    return Evaluation(session.state.step, loss, metrics, num_samples, num_items)


def _run_blocks(session: Session, source: SampleSource, blocks: list[range]) -> torch.Tensor:
    loader = build_loader(session.recipe, session.task, source, session.runner.sharded_model.device)
    micro_batches = (MicroBatch(step=0, shard=0, indices=np.arange(b.start, b.stop), key=0) for b in blocks)
    stream = loader.open(micro_batches)
    try:
        return session.runner.evaluate(stream).per_micro_batch()
    finally:
        stream.close()
