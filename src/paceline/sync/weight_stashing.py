"""Weight stashing: the versions of its weights that a stage of PipeDream keeps, and updates from old
gradients.

`WeightStashFlow` sends whole steps through the pipeline (1F1B). All micro-batches of a step go forward, later
all of them backward, then the stage makes one update. Stage s of p is p-s-1 steps ahead with its forwards, so
its gradient is as many updates old, and it stashes the weights of p-s steps.

`TwoBufferFlow` sends micro-batches (2BW) and keeps two versions, however many stages there are. Gradients of
a step are added over its micro-batches, then the stage makes one update. All stages run step t with the
weights after t-1 updates,
one less than there are: W(t+1) = W(t) - f(gradient at W(t-1)). An update writes the new version over the one
that is no longer needed, so the parameters alternate between two buffers.

Invariant: a backward uses the weights of its forward; no micro-batch is in flight through a version that is
written to.
Source: Narayanan et al. 2019, PipeDream, sections 3.2 and 3.3 (1F1B, weight stashing); Narayanan et al. 2021,
Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503, section 3.1 (double-buffered weight
updates, 2BW).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from paceline.comm.net import Net
from paceline.comm.reduction.gradients import Gradients
from paceline.comm.tally import StepTally
from paceline.data.work import LoadedBatch, MicroBatchWork, TrainingFeed
from paceline.observe.step_stats import PhaseTimer
from paceline.parallel.model_runner import LossSums
from paceline.parallel.pipeline.forward_backward import InFlightMicroBatch
from paceline.parallel.pipeline.pipeline_runner import PipelineRunner
from paceline.pipeline_schedule.schedule_table import PipelineAction, simulate_schedule
from paceline.pipeline_schedule.standard_schedules import one_f_one_b, pipedream_2bw
from paceline.state.train_state import TrainState
from paceline.sync.every_step import gradient_scale
from paceline.sync.update import UpdateResult, UpdateStep

StageWeights = Mapping[str, Tensor]
"""Weights that a forward uses in place of a stage's parameters, by their names in the stage."""


@dataclass(frozen=True)
class UpdateVersions:
    """The versions of the weights that one update of a stage used.

    Args:
        step: of the update.
        forward, backward: updates in the weights that its forward and its backward used.
        applied: updates that had been made when it was applied; minus `forward` this is its staleness.
    """

    step: int
    forward: int
    backward: int
    applied: int


class SentMessageRelease:
    """The release of messages that neighbours have received, while a pipeline is full.

    What a stage sent at least as many updates ago as there are stages was received, or its neighbours could
    not have sent what this update is made of. So nothing is waited for, and the messages kept do not grow
    with a run.
    """

    def __init__(self, stage: PipelineRunner) -> None:
        self._stage = stage
        self._marks = deque[int]()

    def end_update(self) -> None:
        """Record one more update, and release messages that are old enough."""
        self._marks.append(self._stage.num_sent)
        if len(self._marks) > self._stage.cut.num_stages:
            self._stage.wait_until_received(self._marks.popleft())


class GradientSum:
    """The sum of a step's gradients over its micro-batches.

    Args:
        weights: the weights of its forward passes.
    """

    def __init__(self, weights: StageWeights) -> None:
        self._names = [name for name, w in weights.items() if w.requires_grad]
        self._total: dict[str, Tensor] = {}

    def add(self, grads: list[Tensor | None]) -> None:
        """Add the gradients of a micro-batch, in the order of the trained weights; they are removed from the
        list.
        """
        # Taken from the end of the list, so that each gradient is freed once it has been added.
        for name in reversed(self._names):
            g = grads.pop()
            if g is not None:
                self._total[name] = self._total[name] + g if name in self._total else g

    def of_stage(self, stage: PipelineRunner, scale: float) -> Gradients:
        """Return the gradients of what this stage updates.

        Args:
            stage: this rank's stage.
            scale: the factor of the losses.
        """
        named = stage.executor.weights[0].parameters.items()
        grads_by_parameter = {p: self._total[name] for name, p in named if name in self._total}
        grads = {slot: grads_by_parameter.get(p) for slot, p in stage.sharded_model.updates.items()}
        flats = [g for g in grads.values() if g is not None]
        return Gradients(grads, flats, torch._foreach_norm(flats) if flats else [], scale)


