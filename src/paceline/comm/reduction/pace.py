"""How many scatters every rank has launched: ranks that gather in backward tell each other beside gathers.

Such a rank may not wait for any scatter: another one may launch it only after a gather that both take part
in. What all have launched comes in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class Launched:
    """Scatters of one reduction in this step.

    Args:
        keep_up: launches zeros up to so many; for a rank that has no more micro-batches.
        here: that this rank has launched.
        everywhere: that every rank had launched when it told last.
    """

    keep_up: Callable[[int], None]
    here: int = 0
    everywhere: int = 0


class Pace:
    """Counts of all reductions of a rank, in an order that is equal on all ranks.

    Args:
        behind_bytes: see the function.
    """

    def __init__(self, behind_bytes: int) -> None:
        self.behind_bytes = behind_bytes
        self._all: list[Launched] = []

    def join(self, keep_up: Callable[[int], None]) -> Launched:
        """Another reduction; see `Launched`."""
        self._all.append(Launched(keep_up))
        return self._all[-1]

    def told(self) -> list[float]:
        """What this rank has launched, as numbers of which a max over ranks is to be heard."""
        here = [float(one.here) for one in self._all]
        return here + [-number for number in here]

    def hear(self, most: Sequence[float], *, is_idle: bool) -> None:
        """The largest of each number on any rank.

        Args:
            is_idle: this rank takes part for others, and launches zeros as far as the first of them is.
        """
        for one, launched in zip(self._all, most[len(self._all) :], strict=True):
            one.everywhere = int(-launched)
        for one, launched in zip(self._all, most[: len(self._all)] if is_idle else (), strict=False):
            one.keep_up(int(launched))


def behind_bytes(blocks: Sequence[int], rest: int) -> int:
    """Bytes of gradients that a rank completes while it does not know whether others have launched them.

    It tells before the backward of a block and hears after it; a rank that has no micro-batch launches zeros
    once it has heard. So these are the gradients of three blocks, and of what lies in none. Ranks that use
    blocks in different orders, or leave some out, know less.

    Args:
        blocks: bytes of each, in their order.
        rest: of what lies in no block.
    """
    return rest + max(sum(blocks[first : first + 3]) for first in range(len(blocks)))


def most_behind(sizes: Sequence[int], behind_bytes: int) -> int:
    """Of buckets of these sizes, in a row, the most that so many bytes lie in; at least two."""
    found = 2
    for first in range(len(sizes)):
        inside, count = 0, 1
        for size in sizes[first + 1 :]:
            if inside >= behind_bytes:
                break
            inside, count = inside + size, count + 1
        found = max(found, count)
    return found
