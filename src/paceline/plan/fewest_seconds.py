"""Which blocks to compute again so that the memory keeps a budget in the least extra time. Pure.

Block by block there are two ways on from each choice so far. What cannot keep the budget any more, or takes
longer than a choice that keeps it, is left out; so the answer for few blocks is that of trying everything.
For many blocks only the choices that need least memory among those of about a time are gone on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.plan.savings import Sum

_ALL = 4096
"""Choices that are gone on with, whatever they are: as many as there are of 12 blocks."""
_OF_A_TIME = 16
_TIMES = 500


class _Choices(NamedTuple):
    """C choices for the first blocks.

    Args:
        seconds: more than without recomputation, float64 [C].
        again: which blocks, bool [C, L].
        use: bytes by moment, float64 [C, M]; -inf where that moment is not there.
    """

    seconds: Tensor
    again: Tensor
    use: Tensor

    def where(self, rows: Tensor) -> _Choices:
        return _Choices(*(t[rows] for t in self))


def fewest_seconds(seconds: Sequence[float], sums: Sequence[Sum], budget: int) -> list[int] | None:
    """Numbers of blocks, ascending; None: no choice keeps the budget.

    Args:
        seconds: of each block, to compute it again.
        sums: the memory; see `most_bytes`.
        budget: bytes.
    Exactness: up to 12 blocks the least time of all choices, and of those least memory;
        tests/unit/plan/test_recompute_choice.py.
    """
    kept, again = (_uses(sums, len(seconds), way) for way in (False, True))
    least, rest = _from_here_on(torch.minimum(kept, again)), _from_here_on(kept)
    begun = torch.tensor([[one.num_bytes for one in sums]], dtype=torch.float64)
    choices = _Choices(
        torch.zeros(1, dtype=torch.float64), torch.zeros(1, len(seconds), dtype=torch.bool), begun
    )
    best: tuple[float, float, list[int]] | None = None
    for block in range(len(seconds) + 1):
        whole = choices.use + rest[block]
        fits = (whole <= budget).all(1)
        found = _best(choices.where(fits), whole[fits])
        best = found if best is None or (found is not None and found[:2] < best[:2]) else best
        may_fit = ~fits & (choices.use + least[block] <= budget).all(1)
        may_win = torch.ones_like(fits) if best is None else choices.seconds <= best[0]
        choices = choices.where(may_fit & may_win)
        if block < len(seconds):
            choices = _both_ways(_thinned(choices, rest[block]), block, seconds[block], kept, again)
    return None if best is None else best[2]


def _uses(sums: Sequence[Sum], num_blocks: int, again: bool) -> Tensor:
    """By block, and by moment, what it adds there if it is computed again, or not, [L + 1, M]."""
    found = torch.zeros(num_blocks + 1, len(sums), dtype=torch.float64)
    for moment, one in enumerate(sums):
        if again:
            found[:-1, moment] = -torch.tensor(one.saved, dtype=torch.float64)
        if one.only is not None and one.only[1] != again:
            found[one.only[0], moment] = -torch.inf
    return found


def _from_here_on(uses: Tensor) -> Tensor:
    return uses.flip(0).cumsum(0).flip(0)


def _best(choices: _Choices, use: Tensor) -> tuple[float, float, list[int]] | None:
    """Seconds, bytes and blocks of the first in this order; None: there are no choices."""
    if not len(choices.seconds):
        return None
    peaks = use.max(1).values
    keys = list(zip(choices.seconds.tolist(), peaks.tolist(), strict=True))
    first = min(range(len(keys)), key=keys.__getitem__)
    return *keys[first], choices.again[first].nonzero().flatten().tolist()


def _both_ways(choices: _Choices, block: int, seconds: float, kept: Tensor, again: Tensor) -> _Choices:
    marked = choices.again.clone()
    marked[:, block] = True
    return _Choices(
        torch.cat([choices.seconds + seconds, choices.seconds]),
        torch.cat([marked, choices.again]),
        torch.cat([choices.use + again[block], choices.use + kept[block]]),
    )


def _thinned(choices: _Choices, rest: Tensor) -> _Choices:
    """Of those of about a time, the ones that need least as they are."""
    if len(choices.seconds) <= _ALL:
        return choices
    by_bytes = choices.where((choices.use + rest).max(1).values.argsort(stable=True))
    times = (by_bytes.seconds * (_TIMES / by_bytes.seconds.max())).round()
    order = times.argsort(stable=True)
    _, sizes = times[order].unique_consecutive(return_counts=True)
    within = torch.cat([torch.arange(int(n)) for n in sizes])
    return by_bytes.where(order[within < _OF_A_TIME])