def update_stage(
    stage: PipelineRunner, update_step: UpdateStep, grads: GradientSum, scale: float, count: float
) -> UpdateResult:
    """Divide by the items of the step, update, and release the gradients.

    Args:
        stage: this rank's stage.
        update_step: applies the update.
        grads: the sum over all micro-batches.
        scale: the factor of the losses.
        count: items of all micro-batches.
    """
    no_buffers = torch.zeros(0, dtype=torch.float64)
    tally = StepTally(0.0, 0.0, count, {}, 0.0, [0.0] * len(stage.sharded_model.slots), no_buffers)
    update = update_step.apply(grads.of_stage(stage, scale), tally)
    for p in stage.sharded_model.updates.values():
        # Otherwise the gradients would stay in memory until the next backward of this stage.
        p.grad = None
    return update


def is_untouched(weights: StageWeights) -> bool:
    """Return whether the weights were not written to since they were made."""
    # PyTorch counts the in-place writes to a tensor; a new tensor has version 0.
    return all(w._version == 0 for w in weights.values())


@dataclass(frozen=True)
class StashedStep:
    """A step between its forward and its update.

    Args:
        version: updates in the weights of its forward.
        weights: these weights.
        micro_batches: what the backward passes of its micro-batches need.
        count: items of the step; known on the last stage, and sent with the gradients.
        scale: the factor of the losses.
    """

    version: int
    weights: StageWeights
    micro_batches: list[InFlightMicroBatch]
    count: float
    scale: float


class WeightStashFlow:
    """The steps in flight through one stage, with stashed weights.

    Args:
        stage: this rank's stage.
        net: this rank's collectives.
        phases: measures the seconds of each phase.
        items_per_sample: as for `EveryStep`.
    """

    def __init__(self, stage: PipelineRunner, net: Net, phases: PhaseTimer, items_per_sample: int) -> None:
        self._stage, self._net, self._phases = stage, net, phases
        self._items_per_sample = items_per_sample
        self._flying: dict[int, StashedStep] = {}
        self.versions: list[UpdateVersions] = []

    def run(
        self, first: int, end: int, feed: TrainingFeed, update_step: UpdateStep
    ) -> tuple[LossSums, UpdateResult]:
        cut = self._stage.cut
        schedule = one_f_one_b(cut.num_stages, end - first)
        # Raises here if the schedule would deadlock, instead of at the deadline.
        simulate_schedule(schedule, end - first)
        sums, update = LossSums(self._stage.metric_names), UpdateResult(0.0, 0.0, applied=False)
        self.versions, sent = [], SentMessageRelease(self._stage)
        with feed.from_step(first) as stream:
            for action in schedule.orders[cut.stage]:
                step = self._net.step = update_step.state.step = first + action.micro_batch
                if action.kind == "F":
                    self._phases.begin("data")
                    micro_batches = [next(stream) for _ in range(feed.work.num_micro_batches(step))]
                    scale = gradient_scale(feed.work, update_step.state, self._items_per_sample)
                    self._flying[step] = self._forward(
                        micro_batches, sums, scale, update_step.state.num_updates
                    )
                else:
                    update = self._backward(step, self._flying.pop(step), update_step)
                    sent.end_update()
        self._stage.flush()
        return sums, update

    def drop(self) -> None:
        self._flying = {}

    def _forward(
        self, micro_batches: list[LoadedBatch], sums: LossSums, scale: float, version: int
    ) -> StashedStep:
        """Run a step forward with a copy of the present weights, and stash the copy."""
        stage, step_sums = self._stage, LossSums(self._stage.metric_names)
        # A copy, because updates of earlier steps change the parameters before this step goes backward.
        weights = {
            n: p.detach().clone().requires_grad_(p.requires_grad)
            for n, p in stage.executor.weights[0].parameters.items()
        }
        stage.begin_step()
        in_flight = [
            stage.executor.forward(PipelineAction("F", number), micro_batch, step_sums, scale, weights)
            for number, micro_batch in enumerate(micro_batches)
        ]
        changes = stage.buffers.changes_of([loaded.micro_batch.shard for loaded in micro_batches])
        stage.buffers.end_step(stage.buffers.sum_changes(changes), len(in_flight))
        sums.extend(step_sums)
        return StashedStep(version, weights, in_flight, step_sums.read()[1], scale)

    def _backward(self, step: int, stashed_step: StashedStep, update_step: UpdateStep) -> UpdateResult:
        """Run a step backward with the weights of its forward, and update the stage."""
        stage, total, count = self._stage, GradientSum(stashed_step.weights), stashed_step.count
        for in_flight_batch in reversed(stashed_step.micro_batches):
            grads, received_count = stage.executor.backward(
                in_flight_batch, stashed_step.weights, note=stashed_step.count
            )
            count = stashed_step.count if stage.cut.is_last else received_count
            total.add(grads)
        used = stashed_step.version if is_untouched(stashed_step.weights) else -1
        self.versions.append(UpdateVersions(step, stashed_step.version, used, update_step.state.num_updates))
        self._phases.begin("optimizer")
        return update_stage(stage, update_step, total, stashed_step.scale, count)


