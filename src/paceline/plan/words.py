"""A plan in words and as a table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from paceline.plan.parts import LayerMemory, MemoryPlan, Parts, RankMemory
from paceline.report.facts import spell_bytes

_HEAD = ("rank", "stage", *(one.name for one in fields(Parts)), "peak", "in")


def spell_peak(plan: MemoryPlan) -> str:
    """Which rank needs most, when, and for what."""
    largest = plan.largest
    kinds = sorted(asdict(largest.peak).items(), key=lambda kind: -kind[1])
    told = ", ".join(f"{name} {spell_bytes(size)}" for name, size in kinds[:3] if size)
    return f"rank {largest.rank} needs {spell_bytes(plan.peak)} in {_article(largest.when)} ({told})"


def _article(when: str) -> str:
    return when if when.startswith("building") else f"the {when}"


def table_lines(plan: MemoryPlan) -> Iterator[str]:
    """A row for each rank: bytes by kind at the moment of its peak; what no rank has is left out."""
    rows = [_HEAD, *(_row(one) for one in plan.ranks)]
    columns = [c for c in zip(*rows, strict=True) if any(cell != "0 B" for cell in c[1:])]
    if all(one.stage == 0 for one in plan.ranks):
        columns = [c for c in columns if c[0] != "stage"]
    yield from _aligned(list(zip(*columns, strict=True)))


def _row(one: RankMemory) -> tuple[str, ...]:
    sizes = [spell_bytes(size) for size in asdict(one.peak).values()]
    return (str(one.rank), str(one.stage), *sizes, spell_bytes(one.peak.total), one.when)


def layer_lines(plan: MemoryPlan) -> Iterator[str]:
    """A row for each layer of each rank: what stays of it, and what a micro-batch keeps."""
    kinds = [one.name for one in fields(LayerMemory)][1:]
    rows = [("rank", "layer", *kinds)]
    for one in plan.ranks:
        for layer in one.layers:
            sizes = (spell_bytes(getattr(layer, kind)) for kind in kinds)
            rows.append((str(one.rank), layer.layer, *sizes))
    yield from _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def imbalance(plan: MemoryPlan) -> str:
    """How far the ranks are apart, where it is more than a tenth; else empty."""
    peaks = [one.peak.total for one in plan.ranks]
    mean = sum(peaks) / len(peaks)
    if max(peaks) <= 1.1 * mean:
        return ""
    return f"rank {plan.largest.rank} needs {max(peaks) / mean:.2f} times the mean of the ranks"
