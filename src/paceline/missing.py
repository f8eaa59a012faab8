"""Waiting for other members, and the words for those who do not come or are gone.

Invariant: every wait has a deadline and names the ranks that it is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import CommunicationError, DeadlineError
from paceline.store import Late

if TYPE_CHECKING:
    from paceline.store.torch_store import Store

TELL_SECONDS = 10.0


@dataclass(frozen=True)
class Patience:
    """How long to wait in the set-up, and who is told now and then which ranks are missing."""

    seconds: float
    say: Callable[[str], object] = lambda text: None


def await_members(
    store: Store, keys: Sequence[str], members: Sequence[int], what: str, patience: Patience
) -> list[bytes]:
    """The values of `keys`, one for each rank, when all are there.

    Args:
        what: the rank has done that has set its key, as in "built the task".
    Raises:
        DeadlineError: some ranks have not set theirs in time; names them.
        Lost: some of `members` are gone.
    """
    began = time.monotonic()
    while True:
        left = began + patience.seconds - time.monotonic()
        try:
            return store.await_keys(keys, max(0.0, min(left, TELL_SECONDS)), members)
        except Late as late:
            ranks = [rank for rank, key in enumerate(keys) if key in late.keys]
            missing, has = names(ranks), "have" if len(ranks) > 1 else "has"
            if left <= TELL_SECONDS:
                raise DeadlineError(
                    f"{missing} {has} not {what} within {patience.seconds:g} s",
                    next_step="look at what that rank does, or raise runtime.setup_deadline_seconds",
                ) from late
            passed = time.monotonic() - began
            patience.say(f"waiting until {missing} {has} {what}: {passed:.0f} s of {patience.seconds:g} s")


def gone(members: Sequence[int], lost: Sequence[int], when: str) -> CommunicationError:
    """What to raise when members have left."""
    ranks = [rank for rank, number in enumerate(members) if number in lost]
    return CommunicationError(
        f"{names(ranks)} left {when}", next_step="look at the first rank that ended: it is the cause"
    )


def names(ranks: Sequence[int]) -> str:
    """As in "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
