"""What flows through a pipeline is a micro-batch, and a stage keeps two versions of its weights, however many
stages there are.

Gradients of a step are added up over its micro-batches, then the stage makes one update. All stages run step
t with the weights that t-1 updates have made, one less than there are: W(t+1) = W(t) - f(gradient at W(t-1)).
An update writes the new version over the one that nobody needs any more, so parameters change their memory in
turn between two buffers. Invariant: no micro-batch is in flight through a version that is written to.
Source: Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503, section 3.1
(double-buffered weight updates, 2BW).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor, nn

from paceline.comm import Net
from paceline.data import Feed, LoadedBatch, Work
from paceline.layout import Sums
from paceline.layout.pipeline import Flight, Pipeline
from paceline.observe import Phases
from paceline.schedule import Action, Table, prove, two_buffered
from paceline.state import TrainState
from paceline.sync.every_step import gradient_scale
from paceline.sync.memory import Asked, Pass
from paceline.sync.stage_update import (
    GradientSum,
    SentLongAgo,
    Versions,
    Weights,
    is_untouched,
    update_stage,
)
from paceline.sync.update import Update, UpdateStep


def flow_of(asked: Asked) -> tuple[Table, int]:
    """What goes through all stages, and how many micro-batches at each of its operations."""
    return two_buffered(asked.recipe.strategy.pipeline, [asked.micro_batches] * asked.stretch), 1


def passes(asked: Asked, flow: Table) -> Iterator[Pass]:
    """What goes through a stage: there are two versions of what is trained, whatever is in flight."""
    count, done = asked.micro_batches, 0
    for action in flow.orders[asked.stage]:
        sums = min(done, 1)
        if action.kind == "F":
            yield Pass(True, asked.sizes.updates, sums)
            continue
        done = (done + 1) % count
        yield Pass(False, asked.sizes.updates, sums, ends=done == 0)


@dataclass(frozen=True)
class Version:
    """Weights of a stage.

    Args:
        updates: that have made them.
    """

    weights: Weights
    updates: int


class TwoVersions:
    """The weights of a stage, and those of one update before.

    Args:
        parameters: by name; the trained ones change their memory with every update.

    Attributes:
        held: by the first step that no update of theirs has seen, at most two.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._spare: dict[str, Tensor] = {}
        self.held: dict[int, Version] = {}

    def begin(self, step: int, updates: int) -> None:
        """No micro-batch is in flight: there is one version."""
        self.held = {step: self._now(updates)}

    def make_room(self) -> None:
        """Before an update: the parameters move to the other buffer, with their values."""
        for name, p in self._parameters.items():
            if p.requires_grad:
                spare = self._spare.get(name)
                other = p.data.clone() if spare is None else spare.copy_(p.data)
                self._spare[name], p.data = p.data, other

    def take_new(self, step: int, updates: int) -> None:
        """After the update of the step before this one; the version before the last is no more."""
        self.held = {max(self.held): self.held[max(self.held)], step: self._now(updates)}

    def _now(self, updates: int) -> Version:
        """The memory of the parameters, as tensors of their own."""
        leaves = {n: p.data.requires_grad_(p.requires_grad) for n, p in self._parameters.items()}
        return Version(leaves, updates)


@dataclass
class StepUnderWay:
    """A step between its first forward and its update.

    Args:
        version: of its forwards.
        scale: of the loss.
        sums: of its micro-batches.
        shards: of those that have gone forward.
        count: items of those that have gone backward through the last stage.
    """

    version: Version
    scale: float
    sums: Sums
    grads: GradientSum
    shards: list[int] = field(default_factory=list)
    count: float = 0.0


class TwoBuffers:
    """Micro-batches on their way through one stage.

    Args:
        stage: this rank's.
        items_per_sample: as for `EveryStep`.
    """

    def __init__(self, stage: Pipeline, net: Net, phases: Phases, items_per_sample: int) -> None:
        self._stage, self._net, self._phases = stage, net, phases
        self._items_per_sample = items_per_sample
        self.weights = TwoVersions(stage.passing.weights[0].parameters)
        self._steps: dict[int, StepUnderWay] = {}
        self._flying: dict[int, Flight] = {}
        self.versions: list[Versions] = []

    def run(self, first: int, end: int, feed: Feed, update_step: UpdateStep) -> tuple[Sums, Update]:
        """See `Flow`."""
        cut, state = self._stage.cut, update_step.state
        counts = [feed.work.num_micro_batches(step) for step in range(first, end)]
        steps = [step for step, n in enumerate(counts, first) for _ in range(n)]
        lasts = {n - 1 for n in accumulate(counts)}
        prove(schedule := two_buffered(cut.num_stages, counts), len(steps))
        sums, update = Sums(self._stage.metric_names), Update(0.0, 0.0, applied=False)
        sent = self._begin(first, state.updates)
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
                self._forward(action, loaded, self._under_way(step, feed.work, state))
                if number in lasts:
                    self._end_forward(self._steps[step], sums)
        self._stage.flush()
        return sums, update

    def drop(self) -> None:
        """See `Flow`."""
        self._steps, self._flying = {}, {}

    def _begin(self, first: int, updates: int) -> SentLongAgo:
        self.versions = []
        self.weights.begin(first, updates)
        return SentLongAgo(self._stage)

    def _under_way(self, step: int, work: Work, state: TrainState) -> StepUnderWay:
        """A step begins with its first forward: with the version of one update less than all before."""
        if step not in self._steps:
            self._stage.begin_step()
            version = self.weights.held[max(step - 1, min(self.weights.held))]
            scale = gradient_scale(work, state, self._items_per_sample)
            sums = Sums(self._stage.metric_names)
            self._steps[step] = StepUnderWay(version, scale, sums, GradientSum(version.weights))
        return self._steps[step]

    def _forward(self, action: Action, loaded: LoadedBatch, step: StepUnderWay) -> None:
        flight = self._stage.passing.forward(action, loaded, step.sums, step.scale, step.version.weights)
        self._flying[action.micro_batch] = flight
        step.shards.append(loaded.micro_batch.shard)

    def _end_forward(self, step: StepUnderWay, sums: Sums) -> None:
        """All micro-batches of a step have gone forward."""
        buffers = self._stage.buffers
        buffers.end_step(buffers.added(buffers.changes_of(step.shards)), len(step.shards))
        sums.extend(step.sums)

    def _backward(self, number: int, step: StepUnderWay) -> None:
        """With the weights of the forward; the last stage tells how many items there were so far."""
        count = step.sums.read()[1] if self._stage.cut.is_last else 0.0
        flight = self._flying.pop(number)
        grads, step.count = self._stage.passing.backward(flight, step.version.weights, note=count)
        step.grads.add(grads)

    def _update(self, number: int, update_step: UpdateStep) -> Update:
        """All micro-batches of a step have gone backward."""
        step, state = self._steps.pop(number), update_step.state
        used = [v for v in self.weights.held.values() if v is step.version and is_untouched(v.weights)]
        forward = step.version.updates
        self.versions.append(Versions(number, forward, used[0].updates if used else -1, state.updates))
        self._phases.begin("optimizer")
        self.weights.make_room()
        update = update_stage(self._stage, update_step, step.grads, step.scale, step.count)
        self.weights.take_new(number + 1, state.updates)
        return update
