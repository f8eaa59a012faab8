"""Fragments of the parameters, and when they travel; one by itself. See `streamed`.

Source: Douillard et al. 2025, Streaming DiLoCo with overlapping communication, arXiv:2501.18512, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.comm import Net, Tally
from paceline.comm.reduction import Owed
from paceline.comm.tally import AgreedTally
from paceline.mesh import Group
from paceline.sync.outer import Movement


class Streaming(NamedTuple):
    """How fragments travel.

    Args:
        steps: H, between two times that a fragment leaves.
        fragments: at most H.
        delay: steps from when one leaves until it arrives; at most H / fragments, so that one is under way.
        mixing: alpha: the share of what a replica has that stays when one arrives.
    """

    steps: int
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether all parameters travel at once, and nobody computes meanwhile."""
        return self == Streaming(self.steps)

    def leaves(self, number: int, step: int) -> bool:
        """Whether a fragment leaves after so many steps of a round."""
        return step % self.steps == number * self.steps // self.fragments


def plan_fragments(sizes: Sequence[int], fragments: int) -> list[range]:
    """Which of the tensors, in the model's order, are in each: about as many values in all; pure.

    Args:
        sizes: values of each tensor; there may be fewer of them than fragments: then each is one.
    """
    fragments = min(fragments, len(sizes))
    whole, ends, done = sum(sizes), list[int](), 0
    for index, size in enumerate(sizes, start=1):
        done += size
        left = fragments - len(ends)
        is_due = done * fragments >= whole * (len(ends) + 1) or len(sizes) - index < left
        if left > 1 and is_due and len(sizes) - index >= left - 1:
            ends.append(index)
    return [range(a, b) for a, b in zip([0, *ends], [*ends, len(sizes)], strict=True)]


class Fragment:
    """Some tensors, where all were when they met last, and what is on its way.

    Args:
        movement: of these tensors.
        owed: what coding had lost under another rule.
    """

    def __init__(self, movement: Movement, owed: Owed | None = None) -> None:
        self.movement, self.anchors, self._owed = movement, movement.anchors, owed
        self._agreement: AgreedTally | None = None
        self.stops = 0.0  # ranks that were asked to stop, as of the last arrival
        self.left = 0  # steps of the round after which it left last
        self.count = 0.0  # items since then
        self.whole = 0.0  # about how many those of all replicas are

    @property
    def is_under_way(self) -> bool:
        """Whether it has left and not arrived."""
        return self._agreement is not None

    def begin(self) -> None:
        """A round begins: all are at the same place."""
        self.movement.begin()
        self.left, self.count, self.whole, self.stops = 0, 0.0, 0.0, 0.0

    def leave(
        self, step: int, stops: float, net: Net, replicas: Group, device: torch.device, *, waits: bool
    ) -> None:
        """Launch the sum of what has moved; collective.

        Args:
            step: of the round.
            stops: whether this rank was asked to stop.
            waits: it arrives at once, so that there is time to ask how many items all had.
        """
        nothing = torch.zeros(0, dtype=torch.float64)
        self._agreement = Tally(0.0, 0.0, self.count, {}, stops, (), nothing).agree(net, replicas, device)
        self.movement.leave(self.count, self._agreement.wait().count if waits else self.whole)
        self.left, self.count, self.whole = step, 0.0, 0.0

    def arrive(self, mixing: float) -> None:
        """Move where all were, and go on from there; collective."""
        assert self._agreement is not None
        agreement, self._agreement = self._agreement, None
        tally = agreement.wait()
        self.stops = tally.stops
        if self._owed is not None:
            self._owed.settle(self.anchors, is_paid=tally.count > 0, mixing=mixing)
        self.movement.arrive(tally)
        self.movement.mix(mixing)

    def drop(self) -> None:
        """Forget what is on its way."""
        if self._agreement is not None:
            self.movement.reducer.abort()
            self._agreement = None
