"""Streaming DiLoCo: replicas train alone, and their parameter deltas are averaged while they keep training.

The parameters are cut into fragments. Every H steps each fragment is sent, at a step of its own: what it has
changed since it was sent last, weighted by items, is summed over the replicas during the steps that follow.
`delay` steps later it is received: the outer optimizer steps from the anchors, and a replica continues from
mixing x its own parameters + (1 - mixing) x the result.

A round is at least as long as the run may go without a pause, in whole H; it ends early where a received
fragment shows that a rank was asked to stop. At its end everything in flight is received, and all fragments
agree as in `DiLoCo`: one fragment without delay or mixing is DiLoCo, to the bit.

Invariant: fragments are sent and received at the same steps on every rank, and at most one is in flight.
After a round all replicas hold equal parameters and buffers; the inner optimizers stay different.
Source: Douillard et al. 2025, Streaming DiLoCo with overlapping communication, arXiv:2501.18512, section 2
and Algorithm 2.
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
    """The steps at which fragments are sent and received.

    Args:
        steps: H, the steps between two times that a fragment is sent.
        fragments: the number of fragments, at most H.
        delay: steps from sending to receiving; at most H / fragments, so that only one is in flight.
        mixing: alpha, the share of its own parameters that a replica keeps when it receives a fragment.
    """

    steps: int
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Return whether all parameters are averaged at once while no replica computes, as in DiLoCo."""
        return self == FragmentSchedule(self.steps)

    def sends_after(self, number: int, step: int) -> bool:
        """Return whether fragment `number` is sent after `step` steps of a round."""
        return step % self.steps == number * self.steps // self.fragments


def plan_fragments(sizes: Sequence[int], fragments: int) -> list[range]:
    """Cut the tensors, in the model's order, into fragments of about equal size; pure.

    Args:
        sizes: values of each tensor.
        fragments: the number of fragments; with fewer tensors than that each tensor is one.
    Returns:
        The indices of the tensors in each fragment.
    """
    fragments = min(fragments, len(sizes))
    total, ends, done = sum(sizes), list[int](), 0
    for index, size in enumerate(sizes, start=1):
        done += size
        num_left = fragments - len(ends)
        # Cut where a share of the values is reached, or where every tensor left has to be a fragment.
        is_due = done * fragments >= total * (len(ends) + 1) or len(sizes) - index < num_left
        if num_left > 1 and is_due and len(sizes) - index >= num_left - 1:
            ends.append(index)
    return [range(a, b) for a, b in zip([0, *ends], [*ends, len(sizes)], strict=True)]


class ParameterFragment:
    """Some parameters with their anchors, and their sum in flight.

    Args:
        delta: of these parameters.
        pending_residual: quantisation error of another rule.
    Attributes:
        stops: ranks that were asked to stop, as of the last time that this fragment was received.
        sent_step: steps of the round after which it was sent last.
        num_items: items of this replica since then.
        total_items: about the items of all replicas since then.
    """

    def __init__(self, delta: ParameterDelta, pending_residual: PendingResidual | None = None) -> None:
        self.delta, self.anchors, self._pending_residual = delta, delta.anchors, pending_residual
        self._agreement: PendingTally | None = None
        self.stops, self.sent_step = 0.0, 0
        self.num_items, self.total_items = 0.0, 0.0

    @property
    def is_in_flight(self) -> bool:
        """Return whether the fragment was sent and not received."""
        return self._agreement is not None

    def begin(self) -> None:
        """Start a round, in which all replicas begin with the same parameters."""
        self.delta.begin()
        self.sent_step, self.num_items, self.total_items, self.stops = 0, 0.0, 0.0, 0.0

    def send(
        self, step: int, stops: float, net: Net, replicas: RankGroup, device: torch.device, *, waits: bool
    ) -> None:
        """Start the sum of the deltas; collective.

        Args:
            step: step of the round.
            stops: 1 if this rank was asked to stop, else 0.
            net, replicas, device: where the tally is summed.
            waits: the fragment is received at once, so the exact number of items can be waited for.
        """
        no_buffers = torch.zeros(0, dtype=torch.float64)
        tally = StepTally(0.0, 0.0, self.num_items, {}, stops, (), no_buffers)
        self._agreement = tally.agree(net, replicas, device)
        # Waiting for the exact number of items would stall the steps that are to hide the sum.
        total_items = self._agreement.wait().count if waits else self.total_items
        self.delta.start_sum(self.num_items, total_items)
        self.sent_step, self.num_items, self.total_items = step, 0.0, 0.0

    def receive(self, mixing: float) -> None:
        """Finish the sum, step from the anchors, and mix the result into the parameters; collective."""
        assert self._agreement is not None
        agreement, self._agreement = self._agreement, None
        tally = agreement.wait()
        self.stops = tally.stops
        if self._pending_residual is not None:
            self._pending_residual.settle_mean(self.anchors, is_applied=tally.count > 0, mixing=mixing)
        self.delta.finish_sum(tally)
        self.delta.mix(mixing)

    def drop(self) -> None:
        """Drop the sum in flight."""
        if self._agreement is not None:
            self.delta.reducer.abort()
            self._agreement = None


