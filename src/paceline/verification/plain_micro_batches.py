"""The virtual shards of a step, how they are read and what is random in them, written apart from
`paceline.data` and `paceline.layout.seed`.

Shared with the session, since two sides that choose them apart could not agree: the order of samples
(`Order`), the key function (`paceline.keys.key`) and the words that it is called with, which are written out
again here: "unit" for a shard, "loader" for reading one, and "dropout" with the module's name, which
`KeyedDropout` itself adds, being a part of the user's model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from paceline.data import Batches, MicroBatch
from paceline.keys import key
from paceline.models import KeyedDropout
from paceline.task import Task


class PlainMicroBatches:
    """All shards of a step.

    Args:
        order: of the samples.
        shards: into how many a batch is cut, evenly; those that get no sample are left out.
        seed: of the run.
    """

    def __init__(self, order: Batches, shards: int, seed: int) -> None:
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


def read(task: Task, micro_batch: MicroBatch) -> Any:
    """Its samples, collated; what the data or the collate function draw follows from its key."""
    with drawn_from(key(micro_batch.key, "loader")):
        return collated(task, read_samples(task, [int(i) for i in micro_batch.indices]))


def read_samples(task: Task, indices: list[int]) -> list[Any]:
    """Some samples, all at once where the data can."""
    fetch_many = getattr(task.data, "__getitems__", None)
    return list(fetch_many(indices) if callable(fetch_many) else [task.data[i] for i in indices])


def collated(task: Task, samples: list[Any]) -> Any:
    """Samples as a batch."""
    return (task.collate or default_collate)(samples)


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
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
