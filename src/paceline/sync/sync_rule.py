"""What a rule is: it owns the loop between two points at which the state is consistent.

What a rule keeps on a rank, as it says itself: closed forms in bytes, before a run is started. Pure.

The word of a rule names a function (`SyncSpec.memory`) that is asked for each rank. It does not say what
every step takes under any rule: the model, the optimizer's state, gradients, and what micro-batches keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.comm.net import Net
from paceline.comm.tally import StepTally
from paceline.data.work import MicroBatchWork, TrainingFeed
from paceline.observe.step_stats import PhaseTimer, StepStats
from paceline.parallel.model_runner import ModelRunner
from paceline.parallel.placement import ParameterBytes, TensorPlacement
from paceline.pipeline_schedule.schedule_table import ScheduleTable
from paceline.recipe.recipe import Recipe
from paceline.state.train_state import TrainState
from paceline.sync.update import UpdateResult, UpdateStep


class SurvivingRule(Protocol):
    """A rule that goes on without some ranks.

    Attributes:
        left: the ranks that are not lost, as of the last round; empty: that is not known yet.
    """

    left: tuple[int, ...]


class SyncRule(Protocol):
    """When replicas agree."""

    def rounds(self, feed: TrainingFeed, runner: ModelRunner, update_step: UpdateStep) -> Iterator[StepStats]:
        """Rounds from the state's own position to the end of the run; collective.

        A round is one step or more. Between two rounds the state is consistent: every rank holds the same
        values as every other rank that holds the part. It may be saved or evaluated.

        Args:
            feed: micro-batches and their loader.
            runner: this rank's part of the model.
            update_step: applies updates to the state.
        """

    def abort(self) -> None:
        """Drop the step in which an error left `rounds`; the next `rounds` begins with that step."""


def step_stats(
    steps: range,
    work: MicroBatchWork,
    state: TrainState,
    tally: StepTally,
    update: UpdateResult,
    phases: PhaseTimer,
    net: Net,
) -> StepStats:
    """The record of some steps, from sums that all ranks agree on."""
    seconds, spent = phases.take()
    count = tally.count or 1.0
    return StepStats(
        step=steps[-1],
        epoch=steps[-1] // work.steps_per_epoch if work.steps_per_epoch else 0,
        loss=tally.total / count,
        metrics={name: value / count for name, value in tally.metrics.items()},
        num_samples=sum(work.num_samples(step) for step in steps),
        num_items=tally.count,
        grad_norm=update.grad_norm,
        lr=update.lr,
        applied=update.applied,
        loss_scale=state.scale.value,
        stops=int(tally.stops),
        seconds=seconds,
        phases=spent,
        sent_bytes=net.ledger.sent_bytes,
    )


@dataclass(frozen=True)
class MemoryQuery:
    """Of which rank a rule is asked.

    Args:
        recipe: under this rule alone; its strategy has its replicas filled in.
        held: by name, what the rank holds of trained tensors; `item_bytes` of one value of each.
        sizes: bytes of that.
        state: bytes of the optimizer's state, and of the average of the weights.
        frozen, buffers: bytes of its parameters that are not trained, and of the buffers that it saves.
        rank, processes: its number, and how many there are.
        stage: of a pipeline; 0 where there is none.
        stretch: the most steps from one moment at which the rule has to be at rest to the next.
        micro_batches: of a step, on this rank.
    """

    recipe: Recipe
    held: Mapping[str, TensorPlacement]
    item_bytes: Mapping[str, int]
    sizes: ParameterBytes
    state: int
    frozen: int
    buffers: int
    rank: int
    processes: int
    stage: int
    stretch: int
    micro_batches: int


class PipelinePass(NamedTuple):
    """A micro-batch, forward or backward through a stage of a pipeline that is never flushed.

    Args:
        is_forward: or else backward.
        copies: bytes of the stage's weights meanwhile, beside the parameters.
        sums: how many times the gradients of the stage are there before it.
        done: micro-batches of the step that have gone backward, and whose inputs and outputs are kept.
        ends: whether the stage updates after it.
    """

    is_forward: bool
    copies: int
    sums: int = 0
    done: int = 0
    ends: bool = False


@dataclass(frozen=True)
class RuleMemory:
    """Bytes that a rule keeps on a rank.

    Args:
        copies: of weights, that stay.
        state: beside what the optimizer keeps, that stays.
        saved: of that, what belongs to the state of the run.
        wire: buffers, that stay.
        messages: of a channel, the most that may wait here, or have come: how many do is a matter of time.
        running: copies of weights while micro-batches run, and until the next ones.
        agreement: that ranks take for themselves while they agree; 0: they take nothing.
        at_pushes: gradients beside those that were there, while pushes are made, or added up.
        pushes: what of the messages may be there then.
        sharers: ranks in whose memory the parameters lie once.
        trains, updates: whether the rank runs micro-batches, and whether it updates.
        passes: what goes through a stage that is never flushed; nothing: a step follows its schedule.
        sent: messages of a micro-batch that such a stage keeps, each way, where a backend carries them.
        flow: what goes through such a stage, where memory of the host carries messages; of each operation
            there are so many `together`. None: the schedule.
    """

    copies: int = 0
    state: int = 0
    saved: int = 0
    wire: int = 0
    messages: int = 0
    running: int = 0
    agreement: int = 0
    at_pushes: int = 0
    pushes: int = 0
    sharers: int = 1
    trains: bool = True
    updates: bool = True
    passes: Sequence[PipelinePass] = ()
    sent: int = 0
    flow: ScheduleTable | None = None
    together: int = 1
