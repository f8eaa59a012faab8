"""Guess the cause of a divergence from the shape of its error.

The oracle can compute the gradient of every shard alone, so each known mistake has a formula: what the
gradient *would* be if that mistake were made. The formula that fits the observed gradient names the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.data import split

Flat = Tensor
"""Gradients of some tensors, flattened and joined, float64 [N]."""
FITS = 1e-3
_LAST_DIGITS = 1e-3  # what float16 leaves of a value, and bfloat16 of most


@dataclass(frozen=True)
class Evidence:
    """What is known about the first diverging step. Gradients are sums, not yet divided.

    Args:
        world: number of replicas.
        shards: gradient of each shard, in order; the oracle's.
        samples, counts: number of samples and of items of each shard.
        observed: the gradient that each rank gave to its update step.
        previous: the oracle's summed gradient of the step before; None in the first step.
        rekeyed: gradient of each shard as if every replica used the keys of the first; None if the same.
    """

    world: int
    shards: Sequence[Flat]
    samples: Sequence[int]
    counts: Sequence[float]
    observed: Sequence[Flat]
    previous: Flat | None = None
    rekeyed: Sequence[Flat] | None = None

    @property
    def right(self) -> Flat:
        """The sum over all shards."""
        return torch.stack(list(self.shards)).sum(0)

    def of_rank(self, rank: int) -> Flat:
        """The sum over the shards of one rank."""
        mine = split(len(self.shards), self.world, rank)
        return torch.stack([self.shards[i] for i in mine]).sum(0)

    def sum_over_ranks(self, part: Callable[[int], Flat]) -> Flat:
        """Add up one value a rank."""
        return torch.stack([part(r) for r in range(self.world)]).sum(0)


@dataclass(frozen=True)
class Diagnosis:
    """A named cause, and how well its formula fits (relative residual; 0 is perfect)."""

    cause: str
    explanation: str
    residual: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)


UNKNOWN = Diagnosis("unknown", "no known mistake has this shape; look at the first tensor and rank", 1.0)

NOT_REPEATED = Diagnosis(
    "the task is not deterministic",
    "the oracle, run twice from the same weights and seeds, finds the losses {:.9g} and {:.9g}: the data, the"
    " model or the loss draws from what nobody seeds, or remembers earlier calls",
)

DIFFERENT_START = Diagnosis(
    "different start", "initial values differ: weights must be keyed by name, or broadcast", 0.0
)


def diagnose_gradient(evidence: Evidence) -> Diagnosis:
    """The mistake whose formula fits the observed sums best."""
    found = [
        Diagnosis(cause, text, residual)
        for cause, text, predict in _FORMULAS
        if (residual := _residual(evidence, predict)) < FITS
    ]
    return min(found, key=lambda d: d.residual, default=_constant_factor(evidence))


def _residual(evidence: Evidence, predict: Callable[[Evidence, int], Flat | None]) -> float:
    worst = 0.0
    for rank, seen in enumerate(evidence.observed):
        predicted = predict(evidence, rank)
        if predicted is None:
            return 1.0
        worst = max(worst, _distance(seen, predicted))
    return worst


def _distance(seen: Flat, predicted: Flat) -> float:
    scale = max(float(predicted.norm()), float(seen.norm()), 1e-300)
    return float((seen - predicted).norm()) / scale


def _constant_factor(evidence: Evidence) -> Diagnosis:
    right, seen = evidence.right, evidence.observed[0]
    factor = float(seen @ right) / max(float(right @ right), 1e-300)
    if abs(factor) < 1e-6 or _distance(seen, factor * right) > FITS:
        return UNKNOWN
    lost = _distance(seen, right)
    if lost < _LAST_DIGITS:
        text = f"each is off by about {lost:.1e} of the whole: summed or sent in a type of fewer digits"
        return Diagnosis("digits lost", text, lost)
    return name_factor(factor, evidence.world, len(evidence.shards), sum(evidence.counts))


def name_factor(factor: float, world: int, num_shards: int, count: float) -> Diagnosis:
    """Name a constant factor between what is there and what is right."""
    known = {
        "sum instead of mean": (world, "is the number of replicas: it was summed where the mean is meant"),
        "divided twice": (1 / world, "is one over the number of replicas: it was divided twice"),
        "accumulation not divided": (num_shards / world, "is the number of accumulated micro-batches"),
        "not divided by the count": (count, "is the number of items: it was never divided"),
    }
    for cause, (value, text) in known.items():
        if value != 1 and abs(factor / value - 1) < FITS:
            return Diagnosis(cause, f"the gradient is {factor:.6g} times the right one, which {text}")
    return Diagnosis("constant factor", f"the gradient is {factor:.6g} times the right one")


def _local_only(e: Evidence, rank: int) -> Flat:
    return e.of_rank(rank)


def _mean_of_means(weights: str) -> Callable[[Evidence, int], Flat | None]:
    def predict(e: Evidence, rank: int) -> Flat | None:
        sizes: Sequence[float] = getattr(e, weights)
        shares = [sum(sizes[i] for i in split(len(sizes), e.world, r)) for r in range(e.world)]
        if min(shares) == max(shares) or min(shares) == 0:
            return None
        whole = sum(shares)
        return e.sum_over_ranks(lambda r: e.of_rank(r) * (whole / (e.world * shares[r])))

    return predict


def _mean_of_shard_means(e: Evidence, rank: int) -> Flat | None:
    if min(e.counts) == max(e.counts):
        return None
    whole = sum(e.counts) / len(e.counts)
    return torch.stack([g * (whole / c) for g, c in zip(e.shards, e.counts, strict=True)]).sum(0)


def _same_data(e: Evidence, rank: int) -> Flat | None:
    if e.world == 1:
        return None
    return e.world * e.of_rank(0)


def _without(e: Evidence, place: int) -> Flat | None:
    parts = [split(len(e.shards), e.world, r) for r in range(e.world)]
    missing = [e.shards[part[place]] for part in parts if len(part) > 1]
    return e.right - torch.stack(missing).sum(0) if missing else None


def _drop_last(e: Evidence, rank: int) -> Flat | None:
    return _without(e, -1)


def _drop_first(e: Evidence, rank: int) -> Flat | None:
    return _without(e, 0)


def _last_twice(e: Evidence, rank: int) -> Flat | None:
    dropped = _without(e, -1)
    return None if dropped is None else 2 * e.right - dropped


def _stale(e: Evidence, rank: int) -> Flat | None:
    return e.previous


def _not_cleared(e: Evidence, rank: int) -> Flat | None:
    return None if e.previous is None else e.right + e.previous


def _nothing(e: Evidence, rank: int) -> Flat:
    return torch.zeros_like(e.right)


def _shared_keys(e: Evidence, rank: int) -> Flat | None:
    return None if e.rekeyed is None else torch.stack(list(e.rekeyed)).sum(0)


_FORMULAS: tuple[tuple[str, str, Callable[[Evidence, int], Flat | None]], ...] = (
    (
        "not reduced",
        "each rank kept its own gradient of these tensors: their reduction is missing",
        _local_only,
    ),
    (
        "mean of means",
        "ranks were averaged with equal weights, but they had unequal numbers of items",
        _mean_of_means("counts"),
    ),
    (
        "mean of means",
        "ranks were averaged with equal weights, but they had unequal numbers of samples",
        _mean_of_means("samples"),
    ),
    (
        "mean of means",
        "shards were averaged with equal weights, but they differ in size",
        _mean_of_shard_means,
    ),
    ("same data on every rank", "every rank trained on the samples of rank 0", _same_data),
    ("off-by-one accumulation", "the last micro-batch of each rank is missing", _drop_last),
    ("off-by-one accumulation", "the first micro-batch of each rank is missing", _drop_first),
    ("off-by-one accumulation", "the last micro-batch of each rank was counted twice", _last_twice),
    ("stale buffer", "this is the gradient of the step before", _stale),
    ("not cleared", "the gradient of the step before was added", _not_cleared),
    ("no gradient", "the gradient is zero", _nothing),
    ("shared dropout seed", "all ranks drew the random numbers of rank 0", _shared_keys),
)