@dataclass(frozen=True)
class WeightVersion:
    """A version of the weights of a stage.

    Args:
        weights: by name.
        updates: the number of updates that made them.
    """

    weights: StageWeights
    updates: int


class DoubleBufferedWeights:
    """The present weights of a stage, and those before the last update.

    Args:
        parameters: by name; trained ones change their memory with every update.

    Attributes:
        versions_by_step: by the first step that uses none of their updates, at most two.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._spare: dict[str, Tensor] = {}
        self.versions_by_step: dict[int, WeightVersion] = {}

    def begin(self, step: int, updates: int) -> None:
        """Start with one version; no micro-batch is in flight."""
        self.versions_by_step = {step: self._present_version(updates)}

    def make_room(self) -> None:
        """Move the parameters with their values to the other buffer, before an update."""
        for name, p in self._parameters.items():
            if p.requires_grad:
                spare = self._spare.get(name)
                # The optimizer writes in place, so the present values move to the buffer that it may write
                # to.
                other = p.data.clone() if spare is None else spare.copy_(p.data)
                self._spare[name], p.data = p.data, other

    def add_version(self, step: int, updates: int) -> None:
        """Register the weights that `step` starts from, and drop the oldest version."""
        self.versions_by_step = {
            max(self.versions_by_step): self.versions_by_step[max(self.versions_by_step)],
            step: self._present_version(updates),
        }

    def _present_version(self, updates: int) -> WeightVersion:
        """Return the present parameters as leaf tensors that share their memory."""
        # Leaves of their own keep this version reachable when `p` points to the other buffer.
        leaves = {n: p.data.requires_grad_(p.requires_grad) for n, p in self._parameters.items()}
        return WeightVersion(leaves, updates)


@dataclass
class InFlightStep:
    """A step between its first forward and its update.

    Args:
        version: number of the weight version of its forward passes.
        scale: the factor of the losses.
        sums: loss sums of its micro-batches.
        grads: sum of its gradients.
        shards: of the micro-batches that have gone forward.
        count: items of the micro-batches that have gone backward through the last stage.
    """

    version: WeightVersion
    scale: float
    sums: LossSums
    grads: GradientSum
    shards: list[int] = field(default_factory=list)
    count: float = 0.0


class TwoBufferFlow:
    """The micro-batches in flight through one stage, with two versions of the weights.

    Args:
        stage: this rank's stage.
        net: this rank's collectives.
        phases: measures the seconds of each phase.
        items_per_sample: as for `EveryStep`.
    """

    def __init__(self, stage: PipelineRunner, net: Net, phases: PhaseTimer, items_per_sample: int) -> None:
        self._stage, self._net, self._phases = stage, net, phases
        self._items_per_sample = items_per_sample
        self.weights = DoubleBufferedWeights(stage.executor.weights[0].parameters)
        self._steps: dict[int, InFlightStep] = {}
        self._flying: dict[int, InFlightMicroBatch] = {}
        self.versions: list[UpdateVersions] = []

    def run(
        self, first: int, end: int, feed: TrainingFeed, update_step: UpdateStep
    ) -> tuple[LossSums, UpdateResult]:
        cut, state = self._stage.cut, update_step.state
        counts = [feed.work.num_micro_batches(step) for step in range(first, end)]
        steps = [step for step, n in enumerate(counts, first) for _ in range(n)]
        lasts = {n - 1 for n in accumulate(counts)}
        simulate_schedule(schedule := pipedream_2bw(cut.num_stages, counts), len(steps))
        sums, update = LossSums(self._stage.metric_names), UpdateResult(0.0, 0.0, applied=False)
        sent = self._begin(first, state.num_updates)
        with feed.from_step(first) as stream:
            for action in schedule.orders[cut.stage]:
                number = action.micro_batch
                step = self._net.step = state.step = steps[number]
                if action.kind == "B":
                    self._backward(number, self._steps[step])
                    if number in lasts:
                        update = self._update(step, update_step)
                        sent.end_update()
                    continue
                self._phases.begin("data")
                loaded = next(stream)
                self._forward(action, loaded, self._step_in_flight(step, feed.work, state))
                if number in lasts:
                    self._end_forward(self._steps[step], sums)
        self._stage.flush()
        return sums, update

    def drop(self) -> None:
        self._steps, self._flying = {}, {}

    def _begin(self, first: int, updates: int) -> SentMessageRelease:
        self.versions = []
        self.weights.begin(first, updates)
        return SentMessageRelease(self._stage)

    def _step_in_flight(self, step: int, work: MicroBatchWork, state: TrainState) -> InFlightStep:
        """Return a step in flight; its first forward starts it, with weights that are one update old."""
        if step not in self._steps:
            self._stage.begin_step()
            # The first step of a round has no older version: all stages hold the same one then.
            version = self.weights.versions_by_step[max(step - 1, min(self.weights.versions_by_step))]
            scale = gradient_scale(work, state, self._items_per_sample)
            sums = LossSums(self._stage.metric_names)
            self._steps[step] = InFlightStep(version, scale, sums, GradientSum(version.weights))
        return self._steps[step]

    def _forward(self, action: PipelineAction, loaded: LoadedBatch, step: InFlightStep) -> None:
        in_flight_batch = self._stage.executor.forward(
            action, loaded, step.sums, step.scale, step.version.weights
        )
        self._flying[action.micro_batch] = in_flight_batch
        step.shards.append(loaded.micro_batch.shard)

    def _end_forward(self, step: InFlightStep, sums: LossSums) -> None:
        """Move the buffers after all micro-batches of a step have gone forward."""
        buffers = self._stage.buffers
        buffers.end_step(buffers.sum_changes(buffers.changes_of(step.shards)), len(step.shards))
        sums.extend(step.sums)

    def _backward(self, number: int, step: InFlightStep) -> None:
        """Run a micro-batch backward with the weights of its forward; the last stage sends the number of
        items so far.
        """
        count = step.sums.read()[1] if self._stage.cut.is_last else 0.0
        in_flight_batch = self._flying.pop(number)
        grads, step.count = self._stage.executor.backward(in_flight_batch, step.version.weights, note=count)
        step.grads.add(grads)

    def _update(self, number: int, update_step: UpdateStep) -> UpdateResult:
        """Update after all micro-batches of a step have gone backward."""
        step, state = self._steps.pop(number), update_step.state
        used = [
            v for v in self.weights.versions_by_step.values() if v is step.version and is_untouched(v.weights)
        ]
        forward = step.version.updates
        self.versions.append(
            UpdateVersions(number, forward, used[0].updates if used else -1, state.num_updates)
        )
        self._phases.begin("optimizer")
        self.weights.make_room()
        update = update_stage(self._stage, update_step, step.grads, step.scale, step.count)
        self.weights.add_version(number + 1, state.num_updates)
        return update
