"""Mistakes that cannot be made: the run is refused, in one sentence with a next step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline import Task
from paceline.models import KeyedDropout
from tests.known_mistakes.mistake import Story
from tests.known_mistakes.refused_tasks import (
    Functional,
    Noisy,
    Stream,
    counted_mean,
    frozen,
    mean_loss,
    model,
    negatives_of_batch,
    negatives_of_rank,
    odd_metrics,
    same_metrics,
    sgd,
    task,
)


@dataclass(frozen=True)
class Refused:
    """A mistake that is refused.

    Args:
        says: what the error says.
        wrong, fixed: build the task.
        recipe, fixed_recipe: settings.
        processes: that it takes.
    """

    story: Story
    says: str
    wrong: Callable[[], Task]
    fixed: Callable[[], Task]
    recipe: Mapping[str, Any]
    fixed_recipe: Mapping[str, Any]
    processes: int = 1


PLAIN: Mapping[str, Any] = {}
CACHED = {"loader": {"cache_bytes": 1 << 20}}
LANES, PIPELINE = {"strategy": "replicas=1 lanes=2"}, {"strategy": "replicas=1 pipeline=2"}
SAME_BITS = {"reproducible": True}
WHOLE_BATCHES = {"batch": {"size": 6, "drop_last": True}}


REFUSALS: Mapping[str, Refused] = {
    "a mean as the loss": Refused(
        Story(
            "the loss is a mean without its count",
            "every loop that passes cross_entropy's default reduction to a data-parallel library",
            "ranks and micro-batches of unequal size have the same weight",
            "the overall mean cannot be computed from means alone",
            "return F.cross_entropy(model(x), y)",
            "return Loss.mean(F.cross_entropy(model(x), y), len(y))",
        ),
        "not paceline.Loss",
        lambda: task(loss=mean_loss),
        lambda: task(loss=counted_mean),
        PLAIN,
        PLAIN,
    ),
    "metrics of some batches": Refused(
        Story(
            "some batches have a metric that others do not",
            "self.log under a condition in Lightning with sync_dist=True",
            "the job hangs at the first step in which ranks disagree",
            "ranks reduce different numbers of values, and one waits for a call that never comes",
            "if positive.any(): metrics['positive'] = ...",
            "metrics['positive'] = positive.sum()",
        ),
        "the loss returned the metrics",
        lambda: task(loss=odd_metrics),
        lambda: task(loss=same_metrics),
        PLAIN,
        PLAIN,
    ),
    "negatives of one rank": Refused(
        Story(
            "a contrastive loss sees only the samples of its rank",
            "SimCLR and CLIP under data parallelism without a gather of the embeddings",
            "more processes give a lower loss and worse embeddings: each sample has fewer negatives",
            "the loss is no sum over samples, so the sum over ranks is another loss",
            "a, b = model(images), model(texts)",
            "a, b = paceline.gather(model(images)), paceline.gather(model(texts))",
        ),
        "it compares the samples of a micro-batch with each other",
        lambda: task(loss=negatives_of_rank),
        lambda: task(loss=negatives_of_batch),
        WHOLE_BATCHES,
        WHOLE_BATCHES,
        processes=2,
    ),
    "nothing to train": Refused(
        Story(
            "nothing requires a gradient",
            "fine-tuning that freezes the base model and finds no adapter with the given name",
            "the loss does not change; an empty list of gradients is applied without an error",
            "requires_grad is off everywhere",
            "model.requires_grad_(False)",
            "model.requires_grad_(False); model[-1].requires_grad_(True)",
        ),
        "no parameter that",
        frozen,
        task,
        PLAIN,
        PLAIN,
    ),
    "more ranks than shards": Refused(
        Story(
            "some ranks have nothing to do",
            "a global batch smaller than the number of devices; pipelines with more stages than layers",
            "ranks stall in a collective, or train on padding",
            "one micro-batch cannot be divided between two replicas",
            "batch.shards = 1  # and 2 processes",
            "batch.shards = 2",
        ),
        "more than batch.shards=1",
        task,
        task,
        {"batch": {"size": 6, "shards": 1}},
        {"batch": {"size": 6, "shards": 2}},
        2,
    ),
    "dropout on threads": Refused(
        Story(
            "threads draw from one generator",
            "data parallelism with threads of one process",
            "two runs with one seed differ",
            "which thread draws first depends on the scheduler",
            "nn.Dropout(0.1)",
            "paceline.models.KeyedDropout(0.1)",
        ),
        "draws from PyTorch's global generator",
        lambda: task(model=model(nn.Dropout(0.1))),
        lambda: task(model=model(KeyedDropout(0.1))),
        LANES,
        LANES,
    ),
    "children as a chain": Refused(
        Story(
            "a pipeline is built from list(model.children())",
            "tutorials on splitting a model by hand",
            "the pipeline lacks the model's activations and reshapes",
            "operations that forward applies between its modules are in none of them",
            "stages=lambda m: list(m.children())",
            "stages=lambda m: [m.a, nn.ReLU(), m.b]",
        ),
        "another result than the model",
        lambda: task(model=Functional(), stages=lambda m: list(m.children())),
        lambda: task(model=Functional(), stages=lambda m: [m.a, nn.ReLU(), m.b]),
        PIPELINE,
        PIPELINE,
        2,
    ),
    "LBFGS": Refused(
        Story(
            "the optimizer evaluates the loss several times in a step",
            "LBFGS and SAM under DDP, with a closure that each rank evaluates alone",
            "ranks stop their line search after different numbers of calls, and hang",
            "each evaluation would be a separate step for all ranks",
            "torch.optim.LBFGS(model.parameters())",
            "torch.optim.AdamW(model.parameters())",
        ),
        "recomputes the loss within a step",
        lambda: task(optimizer=lambda m: torch.optim.LBFGS(m.parameters())),
        lambda: task(optimizer=sgd()),
        PLAIN,
        PLAIN,
    ),
    "a stream that ranks see differently": Refused(
        Story(
            "a stream divides its samples between ranks itself, or has another order on each rank",
            "split_dataset_by_node, or shuffles seeded by the time, with a library that divides samples too",
            "some samples are left out, and others are used twice",
            "a stream has no index, so missing samples are not noticed",
            "data = MyIterableDataset()  # with a different seed on every rank",
            "data = MyIterableDataset()  # which draws from torch's generator",
        ),
        "reads other samples than rank 0",
        lambda: task(data=Stream(int.from_bytes(os.urandom(3)))),
        lambda: task(data=Stream()),
        PLAIN,
        PLAIN,
        processes=2,
    ),
    "a cache of random samples": Refused(
        Story(
            "augmented samples are cached",
            "data.cache() after data.map(augment) in tf.data; caches in datasets",
            "augmentation stops after the first epoch, and depends on which rank read a sample first",
            "the cache keeps the first draw",
            "loader.cache_bytes = 1000000  # and random.random() in __getitem__",
            "loader.cache_bytes = 0, or draw in collate",
        ),
        "draw random numbers",
        lambda: task(data=Noisy()),
        lambda: task(data=Noisy()),
        CACHED,
        PLAIN,
    ),
    "fused and reproducible": Refused(
        Story(
            "equal bits are requested with kernels whose rounding depends on a value's position",
            "deterministic runs with fused optimizers and sharded state",
            "hashes depend on the number of ranks",
            "a vector loop and its remainder round differently, and sharding moves the remainder",
            "torch.optim.SGD(parameters, lr, fused=True)",
            "torch.optim.SGD(parameters, lr, fused=False)",
        ),
        "a fused optimizer rounds",
        lambda: task(optimizer=sgd(fused=True)),
        lambda: task(optimizer=sgd(fused=False)),
        SAME_BITS,
        SAME_BITS,
    ),
}
