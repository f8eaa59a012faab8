"""Streaming DiLoCo: replicas train alone, and parts of what they moved travel while they go on.

The parameters are cut into fragments. Every H steps each fragment leaves, at a step of its own: what it has
moved since it left last, weighted by items, is summed over the replicas beside the steps that follow. So many
steps later it arrives: the outer optimizer takes the mean from where all were, and a replica goes on from
mixing x what it has + (1 - mixing) x that.

A round is at least as long as the run may go without a pause, in whole H, or ends where a fragment arrives
that says that a rank was asked to stop. At its end all that is under way
arrives, and all fragments meet as in `local`: a round of one fragment, without delay or mixing, is that of
`LocalRounds`, to the bit.

Invariant: fragments leave and arrive at the same steps on every rank, and one is under way at most. After
a round all replicas hold equal parameters and buffers; inner optimizers stay apart.
Source: Douillard et al. 2025, Streaming DiLoCo with overlapping communication, arXiv:2501.18512, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from paceline.comm import Net, Reduction, Tally
from paceline.comm.reduction import Reducers
from paceline.data import Feed
from paceline.layout import Placed
from paceline.mesh import Group
from paceline.observe import Phases, Stats
from paceline.slot import Index, Keeper, Piece, Slot
from paceline.sync.alone import Alone, Stretch, Take
from paceline.sync.every_step import EveryStep
from paceline.sync.fragments import Fragment, Streaming, plan_fragments
from paceline.sync.outer import Movement, OuterStep, anchors_of
from paceline.sync.update import UpdateStep


class StreamedRounds(Keeper):
    """The rule.

    Args:
        inner: the step of one replica.
        streaming: when fragments leave and arrive.
        outer: what an arrival does.
        reducer: makes one for a fragment, by its number.
        replicas, told: see `Alone`.
    Attributes:
        reducer: those of all fragments as one.
        movements: of all fragments.
    Wire: every H steps an all_reduce of the parameters, in parts, and 8 numbers for each; at the end of a
        round one more of what has moved since, and one of the tally.
    """

    def __init__(
        self,
        inner: EveryStep,
        streaming: Streaming,
        outer: OuterStep,
        reducer: Callable[[Mapping[Slot, Tensor], int], Reduction],
        placed: Placed,
        *,
        replicas: Group,
        net: Net,
        phases: Phases,
        **told: Any,
    ) -> None:
        self.inner, self.streaming = inner, streaming
        self._alone = Alone(inner, replicas=replicas, net=net, phases=phases, **told)
        self._phases, self._wire = phases, (net, replicas, placed.holding.device)
        anchors, self.fragments = anchors_of(placed), list[Fragment]()
        for number, names in enumerate(_names(placed, streaming.fragments)):
            own = {slot: anchor for slot, anchor in anchors.items() if slot.name in names}
            self.fragments.append(Fragment(Movement(own, placed, outer, reducer(own, number)), inner.owed))
        self.movements = [one.movement for one in self.fragments]
        reducers = [one.reducer for one in self.movements]
        by_slot = {slot: one.movement.reducer for one in self.fragments for slot in one.anchors}
        self.reducer = Reducers(by_slot, reducers)

    def rounds(self, feed: Feed, placed: Placed, update_step: UpdateStep) -> Iterator[Stats]:
        """See `Rule`: a round ends where the feed wants a pause, in whole H, or a rank was asked to stop."""
        return self._alone.rounds(
            feed, placed, update_step, begin=self._begin, step=self._step, meet=self._meet
        )

    def abort(self) -> None:
        """See `Rule`; what is under way goes on, as the others count on it."""
        self.inner.abort()

    def _begin(self, feed: Feed, step: int) -> int:
        for fragment in self.fragments:
            fragment.begin()
        rounds = -(-(feed.pause_after(step) - step) // self.streaming.steps)
        return min(step + rounds * self.streaming.steps, feed.num_steps)

    def _step(self, stretch: Stretch, take: Take) -> None:
        take()
        for fragment in self.fragments:
            fragment.whole += stretch.whole[-1]
        self._travel(stretch.taken[-1][0], len(stretch.taken), is_last=stretch.step == stretch.end)
        if any(fragment.stops for fragment in self.fragments):
            stretch.end_with([stretch.step])

    def _travel(self, tally: Tally, step: int, *, is_last: bool) -> None:
        """After a step of a round: who is due arrives, and who is due leaves."""
        self._phases.begin("communication")
        for fragment in self.fragments:
            fragment.count += tally.count
            if fragment.is_under_way and step - fragment.left >= self.streaming.delay:
                fragment.arrive(self.streaming.mixing)
        for number, fragment in enumerate(self.fragments):
            if self.streaming.leaves(number, step) and not is_last:
                at_once = not self.streaming.delay
                fragment.leave(step, tally.stops, *self._wire, waits=at_once)
                if at_once:
                    fragment.arrive(self.streaming.mixing)

    def _meet(self, stretch: Stretch, placed: Placed) -> tuple[Tally, Mapping[str, float]]:
        """All that is under way arrives, and all replicas go on from one place."""
        for fragment in self.fragments:
            if fragment.is_under_way:
                fragment.arrive(self.streaming.mixing)
        for fragment in self.fragments:
            fragment.leave(len(stretch.taken), 0.0, *self._wire, waits=True)
            fragment.arrive(0.0)
        return self._alone.agree(stretch, placed, skipped=stretch.skipped)

    def pieces(self) -> list[Piece]:
        """Momentum of the outer optimizers, by parameter, under the names of `LocalRounds`."""
        return [piece for fragment in self.fragments for piece in fragment.movement.pieces()]

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Index]:
        """See `Keeper`."""
        found: dict[str, Index] = {}
        for fragment in self.fragments:
            found |= fragment.movement.wanted(shapes)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `pieces`; a round that was under way is forgotten."""
        self._alone.forget()
        for fragment in self.fragments:
            fragment.drop()
            fragment.movement.load(tensors)


def _names(placed: Placed, fragments: int) -> list[set[str]]:
    """Of the tensors in each; the same on all ranks, whoever holds which: all meet at the same steps."""
    slots = placed.holding.slots
    parts = plan_fragments([slot.numel for slot in slots], fragments)
    return [{slots[index].name for index in part} for part in parts]
