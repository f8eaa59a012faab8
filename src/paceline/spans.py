"""Spans: places on one dimension of a tensor, in one run or several. Pure.

The heads of one rank in a fused query, key and value are three runs of rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

Span = tuple[int, ...]
"""Where each run begins and ends, in turn and ascending: (2, 5) is one run, (0, 2, 6, 8) two."""


def runs_of(span: Span) -> list[tuple[int, int]]:
    """First place of each run, and the place after its last one."""
    return list(zip(span[::2], span[1::2], strict=True))


def length_of(span: Span) -> int:
    """How many places a span has."""
    return sum(span[1::2]) - sum(span[::2])


def span_of(runs: Iterable[tuple[int, int]]) -> Span:
    """The span of ascending runs; empty ones are left out, and runs that touch are one."""
    found: list[int] = []
    for start, stop in runs:
        if start == stop:
            continue
        if found and found[-1] == start:
            found[-1] = stop
        else:
            found += [start, stop]
    return tuple(found) or (0, 0)


def selected(span: Span) -> slice | list[int]:
    """What selects a span from a dimension: a slice, if it is one run."""
    return slice(*span) if len(span) == 2 else [i for run in runs_of(span) for i in range(*run)]


def indexed(index: slice | list[int], size: int) -> Span:
    """The inverse of `selected`, of a dimension of some size."""
    if isinstance(index, slice):
        start, stop, _ = index.indices(size)
        return start, max(start, stop)
    return span_of((i, i + 1) for i in index)


def own_part(tensor: Tensor, dim: int, span: Span) -> Tensor:
    """The part of a tensor of which this rank may hold all: what is frozen, or repeated, is."""
    if tensor.shape[dim] == length_of(span):
        return tensor
    return tensor[(slice(None),) * dim + (selected(span),)]


def place_of(index: int, span: Span) -> int:
    """How many places of a span lie before one of its places."""
    return sum(max(0, min(stop, index) - start) for start, stop in runs_of(span))


def stretch(span: Span, start: int, stop: int) -> Span:
    """Some neighbouring places of a span, by their number in it."""
    found, before = [], 0
    for first, last in runs_of(span):
        a, b = max(start - before, 0), min(stop - before, last - first)
        found.append((first + a, first + max(a, b)))
        before += last - first
    kept = span_of(found)
    return kept if length_of(kept) else (span[0] + start, span[0] + start)