class StreamingDiLoCo(ExtraState):
    """The rule of streaming DiLoCo.

    Args:
        inner: the step of one replica.
        streaming: the schedule of the fragments.
        outer: the outer optimizer and the collectives around it.
        reducer: builds the reduction of a fragment, given its anchors and number.
        runner: this rank's part of the model.
        replicas, net, phases: as for `LocalRoundLoop`.
    Attributes:
        reducer: the reductions of all fragments as one.
        deltas: of all fragments.
    Wire: every H steps an all_reduce of the parameters, in parts, and 8 numbers for each part; at the end of
        a round one more of the changes since, and one of the tally.
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
            fragment_anchors = {slot: anchor for slot, anchor in anchors.items() if slot.name in names}
            reduction = reducer(fragment_anchors, number)
            delta = ParameterDelta(fragment_anchors, runner, outer, reduction)
            self.fragments.append(ParameterFragment(delta, inner.pending_residual))
        self.deltas = [fragment.delta for fragment in self.fragments]
        reducers = [delta.reducer for delta in self.deltas]
        by_slot = {slot: f.delta.reducer for f in self.fragments for slot in f.anchors}
        self.reducer = CombinedReduction(by_slot, reducers)

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        return self._loop.rounds(
            feed, runner, update_step, begin=self._begin, step=self._step, meet=self._meet
        )

    def abort(self) -> None:
        # Sums in flight stay: the other replicas count on them, and receive them at the same steps.
        self.inner.abort()

    def _begin(self, feed: TrainingFeed, step: int) -> int:
        for fragment in self.fragments:
            fragment.begin()
        rounds = -(-(feed.next_pause(step) - step) // self.streaming.steps)
        return min(step + rounds * self.streaming.steps, feed.num_steps)

    def _step(self, local_round: LocalRound, take: TakeStep) -> None:
        take()
        for fragment in self.fragments:
            fragment.total_items += local_round.num_items[-1]
        is_last = local_round.step == local_round.end
        self._exchange_fragments(local_round.results[-1][0], len(local_round.results), is_last=is_last)
        # All ranks receive the same tally after the same step, so all of them end the round here.
        if any(fragment.stops for fragment in self.fragments):
            local_round.end_with([local_round.step])

    def _exchange_fragments(self, tally: StepTally, step: int, *, is_last: bool) -> None:
        """Receive and send the fragments that are due after a step of a round."""
        self._phases.begin("communication")
        for fragment in self.fragments:
            fragment.num_items += tally.count
            # Receive before anything is sent, so that at most one fragment is in flight.
            if fragment.is_in_flight and step - fragment.sent_step >= self.streaming.delay:
                fragment.receive(self.streaming.mixing)
        for number, fragment in enumerate(self.fragments):
            # After the last step all fragments agree anyway.
            if self.streaming.sends_after(number, step) and not is_last:
                at_once = not self.streaming.delay
                fragment.send(step, tally.stops, *self._wire, waits=at_once)
                if at_once:
                    fragment.receive(self.streaming.mixing)

    def _meet(self, local_round: LocalRound, runner: ModelRunner) -> tuple[StepTally, Mapping[str, float]]:
        """Receive everything in flight, then agree on all fragments, so that all replicas hold the same."""
        for fragment in self.fragments:
            if fragment.is_in_flight:
                fragment.receive(self.streaming.mixing)
        for fragment in self.fragments:
            # No step is left that could hide the sum, so it can wait for the exact number of items.
            fragment.send(len(local_round.results), 0.0, *self._wire, waits=True)
            fragment.receive(0.0)
        return self._loop.agree(local_round, runner, skipped=local_round.skipped, waiting=0.0)

    def pieces(self) -> list[TensorPiece]:
        """Return the momentum of the outer optimizers, by parameter, under the names of `DiLoCo`."""
        return [piece for fragment in self.fragments for piece in fragment.delta.pieces()]

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, SlotIndex]:
        wanted: dict[str, SlotIndex] = {}
        for fragment in self.fragments:
            wanted |= fragment.delta.wanted(shapes)
        return wanted

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `pieces` returned, and forget a round that was in progress."""
        self._loop.forget()
        for fragment in self.fragments:
            fragment.drop()
            fragment.delta.load(tensors)


def _fragment_names(runner: ModelRunner, fragments: int) -> list[set[str]]:
    """Return the names of the tensors in each fragment.

    They are cut by all slots of the model, so that all ranks agree, whatever part each of them holds.
    """
    slots = runner.sharded_model.slots
    parts = plan_fragments([slot.numel for slot in slots], fragments)
    return [{slots[index].name for index in part} for part in parts]
