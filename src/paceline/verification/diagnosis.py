"""Diagnosis of a divergence: the likely cause, from the shape of the error.

The oracle can compute the gradient of every shard alone, so each known mistake of a reduction has a formula:
the gradient that this mistake would give. If the formula fits the observed gradient, it names the cause. If
the sums are right, norm, clip and learning rate are checked in the same way; if they are right too, the
oracle repeats the update with each known mistake of an optimizer.

A diagnosis is a guess: it does not decide whether a verification fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.data.work import split_evenly
from paceline.verification.oracle_update import ReferenceUpdate

if TYPE_CHECKING:
    from paceline.verification.verifier import StrategyVerifier

FlatGradients = Tensor
"""Gradients of some tensors, flattened and joined, float64 [N]."""
FIT_TOLERANCE = 1e-3
# Relative error of sums that differ in the order of additions only.
_SAME = 1e-6
# Relative rounding error of sums in float16, and mostly in bfloat16.
_DIGITS_LOST = 1e-3


@dataclass(frozen=True)
class PartitionSite:
    """The faults of a replica that several ranks compute together.

    Args:
        axes: the axes of the strategy that split the computation, as text: "tensor=2".
        loss_differs: the loss is wrong, so the forward is.
        first_wrong: the wrong tensor that backward reaches first.
        only_tied: all wrong tensors are held by several stages.
    """

    axes: str
    loss_differs: bool
    first_wrong: str
    only_tied: bool

    def diagnose(self) -> ErrorDiagnosis | None:
        """Return where the mistake is; None if no axis splits the computation."""
        if self.only_tied:
            text = f"only tensors that several stages hold are wrong, as '{self.first_wrong}'"
            return ErrorDiagnosis("tied gradient not summed", text)
        if not self.axes:
            return None
        if self.loss_differs:
            text = (
                f"the loss is wrong: compare outputs of modules under {self.axes} with those of one process"
            )
            return ErrorDiagnosis("wrong forward of the partition", text)
        text = (
            f"the loss is right and gradients are not, '{self.first_wrong}' first: look at the backward under"
            f" {self.axes} behind it"
        )
        return ErrorDiagnosis("wrong backward of the partition", text)


@dataclass(frozen=True)
class GradientEvidence:
    """The gradients of the first diverging step, as sums that are not yet divided.

    Args:
        world: number of replicas.
        shards: the oracle's gradient of each shard, in order.
        samples, counts: numbers of samples and of items of each shard.
        observed: the gradient that each rank gave to its update step.
        previous: the oracle's summed gradient of the step before; None in the first step.
        with_first_keys: gradient of each shard if all replicas used the keys of the first; None if equal.
        scale: factor of the losses before backward.
        site: where the wrong values can come from if no formula fits; see `PartitionSite`.
    """

    world: int
    shards: Sequence[FlatGradients]
    samples: Sequence[int]
    counts: Sequence[float]
    observed: Sequence[FlatGradients]
    previous: FlatGradients | None = None
    with_first_keys: Sequence[FlatGradients] | None = None
    scale: float = 1.0
    site: PartitionSite | None = None

    @property
    def right(self) -> FlatGradients:
        """Return the sum over all shards."""
        return torch.stack(list(self.shards)).sum(0)

    def of_rank(self, rank: int) -> FlatGradients:
        """Return the sum over the shards of one rank."""
        mine = split_evenly(len(self.shards), self.world, rank)
        return torch.stack([self.shards[i] for i in mine]).sum(0)

    def sum_over_ranks(self, part: Callable[[int], FlatGradients]) -> FlatGradients:
        """Return the sum of one gradient per rank."""
        return torch.stack([part(r) for r in range(self.world)]).sum(0)


@dataclass(frozen=True)
class ErrorDiagnosis:
    """A named cause, with an explanation and the relative residual of its formula (0: it fits exactly)."""

    cause: str
    explanation: str
    residual: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)


UNKNOWN_CAUSE = ErrorDiagnosis("unknown", "no known mistake fits; start with the first tensor and rank", 1.0)

NOT_REPEATED = ErrorDiagnosis(
    "the task is not deterministic",
    "run twice from the same weights and seeds, the oracle gets the losses {:.9g} and {:.9g}: the data, the"
    " model or the loss uses a generator that is not seeded, or depends on earlier calls",
)

DIFFERENT_START = ErrorDiagnosis(
    "different start", "initial values differ: key weights by name, or broadcast them", 0.0
)

ACTOR_DIFFERS = ErrorDiagnosis(
    "the learner is not the actor",
    "log-probabilities of the first minibatch have other bits than when its rows were made: dropout or"
    " BatchNorm in the policy, fewer than four rows in a micro-batch or a group of environments, or other"
    " threads",
    0.0,
)


def diagnose_gradient(evidence: GradientEvidence) -> ErrorDiagnosis:
    """Return the mistake whose formula fits the observed sums best."""
    if all(_distance(observed, evidence.right) < _SAME for observed in evidence.observed):
        text = "the sums of the gradients are right, and the number of items by which they are divided is not"
        return ErrorDiagnosis("wrong count of items", text)
    fitting = [
        ErrorDiagnosis(cause, text, residual)
        for cause, text, predict in _FORMULAS
        if (residual := _residual(evidence, predict)) < FIT_TOLERANCE
    ]
    # Several formulas can fit, as for equal shards: the smallest residual is the most likely cause.
    if fitting:
        return min(fitting, key=lambda d: d.residual)
    factor = _constant_factor(evidence)
    if factor.cause not in (UNKNOWN_CAUSE.cause, "constant factor"):
        return factor
    if _is_of_single_ranks(evidence):
        text = "every value is that of a single rank: the parts of ranks were not summed"
        return ErrorDiagnosis("not reduced", text)
    return (evidence.site.diagnose() if evidence.site is not None else None) or factor


def _is_of_single_ranks(evidence: GradientEvidence) -> bool:
    """Return whether each value of the sum is that of some rank alone, as for parts that were not summed."""
    if evidence.world == 1:
        return False
    right, observed = evidence.right, evidence.observed[0]
    ranks = torch.stack([evidence.of_rank(r) for r in range(evidence.world)])
    nearest = (ranks - observed).abs().amin(0)
    return float(nearest.norm()) < FIT_TOLERANCE * float(right.norm())


def _residual(
    evidence: GradientEvidence, predict: Callable[[GradientEvidence, int], FlatGradients | None]
) -> float:
    worst = 0.0
    for rank, observed in enumerate(evidence.observed):
        predicted = predict(evidence, rank)
        if predicted is None:
            return 1.0
        worst = max(worst, _distance(observed, predicted))
    return worst


def _distance(observed: FlatGradients, predicted: FlatGradients) -> float:
    scale = max(float(predicted.norm()), float(observed.norm()), 1e-300)
    return float((observed - predicted).norm()) / scale


def _constant_factor(evidence: GradientEvidence) -> ErrorDiagnosis:
    right, observed = evidence.right, evidence.observed[0]
    factor = float(observed @ right) / max(float(right @ right), 1e-300)
    if abs(factor) < 1e-6 or _distance(observed, factor * right) > FIT_TOLERANCE:
        return UNKNOWN_CAUSE
    error = _distance(observed, right)
    if error < _DIGITS_LOST:
        text = f"the relative error is about {error:.1e}: summed or sent in a dtype with fewer digits"
        return ErrorDiagnosis("digits lost", text, error)
    if evidence.scale != 1 and abs(factor * evidence.scale - 1) < FIT_TOLERANCE:
        text = f"the gradient is {factor:.6g} times the right one: the loss was not scaled before backward"
        return ErrorDiagnosis("loss not scaled", text)
    return name_factor(factor, evidence.world, len(evidence.shards), sum(evidence.counts))


def name_factor(factor: float, world: int, num_shards: int, count: float) -> ErrorDiagnosis:
    """Name a constant factor between an observed gradient and the right one."""
    known = {
        "sum instead of mean": (world, "is the number of replicas: it was summed, not averaged"),
        "divided twice": (1 / world, "is 1 / the number of replicas: it was divided twice"),
        "accumulation not divided": (num_shards / world, "is the number of accumulated micro-batches"),
        "not divided by the count": (count, "is the number of items: it was never divided"),
    }
    for cause, (value, text) in known.items():
        if value != 1 and abs(factor / value - 1) < FIT_TOLERANCE:
            return ErrorDiagnosis(cause, f"the gradient is {factor:.6g} times the right one, which {text}")
    return ErrorDiagnosis("constant factor", f"the gradient is {factor:.6g} times the right one")


def _local_only(e: GradientEvidence, rank: int) -> FlatGradients:
    return e.of_rank(rank)


def _mean_of_means(weights: str) -> Callable[[GradientEvidence, int], FlatGradients | None]:
    def predict(e: GradientEvidence, rank: int) -> FlatGradients | None:
        sizes: Sequence[float] = getattr(e, weights)
        shares = [sum(sizes[i] for i in split_evenly(len(sizes), e.world, r)) for r in range(e.world)]
        # With equal shares the mistake has no effect, so it cannot be the cause.
        if min(shares) == max(shares) or min(shares) == 0:
            return None
        whole = sum(shares)
        return e.sum_over_ranks(lambda r: e.of_rank(r) * (whole / (e.world * shares[r])))

    return predict


def _mean_of_shard_means(e: GradientEvidence, rank: int) -> FlatGradients | None:
    if min(e.counts) == max(e.counts):
        return None
    whole = sum(e.counts) / len(e.counts)
    return torch.stack([g * (whole / c) for g, c in zip(e.shards, e.counts, strict=True)]).sum(0)


def _same_data(e: GradientEvidence, rank: int) -> FlatGradients | None:
    if e.world == 1:
        return None
    return e.world * e.of_rank(0)


def _without(e: GradientEvidence, index: int) -> FlatGradients | None:
    shard_ranges = [split_evenly(len(e.shards), e.world, r) for r in range(e.world)]
    missing = [e.shards[shard_range[index]] for shard_range in shard_ranges if len(shard_range) > 1]
    return e.right - torch.stack(missing).sum(0) if missing else None


def _drop_last(e: GradientEvidence, rank: int) -> FlatGradients | None:
    return _without(e, -1)


def _drop_first(e: GradientEvidence, rank: int) -> FlatGradients | None:
    return _without(e, 0)


def _only_last(e: GradientEvidence, rank: int) -> FlatGradients | None:
    shard_ranges = [split_evenly(len(e.shards), e.world, r) for r in range(e.world)]
    if max(map(len, shard_ranges)) < 2:
        return None
    return torch.stack([e.shards[shard_range[-1]] for shard_range in shard_ranges if shard_range]).sum(0)


def _rank_left_out(e: GradientEvidence, rank: int) -> FlatGradients | None:
    """Return the sum without one rank; the one whose absence fits best."""
    if e.world == 1:
        return None
    sums = [e.right - e.of_rank(r) for r in range(e.world)]
    # By the first rank, since the same one is missing on all ranks.
    return min(sums, key=lambda g: _distance(e.observed[0], g))


def _last_twice(e: GradientEvidence, rank: int) -> FlatGradients | None:
    dropped = _without(e, -1)
    return None if dropped is None else 2 * e.right - dropped


def _stale(e: GradientEvidence, rank: int) -> FlatGradients | None:
    return e.previous


def _not_cleared(e: GradientEvidence, rank: int) -> FlatGradients | None:
    return None if e.previous is None else e.right + e.previous


def _nothing(e: GradientEvidence, rank: int) -> FlatGradients:
    return torch.zeros_like(e.right)


def _shared_keys(e: GradientEvidence, rank: int) -> FlatGradients | None:
    return None if e.with_first_keys is None else torch.stack(list(e.with_first_keys)).sum(0)


_FORMULAS: tuple[tuple[str, str, Callable[[GradientEvidence, int], FlatGradients | None]], ...] = (
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
    ("accumulation lost", "each rank kept the gradient of its last micro-batch alone", _only_last),
    ("a rank is left out", "the gradient of one rank is missing in the sum of all ranks", _rank_left_out),
    ("stale buffer", "this is the gradient of the step before", _stale),
    ("not cleared", "the gradient of the step before was added", _not_cleared),
    ("no gradient", "the gradient is zero", _nothing),
    ("shared dropout seed", "all ranks drew the random numbers of rank 0", _shared_keys),
)


@dataclass(frozen=True)
class UpdateEvidence:
    """The numbers of an update whose summed gradients are right.

    Args:
        ratio: final gradient / final gradient of the oracle; None if they are not proportional.
        world, num_shards, count: numbers of replicas, shards and items of the step.
        clip_norm, clip_value: clips of the recipe; None: no clip.
        norm, right_norm: global norm of the mean gradient, in the update step and in the oracle.
        local_norms: norms of each rank's own gradient, divided by all items and by its own.
        lr, right_lr: the learning rate that was used, and that of this update.
        near_lrs: learning rates of neighbouring updates, by offset.
    """

    ratio: float | None
    world: int
    num_shards: int
    count: float
    clip_norm: float | None
    clip_value: float | None
    norm: float
    right_norm: float
    local_norms: Sequence[float]
    lr: float
    right_lr: float
    near_lrs: Mapping[int, float]


def diagnose_after_reduction(e: UpdateEvidence) -> ErrorDiagnosis:
    """Return the mistake between the reduced sums and the update."""
    if abs(e.lr - e.right_lr) > 1e-9 * max(abs(e.lr), abs(e.right_lr)):
        return _wrong_rate(e)
    if abs(e.norm / e.right_norm - 1) > FIT_TOLERANCE:
        factor = name_factor(e.norm / e.right_norm, e.world, e.num_shards, e.count)
        return _wrong_norm(e) if factor.cause == "constant factor" else factor
    if e.ratio is None and e.clip_value is not None:
        text = f"the final gradient is not the mean gradient with values limited to {e.clip_value:.6g}"
        return ErrorDiagnosis("wrong clip value", text)
    if e.ratio is None:
        return UNKNOWN_CAUSE
    if e.clip_norm is not None and (e.right_norm > e.clip_norm or e.ratio < 1):
        return _wrong_clip(e, e.clip_norm)
    return name_factor(e.ratio, e.world, e.num_shards, e.count)


def _wrong_rate(e: UpdateEvidence) -> ErrorDiagnosis:
    for offset, rate in e.near_lrs.items():
        if rate != e.right_lr and abs(e.lr - rate) <= 1e-9 * abs(rate):
            text = f"{e.lr:.6g} is the learning rate of another update (offset {offset:+d})"
            return ErrorDiagnosis("schedule off by one", text)
    return ErrorDiagnosis(
        "wrong learning rate", f"the learning rate is {e.lr:.6g}, in the schedule it is {e.right_lr:.6g}"
    )


def _wrong_norm(e: UpdateEvidence) -> ErrorDiagnosis:
    is_local = any(abs(e.norm / n - 1) < FIT_TOLERANCE for n in e.local_norms)
    source = "is that of one rank's gradient" if is_local else "is wrong"
    text = f"the norm {e.norm:.6g} {source}; the global norm is {e.right_norm:.6g}"
    return ErrorDiagnosis("wrong clip norm", text)


def _wrong_clip(e: UpdateEvidence, clip_norm: float) -> ErrorDiagnosis:
    multiplier = (e.ratio or 0.0) * min(1.0, clip_norm / e.right_norm)
    factor = name_factor(multiplier, e.world, e.num_shards, e.count)
    if e.right_norm <= clip_norm and factor.cause != "constant factor":
        return factor
    used = clip_norm / multiplier if multiplier else float("inf")
    known = {
        "no clip": 1.0,
        "the local norm of a rank": next(
            (n for n in e.local_norms if abs(n / used - 1) < FIT_TOLERANCE), 0.0
        ),
        "the norm before the division": e.right_norm * e.count,
    }
    which = next(
        (name for name, n in known.items() if n and abs(n / used - 1) < FIT_TOLERANCE),
        f"a norm of {used:.6g}",
    )
    if abs(multiplier - 1.0) < FIT_TOLERANCE:
        which = "no clip"
    return ErrorDiagnosis(
        "wrong clip norm",
        f"the clip used {which}; the global norm is {e.right_norm:.6g}",
        abs(used - e.right_norm),
    )


# Relative to the change of the parameters.
_UPDATE_TOLERANCE = 1e-2
_UNCOMPARED_OPTIONS = ("params", "param_names", "lr", "initial_lr")


def diagnose_update(v: StrategyVerifier, update: int, reference: ReferenceUpdate) -> ErrorDiagnosis:
    """Return the mistake between the final gradient and the parameters after the step."""
    failure = v.report.failure
    if failure is not None and failure.errors[0] <= failure.bound:
        wrong = [rank for rank, error in enumerate(failure.errors) if error > failure.bound]
        text = f"rank 0 is right and ranks {wrong} are not: their update differs, or its result was changed"
        return ErrorDiagnosis("ranks drifted apart", text)
    return _other_options(v) or _other_update(v, update, reference)


def _other_options(v: StrategyVerifier) -> ErrorDiagnosis | None:
    pairs = zip(v.session.state.optimizer.param_groups, v.oracle.optimizer.param_groups, strict=False)
    for number, (actual, expected) in enumerate(pairs):
        for key in expected.keys() - set(_UNCOMPARED_OPTIONS):
            if actual.get(key) != expected[key]:
                text = f"'{key}' of group {number} is {actual.get(key)} and should be {expected[key]}"
                return ErrorDiagnosis("wrong optimizer options", text)
    return None


def _other_update(v: StrategyVerifier, update: int, reference: ReferenceUpdate) -> ErrorDiagnosis:
    names = [f"model/{n}" for n in reference.final]
    observed = _change(reference.before, v.now, names)
    v.oracle_state.load(reference.before, reference.scalars)
    _step_once(v, update, reference)
    right = _change(reference.before, v.oracle_state.tensors(), names)
    for cause, text, variant in _VARIANTS:
        v.oracle_state.load(reference.before, reference.scalars)
        variant(v, update, reference)
        predicted = _change(reference.before, v.oracle_state.tensors(), names)
        scale = max(float(observed.norm()), float(predicted.norm()), 1e-300)
        # A mistake that changes nothing, such as a lost state in the first update, explains nothing.
        if torch.equal(predicted, right):
            continue
        if float((observed - predicted).norm()) <= _UPDATE_TOLERANCE * scale:
            return ErrorDiagnosis(cause, text)
    v.oracle_state.load(reference.before, reference.scalars)
    _step_once(v, update, reference)
    if _is_in_part(observed, right):
        text = "some values are updated and all others are as before: the parts of other ranks did not arrive"
        return ErrorDiagnosis("parameters not gathered", text)
    if _is_scaled_by_part(v, reference):
        text = (
            "each part of a tensor has the right update, times a factor of its own: norms are those of the"
            " parts, not of the whole tensor"
        )
        return ErrorDiagnosis("norm per shard", text)
    return ErrorDiagnosis(
        "different update", "gradients agree, but the update does not: check the state of the optimizer"
    )


def _is_in_part(observed: Tensor, predicted: Tensor) -> bool:
    """Return whether an update is right where it changed values, and left out others."""
    changed = observed != 0
    left_out = float((predicted[~changed]).norm())
    wrong = float((observed[changed] - predicted[changed]).norm())
    return bool(changed.any()) and wrong <= _UPDATE_TOLERANCE * left_out


def _is_scaled_by_part(v: StrategyVerifier, reference: ReferenceUpdate) -> bool:
    """Return whether the update of every part of a split tensor is a multiple of the right one, and some
    multiples differ from 1.
    """
    factors: list[float] = []
    for name, placement in v.session.runner.sharded_model.held.items():
        parts = [slot for slot in placement.parts if slot is not None and not slot.is_whole]
        key = f"model/{name}"
        for slot in parts if name in reference.final else ():
            before = reference.before[key][slot.index]
            observed = _change({key: before}, {key: v.now[key][slot.index]}, [key])
            predicted = _change({key: before}, {key: v.oracle_state.tensors()[key][slot.index]}, [key])
            factor = float(observed @ predicted) / max(float(predicted @ predicted), 1e-300)
            if float((observed - factor * predicted).norm()) > _UPDATE_TOLERANCE * float(observed.norm()):
                return False
            factors.append(factor)
    return any(abs(factor - 1) > _UPDATE_TOLERANCE for factor in factors)


def _change(before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: list[str]) -> Tensor:
    changes = [after[n].detach().to(torch.float64) - before[n].to(torch.float64) for n in names]
    return torch.cat(
        [torch.view_as_real(p).reshape(-1) if p.is_complex() else p.reshape(-1) for p in changes]
    )


def _step_once(v: StrategyVerifier, update: int, reference: ReferenceUpdate) -> None:
    for name, p in v.oracle.model.named_parameters():
        p.grad = reference.final[name].clone() if name in reference.final else None
    v.oracle.update(update)


def _step_twice(v: StrategyVerifier, update: int, reference: ReferenceUpdate) -> None:
    _step_once(v, update, reference)
    _step_once(v, update, reference)


def _step_without_state(v: StrategyVerifier, update: int, reference: ReferenceUpdate) -> None:
    v.oracle.optimizer.state.clear()
    _step_once(v, update, reference)


def _no_step(v: StrategyVerifier, update: int, reference: ReferenceUpdate) -> None:
    """Leave the parameters as they are."""


_VARIANTS: tuple[tuple[str, str, Callable[[Any, int, ReferenceUpdate], None]], ...] = (
    ("stepped twice", "the optimizer took its step twice", _step_twice),
    ("optimizer state lost", "the optimizer started from an empty state", _step_without_state),
    ("not updated", "the step of the optimizer did not change the parameters, or was undone", _no_step),
)
