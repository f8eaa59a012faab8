"""Which checkpoints stay: the newest, and the best by evaluation loss. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """A whole checkpoint in a folder.

    Args:
        name: of its folder.
        step: steps taken.
        serial: a higher one was saved later.
    """

    name: str
    step: int
    serial: int


def choose_kept(whole: Sequence[Kept], newest: int, best: int, losses: Mapping[int, float]) -> frozenset[str]:
    """Names that stay.

    Args:
        whole: those that can be loaded; whatever is not among them does not count as kept.
        newest: how many of those saved last; one stays at least.
        best: how many of the lowest loss, of those that were evaluated; of equal ones the later.
        losses: evaluation loss by step.
    """
    by_age = sorted(whole, key=lambda kept: kept.serial)
    return frozenset(kept.name for kept in [*by_age[-max(1, newest) :], *by_loss(whole, losses)[:best]])


def by_loss(whole: Sequence[Kept], losses: Mapping[int, float]) -> list[Kept]:
    """Those that were evaluated, the best first; of equal ones the later."""
    scored = [kept for kept in whole if kept.step in losses]
    return sorted(scored, key=lambda kept: (losses[kept.step], -kept.serial))
