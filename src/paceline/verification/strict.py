"""What no comparison shows, since both sides run the user's loss: whether it keeps its own contract.

A `Loss` is a sum over items and their number. So on a sample twice both are doubled, and on two samples both
are the sums of those of each. Looked at in evaluation, without dropout and with the running statistics of
BatchNorm: a loss that couples the samples of a batch by intent (contrastive, ranking) is none of one sample,
and depends on how a batch is cut into shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.data import to_device
from paceline.verification.compare import UNIT_ROUNDOFF, Finding
from paceline.verification.diagnose import Diagnosis
from paceline.verification.oracle import Oracle
from paceline.verification.plain_micro_batches import collated, drawn_from, read_samples
from paceline.verification.preflight import Fault, sha_of
from paceline.verification.strict_gradient import look_at_gradient
from paceline.verification.strict_update import look_at_update

_SLACK = 1e4  # roundings of a forward that takes other kernels for another batch size


def look_at_shared(oracle: Oracle, compute: str, world: int) -> Fault | None:
    """The first fault of the loss, of its gradient, or of one update."""
    return (
        look_at_loss(oracle, compute, world)
        or look_at_gradient(oracle, world)
        or look_at_update(oracle, world)
    )


def look_at_loss(oracle: Oracle, compute: str, world: int) -> Fault | None:
    """Whether totals and counts add up over samples.

    Args:
        compute: type of the arithmetic.
        world: number of ranks, all of which find the same.
    """
    if len(oracle.task.data) < 2:
        return None
    with drawn_from(0):
        one, other = read_samples(oracle.task, [0, 1])  # once: data that augments gives others every time
    if _mixes(oracle, [one, other]):
        return None
    first, second, twice, both = (
        _loss(oracle, samples) for samples in ([one], [other], [one, one], [one, other])
    )
    near = min(0.3, _SLACK * UNIT_ROUNDOFF[compute])
    for name, found, right in (
        ("a sample twice", twice, (2 * first[0], 2 * first[1])),
        ("two samples", both, (first[0] + second[0], first[1] + second[1])),
    ):
        for place, quantity in enumerate(("count", "total")):
            seen, wanted = found[1 - place], right[1 - place]
            size = max(abs(seen), abs(wanted), abs(first[0]) * place)
            if abs(seen - wanted) > near * size:
                return _fault(f"{quantity} of {name}", seen, wanted, near * size, world, first, found)
    return None


def _fault(
    name: str,
    seen: float,
    wanted: float,
    bound: float,
    world: int,
    one: Sequence[float],
    two: Sequence[float],
) -> Fault:
    text = f"the loss's {name} is {seen:.6g}; from one sample alone it would be {wanted:.6g}"
    cause = "the loss does not add up"
    if two[1] == one[1]:
        cause = "the loss counts a batch as one item"
        text += ": return Loss(sum, number of items), or Loss.mean(mean, number of items)"
    elif abs(two[0]) < 1.5 * abs(one[0]):
        cause = "the loss is a mean"
        text += ": it is a mean where a sum belongs; return Loss.mean(value, count)"
    finding = Finding(-1, "loss", name, (abs(seen - wanted),) * world, bound)
    return finding, Diagnosis(cause, text)


def _mixes(oracle: Oracle, samples: list[Any]) -> bool:
    """Whether the collate function draws: what it makes of two samples is not theirs by intent."""
    found = set()
    for seed in range(3):
        with drawn_from(seed):
            found.add(sha_of(collated(oracle.task, samples)))
    return len(found) > 1


def _loss(oracle: Oracle, samples: list[Any]) -> tuple[float, float]:
    """Total and count of some samples, in evaluation."""
    batch: Any = to_device(collated(oracle.task, samples), oracle.device)
    before = oracle.buffers()
    oracle.model.eval()
    with torch.no_grad(), oracle.autocast():
        loss = oracle.task.loss(oracle.model, batch)
    oracle.set_buffers(before)
    return float(loss.total), float(loss.count)
