"""What the memory of a job is, as a function of the blocks that are computed again.

It is the largest of some sums, one for each moment of a step: what there would be without recomputation, less
what each block that is computed again does not keep then. Two plans give them all, one without and one with
every block computed again. While a block itself is at work, it is as in the plan that does with it the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.plan.moments import Instant
from paceline.plan.planner import Planner
from paceline.plan.rehearsal import Footprint

Saved = Sequence[Sequence[tuple[int, int]]]
"""By chunk and call of a layer, its block (-1: none), and the bytes that it keeps less until its backward."""


@dataclass(frozen=True)
class Sum:
    """Bytes at one moment.

    Args:
        num_bytes: if nothing is computed again.
        saved: by block, less if it is.
        only: (block, whether it is computed again); the moment is there only then. None: always.
    """

    num_bytes: int
    saved: tuple[int, ...]
    only: tuple[int, bool] | None = None


def most_bytes(sums: Sequence[Sum], again: Sequence[bool]) -> int:
    """The memory of a job.

    Args:
        again: by block, whether it is computed again.
    """
    there = [one for one in sums if one.only is None or again[one.only[0]] == one.only[1]]
    return max(one.num_bytes - sum(s for s, a in zip(one.saved, again, strict=True) if a) for one in there)


def sums_by_stage(plain: Planner, lean: Planner, num_blocks: int) -> dict[int, list[Sum]]:
    """By stage of a pipeline, the moments of its ranks.

    Args:
        plain, lean: of one recipe, without recomputation and with that of every block.
        num_blocks: of the model.
    """
    found: dict[int, dict[tuple[tuple[int, ...], tuple[int, bool] | None], int]] = {}
    for (place, work, walks), (_, less, others) in zip(plain.walks(), lean.walks(), strict=True):
        pairs = zip(work.footprints, less.footprints, strict=True)
        saved = [_saved(a, b, num_blocks) for a, b in pairs]
        most = found.setdefault(place.coordinates["pipeline"], {})
        for again, ways in ((False, walks), (True, others)):
            for one in (_sum(i, saved, num_blocks, again) for way in ways for i in way.instants()):
                key = one.saved, one.only
                most[key] = max(one.num_bytes, most.get(key, 0))
    return {
        stage: [Sum(size, saved, only) for (saved, only), size in most.items() if only != _NEVER]
        for stage, most in found.items()
    }


_NEVER = (-1, True)
"""Between blocks a job is as in the plan without recomputation."""


def _saved(plain: Footprint, lean: Footprint, num_blocks: int) -> list[tuple[int, int]]:
    """By call of a layer, its block, and what it keeps less; (-1, 0) if it is none."""
    calls = [entry.layer if entry.layer < num_blocks else -1 for entry in plain.entries]
    kept, less = (iter(_kept(one, calls)) for one in (plain, lean))
    return [(-1, 0) if block < 0 else (block, next(kept) - next(less)) for block in calls]


def _kept(footprint: Footprint, calls: Sequence[int]) -> list[int]:
    """By call of a block, bytes that have come from its begin to that of the next."""
    lives = [entry.live for entry, block in zip(footprint.entries, calls, strict=True) if block >= 0]
    return [after - before for before, after in pairwise([*lives, footprint.kept])]


def _sum(instant: Instant, saved: Saved, num_blocks: int, again: bool) -> Sum:
    call, inside = divmod(instant.place, 2)
    less = [0] * num_blocks
    for block, size in _still_kept(instant, saved, call):
        if block >= 0:
            less[block] += size
    own = saved[instant.chunk][call][0] if inside else -1
    only = (own, again) if own >= 0 else (_NEVER if again else None)
    return Sum(instant.parts.total + (sum(less) if again else 0), tuple(less), only)


def _still_kept(instant: Instant, saved: Saved, call: int) -> Iterator[tuple[int, int]]:
    """Of every call whose activations are there, other than of the one that is at work."""
    yield from saved[instant.chunk][:call]
    for number, calls in zip(instant.flying, saved, strict=True):
        yield from ((block, number * size) for block, size in calls)
