"""Guess the cause when the summed gradients are right and what became of them is not: divide, clip, rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.verification.diagnose import FITS, UNKNOWN, Diagnosis, name_factor


@dataclass(frozen=True)
class TailEvidence:
    """What is known when the sums are right and the final gradient, or the update, is not.

    Args:
        ratio: final gradient over the oracle's; None if they are not proportional.
        world, num_shards, count: as above.
        clip_norm: the recipe's; None: no clip.
        norm, right_norm: global norm of the mean gradient, by the update step and by the oracle.
        local_norms: norm of each rank's own mean gradient.
        lr, right_lr: the rate that was used, and the one of this update.
        near_lrs: rates of neighbouring updates, by offset.
    """

    ratio: float | None
    world: int
    num_shards: int
    count: float
    clip_norm: float | None
    norm: float
    right_norm: float
    local_norms: Sequence[float]
    lr: float
    right_lr: float
    near_lrs: Mapping[int, float]


def diagnose_tail(e: TailEvidence) -> Diagnosis:
    """The mistake between the reduced sums and the update."""
    if abs(e.lr - e.right_lr) > 1e-9 * max(abs(e.lr), abs(e.right_lr)):
        return _wrong_rate(e)
    if abs(e.norm / e.right_norm - 1) > FITS:
        factor = name_factor(e.norm / e.right_norm, e.world, e.num_shards, e.count)
        return _wrong_norm(e) if factor.cause == "constant factor" else factor
    if e.ratio is None:
        return UNKNOWN
    if e.clip_norm is not None and (e.right_norm > e.clip_norm or e.ratio < 1):
        return _wrong_clip(e, e.clip_norm)
    return name_factor(e.ratio, e.world, e.num_shards, e.count)


def _wrong_rate(e: TailEvidence) -> Diagnosis:
    for offset, rate in e.near_lrs.items():
        if rate != e.right_lr and abs(e.lr - rate) <= 1e-9 * abs(rate):
            text = f"the rate {e.lr:.6g} belongs to the update {offset:+d} from this one"
            return Diagnosis("schedule off by one", text)
    return Diagnosis("wrong learning rate", f"the rate is {e.lr:.6g}, the schedule says {e.right_lr:.6g}")


def _wrong_norm(e: TailEvidence) -> Diagnosis:
    whose = (
        "a rank's own gradient"
        if any(abs(e.norm / n - 1) < FITS for n in e.local_norms)
        else "something else"
    )
    text = f"the norm {e.norm:.6g} is that of {whose}; the global norm is {e.right_norm:.6g}"
    return Diagnosis("wrong clip norm", text)


def _wrong_clip(e: TailEvidence, clip_norm: float) -> Diagnosis:
    multiplier = (e.ratio or 0.0) * min(1.0, clip_norm / e.right_norm)
    factor = name_factor(multiplier, e.world, e.num_shards, e.count)
    if e.right_norm <= clip_norm and factor.cause != "constant factor":
        return factor
    used = clip_norm / multiplier if multiplier else float("inf")
    known = {
        "no clip": 1.0,
        "the local norm of a rank": next((n for n in e.local_norms if abs(n / used - 1) < FITS), 0.0),
        "the norm before the division": e.right_norm * e.count,
    }
    which = next(
        (name for name, n in known.items() if n and abs(n / used - 1) < FITS), f"a norm of {used:.6g}"
    )
    if abs(multiplier - 1.0) < FITS:
        which = "no clip"
    return Diagnosis(
        "wrong clip norm",
        f"the clip used {which}; the global norm is {e.right_norm:.6g}",
        abs(used - e.right_norm),
    )
