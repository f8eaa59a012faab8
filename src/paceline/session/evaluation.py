"""Evaluation on held-out samples, with the same bits for every world size.

The samples are divided into blocks of a fixed size. Every rank evaluates some blocks; the sums of all
blocks are put into one table and added in the order of the blocks. So neither a smaller last block nor the
number of ranks changes the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.build_feed import build_loader
from paceline.data.sample_order import SampleIndices
from paceline.data.task_data import read_held_out
from paceline.data.work import MicroBatch, split_evenly
from paceline.federated.cohorts import CohortWork
from paceline.session.session import Session, repeat_until_agreed
from paceline.task import SampleSource, finish_metrics, held_out_sets

_CLIENTS = "clients"


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and metrics over all held-out items.

    With several held-out sets, `loss`, `num_samples` and `num_items` are those of the first, and metrics
    have the name of their set as prefix: "far.loss", "far.accuracy". What the clients of federated rounds
    keep from training is a set with the name "clients", after those of the task.

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
    work = session.feed.work
    if source is None and isinstance(work, CohortWork) and any(map(len, work.order.clients.held_out)):
        evaluations[_CLIENTS] = _evaluate_clients(session, work.order.clients.held_out)
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
    blocks = _blocks_of(np.arange(num_samples), options.batch)
    names = session.runner.metric_names.names or ()
    sums = _sum_blocks(session, held_out, blocks).sum(axis=0)
    count = sums[1] or 1.0
    means = {name: float(value / count) for name, value in zip(names, sums[2:], strict=True)}
    loss, num_items = float(sums[0] / count), float(sums[1])
    metrics = finish_metrics(session.task, loss, num_items, means)
    return Evaluation(session.state.step, loss, metrics, num_samples, num_items)


def _blocks_of(indices: SampleIndices, size: int) -> list[SampleIndices]:
    """Divide the indices of samples into blocks of a size."""
    return [indices[start : start + size] for start in range(0, len(indices), size)]


def _sum_blocks(
    session: Session, source: SampleSource, blocks: Sequence[SampleIndices]
) -> NDArray[np.float64]:
    """Return loss, count and metrics of every block, equal on all ranks; collective."""
    local = share_of_blocks(session, len(blocks))
    table = torch.zeros(len(blocks), 2 + len(session.runner.metric_names.names or ()), dtype=torch.float64)
    with session.averaged():
        rows = _run_blocks(session, source, [blocks[i] for i in local])
    table[local.start : local.start + len(rows)] = rows  # fewer if this rank does not compute the loss
    world = session.mesh.world
    # Every row comes from one rank and the others add zeros, so the order of this sum changes no bit.
    agreed = session.net.all_reduce(table.to(session.runner.sharded_model.device), world).wait()
    sums: NDArray[np.float64] = agreed.cpu().numpy()
    return sums


def _evaluate_clients(session: Session, held_out: Sequence[SampleIndices]) -> Evaluation:
    """Evaluate on the samples that each client has kept from training; collective.

    Every client counts once, whatever the number of its samples. The worst decile are the clients with the
    highest loss, a tenth of them and at least one.
    """
    clients = [indices for indices in held_out if len(indices)]
    blocks = [_blocks_of(indices, session.recipe.evaluate.batch) for indices in clients]
    table = _sum_blocks(session, session.task.data, [block for part in blocks for block in part])
    ends = np.cumsum([len(part) for part in blocks])
    sums = [rows.sum(axis=0) for rows in np.split(table, ends[:-1])]
    means = [_client_means(session, row) for row in sums if row[1]]
    means.sort(key=lambda mean: -mean["loss"])
    worst = means[: -(-len(means) // 10)]
    metrics: dict[str, float] = {}
    for name in means[0] if means else ():
        metrics[name] = float(np.mean([mean[name] for mean in means]))
        metrics[f"{name}_worst_decile"] = float(np.mean([mean[name] for mean in worst]))
    loss = metrics.pop("loss", nan)
    return Evaluation(session.state.step, loss, metrics, sum(map(len, clients)), float(table[:, 1].sum()))


def _client_means(session: Session, sums: NDArray[np.float64]) -> dict[str, float]:
    """Return the mean loss and the metrics of one client."""
    names, (total, count) = session.runner.metric_names.names or (), sums[:2].tolist()
    means = {name: float(value / count) for name, value in zip(names, sums[2:], strict=True)}
    return {"loss": total / count, **finish_metrics(session.task, total / count, count, means)}


def share_of_blocks(session: Session, num_blocks: int) -> range:
    """Return the blocks that this rank evaluates; none if it only holds a part of the model."""
    data, num_idle = session.mesh.data, session.strategy.storage_ranks
    if data.rank < num_idle:
        return range(0)
    return split_evenly(num_blocks, data.size - num_idle, data.rank - num_idle)


def _run_blocks(session: Session, source: SampleSource, blocks: list[SampleIndices]) -> torch.Tensor:
    loader = build_loader(session.recipe, session.task, source, session.runner.sharded_model.device)
    micro_batches = (MicroBatch(step=0, shard=0, indices=block, key=0) for block in blocks)
    stream = loader.open(micro_batches)
    try:
        return session.runner.evaluate(stream).per_micro_batch()
    finally:
        stream.close()
