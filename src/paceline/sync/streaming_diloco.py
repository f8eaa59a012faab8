"""Fragments of the parameters, and when they travel; one by itself. See `streamed`.

Source: Douillard et al. 2025, Streaming DiLoCo with overlapping communication, arXiv:2501.18512, section 2.

Streaming DiLoCo: replicas train alone, and parts of what they moved travel while they go on.

The parameters are cut into fragments. Every H steps each fragment leaves, at a step of its own: what it has
moved since it left last, weighted by items, is summed over the replicas beside the steps that follow. So many
steps later it arrives: the outer optimizer takes the mean from where all were, and a replica goes on from
mixing x what it has + (1 - mixing) x that.

A round is at least as long as the run may go without a pause, in whole H, or ends where a fragment arrives
that says that a rank was asked to stop. At its end all that is under way
arrives, and all fragments meet as in `local`: a round of one fragment, without delay or mixing, is that of
`DiLoCo`, to the bit.

Invariant: fragments leave and arrive at the same steps on every rank, and one is under way at most. After
a round all replicas hold equal parameters and buffers; inner optimizers stay apart.
Source: Douillard et al. 2025, Streaming DiLoCo with overlapping communication, arXiv:2501.18512, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.net import Net
from paceline.comm.reduction.gradients import CombinedReduction, GradientReduction
from paceline.comm.reduction.pending_residual import PendingResidual
from paceline.comm.tally import PendingTally, StepTally
from paceline.data.work import TrainingFeed
from paceline.job.mesh import RankGroup
from paceline.observe.step_stats import PhaseTimer, StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.state.slot import ExtraState, SlotIndex, TensorPiece, TensorSlot
from paceline.sync.every_step import EveryStep
from paceline.sync.local_rounds import LocalRound, LocalRoundLoop, TakeStep
from paceline.sync.outer_optimizer import OuterStep, ParameterDelta, copy_anchors
from paceline.sync.update import UpdateStep


class FragmentSchedule(NamedTuple):
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
        return self == FragmentSchedule(self.steps)

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


class ParameterFragment:
    """Some tensors, where all were when they met last, and what is on its way.

    Args:
        movement: of these tensors.
        owed: what coding had lost under another rule.
    """

    def __init__(self, movement: ParameterDelta, owed: PendingResidual | None = None) -> None:
        self.movement, self.anchors, self._owed = movement, movement.anchors, owed
        self._agreement: PendingTally | None = None
        self.stops = 0.0  # ranks that were asked to stop, as of the last arrival
        self.left = 0  # steps of the round after which it left last
        self.count = 0.0  # items since then
        self.whole = 0.0  # about how many those of all replicas are

    @property
    def is_in_flight(self) -> bool:
        """Whether it has left and not arrived."""
        return self._agreement is not None

    def begin(self) -> None:
        """A round begins: all are at the same place."""
        self.movement.begin()
        self.left, self.count, self.whole, self.stops = 0, 0.0, 0.0, 0.0

    def leave(
        self, step: int, stops: float, net: Net, replicas: RankGroup, device: torch.device, *, waits: bool
    ) -> None:
        """Launch the sum of what has moved; collective.

        Args:
            step: of the round.
            stops: whether this rank was asked to stop.
            waits: it arrives at once, so that there is time to ask how many items all had.
        """
        nothing = torch.zeros(0, dtype=torch.float64)
        self._agreement = StepTally(0.0, 0.0, self.count, {}, stops, (), nothing).agree(net, replicas, device)
        self.movement.leave(self.count, self._agreement.wait().count if waits else self.whole)
        self.left, self.count, self.whole = step, 0.0, 0.0

    def arrive(self, mixing: float) -> None:
        """Move where all were, and go on from there; collective."""
        assert self._agreement is not None
        agreement, self._agreement = self._agreement, None
        tally = agreement.wait()
        self.stops = tally.stops
        if self._owed is not None:
            self._owed.settle_mean(self.anchors, is_applied=tally.count > 0, mixing=mixing)
        self.movement.arrive(tally)
        self.movement.mix(mixing)

    def drop(self) -> None:
        """Forget what is on its way."""
        if self._agreement is not None:
            self.movement.reducer.abort()
            self._agreement = None


class StreamingDiLoCo(ExtraState):
    """The rule.

    Args:
        inner: the step of one replica.
        streaming: when fragments leave and arrive.
        outer: what an arrival does.
        reducer: makes one for a fragment, by its number.
        replicas, told: see `LocalRoundLoop`.
    Attributes:
        reducer: those of all fragments as one.
        movements: of all fragments.
    Wire: every H steps an all_reduce of the parameters, in parts, and 8 numbers for each; at the end of a
        round one more of what has moved since, and one of the tally.
    """

    def __init__(
        self,
        inner: EveryStep,
        streaming: FragmentSchedule,
        outer: OuterStep,
        reducer: Callable[[Mapping[TensorSlot, Tensor], int], GradientReduction],
        runner: ModelRunner,
        *,
        replicas: RankGroup,
        net: Net,
        phases: PhaseTimer,
    ) -> None:
        self.inner, self.streaming = inner, streaming
        self._loop = LocalRoundLoop(inner, replicas=replicas, net=net, phases=phases)
        self._phases, self._wire = phases, (net, replicas, runner.sharded_model.device)
        anchors, self.fragments = copy_anchors(runner), list[ParameterFragment]()
        for number, names in enumerate(_fragment_names(runner, streaming.fragments)):
            own = {slot: anchor for slot, anchor in anchors.items() if slot.name in names}
            self.fragments.append(
                ParameterFragment(
                    ParameterDelta(own, runner, outer, reducer(own, number)), inner.pending_residual
                )
            )
        self.movements = [one.movement for one in self.fragments]
        reducers = [one.reducer for one in self.movements]
        by_slot = {slot: one.movement.reducer for one in self.fragments for slot in one.anchors}
        self.reducer = CombinedReduction(by_slot, reducers)

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """See `Rule`: a round ends where the feed wants a pause, in whole H, or a rank was asked to stop."""
        return self._loop.rounds(
            feed, runner, update_step, begin=self._begin, step=self._step, meet=self._meet
        )

    def abort(self) -> None:
        """See `Rule`; what is under way goes on, as the others count on it."""
        self.inner.abort()

    def _begin(self, feed: TrainingFeed, step: int) -> int:
        for fragment in self.fragments:
            fragment.begin()
        rounds = -(-(feed.next_pause(step) - step) // self.streaming.steps)
        return min(step + rounds * self.streaming.steps, feed.num_steps)

    def _step(self, stretch: LocalRound, take: TakeStep) -> None:
        take()
        for fragment in self.fragments:
            fragment.whole += stretch.whole[-1]
        self._travel(stretch.taken[-1][0], len(stretch.taken), is_last=stretch.step == stretch.end)
        if any(fragment.stops for fragment in self.fragments):
            stretch.end_with([stretch.step])

    def _travel(self, tally: StepTally, step: int, *, is_last: bool) -> None:
        """After a step of a round: who is due arrives, and who is due leaves."""
        self._phases.begin("communication")
        for fragment in self.fragments:
            fragment.count += tally.count
            if fragment.is_in_flight and step - fragment.left >= self.streaming.delay:
                fragment.arrive(self.streaming.mixing)
        for number, fragment in enumerate(self.fragments):
            if self.streaming.leaves(number, step) and not is_last:
                at_once = not self.streaming.delay
                fragment.leave(step, tally.stops, *self._wire, waits=at_once)
                if at_once:
                    fragment.arrive(self.streaming.mixing)

    def _meet(self, stretch: LocalRound, runner: ModelRunner) -> tuple[StepTally, Mapping[str, float]]:
        """All that is under way arrives, and all replicas go on from one place."""
        for fragment in self.fragments:
            if fragment.is_in_flight:
                fragment.arrive(self.streaming.mixing)
        for fragment in self.fragments:
            fragment.leave(len(stretch.taken), 0.0, *self._wire, waits=True)
            fragment.arrive(0.0)
        return self._loop.agree(stretch, runner, skipped=stretch.skipped)

    def pieces(self) -> list[TensorPiece]:
        """Momentum of the outer optimizers, by parameter, under the names of `DiLoCo`."""
        return [piece for fragment in self.fragments for piece in fragment.movement.pieces()]

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        """See `ExtraState`."""
        found: dict[str, SlotIndex] = {}
        for fragment in self.fragments:
            found |= fragment.movement.wanted(shapes)
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `pieces`; a round that was under way is forgotten."""
        self._loop.forget()
        for fragment in self.fragments:
            fragment.drop()
            fragment.movement.load(tensors)


def _fragment_names(runner: ModelRunner, fragments: int) -> list[set[str]]:
    """Of the tensors in each; the same on all ranks, whoever holds which: all meet at the same steps."""
    slots = runner.sharded_model.slots
    parts = plan_fragments([slot.numel for slot in slots], fragments)
    return [{slots[index].name for index in part} for part in parts]
