"""What each thread of a process does in a step: shards of its own, or one stage. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.data.work import split_evenly
from paceline.parallel.pipeline.stage_partition import StagePartition
from paceline.parallel.placement import TensorPlacement, slot_bytes
from paceline.pipeline_schedule.schedule_table import ScheduleTable, max_messages_in_flight
from paceline.plan.activation_memory import MicroBatchFootprint
from paceline.plan.step_peak import StepWork


def shards_side_by_side(work: StepWork, lanes: int, micro_batches: int) -> StepWork:
    """Lanes that run neighbouring micro-batches, each through the whole model.

    Args:
        work: of the process, as one thread would do it.
    """
    counts = [len(split_evenly(micro_batches, lanes, lane)) for lane in range(lanes)]
    return replace(work, lanes=[replace(work, order=work.order[: 2 * n]) for n in counts])


def stages_side_by_side(
    cuts: Sequence[StagePartition],
    held: Mapping[str, TensorPlacement],
    item_bytes: Mapping[str, int],
    footprints: Sequence[MicroBatchFootprint],
    table: ScheduleTable,
) -> StepWork:
    """Lanes that are stages, each with a chunk of its own.

    What several stages compute with has a gradient for each micro-batch and stage until all have ended.

    Args:
        cuts: by stage.
        held: by name of a tensor, what the process has of it; `item_bytes` by name, of one value.
        footprints: by stage.
    """
    sizes = {name: slot_bytes(one.computes, item_bytes) for name, one in held.items()}
    shared, num_stages = {*cuts[0].shared}, len(cuts)
    gradients, lanes = [], []
    for stage, cut in enumerate(cuts):
        own = {name for name in sizes if stage in cut.holders[name]}
        gradients.append(sum(sizes[name] for name in own - shared))
        ahead = max_messages_in_flight(table, stage - 1, stage) if stage else 0
        lane = StepWork(
            [action._replace(chunk=stage) for action in table.orders[stage]],
            [_without_what_came(one) if k == stage else one for k, one in enumerate(footprints)],
            [gradients[stage] if k == stage else 0 for k in range(num_stages)],
            messages=ahead * footprints[stage].arriving,
            apart={stage: sum(sizes[name] for name in own & shared)},
        )
        lanes.append(lane)
    order = [action for lane in lanes for action in lane.order]
    return StepWork(order, footprints, gradients, lanes=lanes, shared=sum(sizes[name] for name in shared))


def _without_what_came(one: MicroBatchFootprint) -> MicroBatchFootprint:
    """Beside its messages.

    Of every micro-batch that is under way in the stage before there is one: it has not been taken yet, it is
    what this stage was given, or the gradient of that. All of them count for the whole step.
    """
    forward = {place: alive - one.arriving for place, alive in one.forward.items()}
    return replace(one, kept=one.kept - one.arriving, forward=forward)
