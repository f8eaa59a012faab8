"""Cut a model into stages: consecutive links of the chain that the task says it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from torch import nn

from paceline.errors import StrategyError
from paceline.parallel.pipeline.model_chain import check_chain, module_chain
from paceline.parallel.pipeline.rechunk import check_sample_independence
from paceline.parallel.pipeline.strategy_schedule import build_checked_table
from paceline.parallel.placement import PipelineTransform
from paceline.parallel.sharded_model import ModelPartition
from paceline.state.slot import TensorSlot, trained_parameters
from paceline.task import Task

if TYPE_CHECKING:
    from paceline.parallel.session_context import SessionContext, TaskMaterial


@dataclass(frozen=True)
class StagePartition:
    """One rank's stage.

    Args:
        stage: its index.
        num_stages: how many there are.
        chunks: the modules that it runs, in order, by chunk of the model.
        holders: by name of every trained parameter, the stages that use it, ascending.
        homes: by name of those that this stage uses, in which of its chunks.
        parts: by stage, in how many parts it runs each micro-batch.
    """

    stage: int
    num_stages: int
    chunks: Sequence[Sequence[nn.Module]]
    holders: Mapping[str, tuple[int, ...]]
    homes: Mapping[str, int]
    parts: Sequence[int]

    @property
    def links(self) -> list[nn.Module]:
        """All modules that it runs."""
        return [link for chunk in self.chunks for link in chunk]

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    def chunk_of(self, name: str) -> int:
        """The chunk that uses a parameter of this stage."""
        return self.homes[name]

    @property
    def shared(self) -> list[str]:
        """Names of what several stages use."""
        return [name for name, stages in self.holders.items() if len(stages) > 1]

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


def partition_model(
    task: Task,
    model: nn.Module,
    num_stages: int,
    stage: int,
    num_chunks: int = 1,
    lengths: Sequence[int] | None = None,
    *,
    divided: Sequence[int] = (),
) -> StagePartition:
    """The links of one stage; all chunks have about equal numbers of parameters.

    Args:
        lengths: or these numbers of links, by chunk of the model.
        divided: by stage, in how many parts it runs each micro-batch; one if there are none.
    Raises:
        TaskError: the model is no chain, its links are not the model, or samples see each other where a
            micro-batch is run in parts.
        StrategyError: fewer links than chunks, or two chunks of a stage share a weight.
    """
    links = module_chain(task, model)
    check_chain(task, model, links)
    chunks = _split_chunks(links, num_stages * num_chunks, lengths)
    used = [{p for link in chunk for p in link.parameters()} for chunk in chunks]
    own = range(stage, len(chunks), num_stages)
    trained = trained_parameters(model)
    holders = {
        slot.name: tuple(sorted({k % num_stages for k in range(len(chunks)) if p in used[k]}))
        for slot, p in trained.items()
    }
    homes = _chunk_by_parameter(trained, [used[place] for place in own], stage)
    divided = divided or [1] * num_stages
    check_sample_independence(task, model, chunks, divided)
    return StagePartition(stage, num_stages, [chunks[k] for k in own], holders, homes, divided)


def _split_chunks(
    links: Sequence[nn.Module], number: int, lengths: Sequence[int] | None
) -> list[list[nn.Module]]:
    weights = [sum(p.numel() for p in link.parameters()) for link in links]
    places = partition_evenly(weights, number) if lengths is None else partition_at(lengths, weights, number)
    return [[links[i] for i in place] for place in places]


def _chunk_by_parameter(
    trained: Mapping[TensorSlot, nn.Parameter], used: Sequence[set[nn.Parameter]], stage: int
) -> dict[str, int]:
    """By name, the chunk of a stage that uses a parameter."""
    homes: dict[str, int] = {}
    for chunk, own in enumerate(used):
        for name in (slot.name for slot, p in trained.items() if p in own):
            if name in homes:
                raise StrategyError(
                    f"two chunks of stage {stage} share '{name}', and their gradients leave apart",
                    next_step="choose schedule=1f1b, or another number of stages",
                )
            homes[name] = chunk
    return homes


def partition_at(lengths: Sequence[int], weights: Sequence[int], num_parts: int) -> list[range]:
    """Contiguous parts of given lengths, each with parameters; pure.

    Raises:
        StrategyError: they are not so many, do not add up to the chain, or one has no parameters.
    """
    ends = [*accumulate(lengths, initial=0)]
    places = [range(start, stop) for start, stop in pairwise(ends)]
    said = f"stages={','.join(map(str, lengths))}"
    why = ""
    if len(lengths) != num_parts:
        why = f"names {len(lengths)} of {num_parts} stages, or chunks of them"
    elif ends[-1] != len(weights):
        why = f"has {ends[-1]} modules, and the chain of the model {len(weights)}"
    elif not all(any(weights[i] for i in place) for place in places):
        why = "leaves a stage without parameters"
    if why:
        raise StrategyError(f"{said} {why}", next_step="stages=time finds some that are even here")
    return places


def partition_evenly(
    weights: Sequence[int],
    num_parts: int,
    sizes: Sequence[int] | None = None,
    allowed: Callable[[int, range], bool] = lambda part, place: True,
) -> list[range]:
    """Contiguous parts, none without parameters: the heaviest as light as possible, the others as even; pure.

    Args:
        weights: of what is evened out: numbers of parameters, or times.
        sizes: numbers of parameters, where the weights are something else.
        allowed: whether a part may be this place.
    Returns:
        The parts; nothing if no cut is allowed.
    Raises:
        StrategyError: fewer links with parameters than parts.
    """
    sizes = weights if sizes is None else sizes
    _require_enough(sizes, num_parts)
    sums, held = ([*accumulate(values, initial=0)] for values in (weights, sizes))
    best = {0: (0, 0, list[range]())}  # by end: heaviest part, sum of squares, parts
    for part in range(num_parts):
        found: dict[int, tuple[int, int, list[range]]] = {}
        for end in range(1, len(weights) + 1):
            options = [
                _extend_partition(before, range(start, end), sums)
                for start, before in best.items()
                if held[end] > held[start] and allowed(part, range(start, end))
            ]
            if options:
                found[end] = min(options, key=lambda option: option[:2])
        best = found
    return best[len(weights)][2] if len(weights) in best else []


def _require_enough(sizes: Sequence[int], num_parts: int) -> None:
    heavy = sum(size > 0 for size in sizes)
    if num_parts > heavy:
        raise StrategyError(
            f"{num_parts} stages, or chunks of them: the model is a chain of {heavy} modules with parameters",
            next_step=f"use at most {heavy} in all: pipeline, times the chunks of schedule=interleaved:V",
        )


def _extend_partition(
    before: tuple[int, int, list[range]], part: range, sums: Sequence[int]
) -> tuple[int, int, list[range]]:
    weight = sums[part.stop] - sums[part.start]
    return max(before[0], weight), before[1] + weight**2, [*before[2], part]


def partition_into_stages(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """Consecutive layers on consecutive ranks.

    Raises:
        StrategyError: the model is compiled whole, has too few layers, or shares a weight too often; or the
            schedule cannot run.
        TaskError: it is no chain.
    """
    if context.recipe.runtime.compile:
        raise StrategyError(
            "runtime.compile compiles the whole model, and a stage runs a part of it",
            next_step="set runtime.compile = false, or choose a strategy without pipeline",
        )
    stages = context.mesh.axes["pipeline"]
    table = build_checked_table(context.recipe, context.shards)
    lengths = context.recipe.strategy.stage_lengths
    place = stages.size, stages.rank, table.chunks, lengths
    cut = partition_model(material.task, material.model, *place, divided=table.parts)
    if context.recipe.is_ordered:
        _require_one_addition(material, cut)
    return ModelPartition(PipelineTransform(cut.holders, cut.homes), stage=cut)


def _require_one_addition(material: TaskMaterial, cut: StagePartition) -> None:
    """Where sums have one order, at most two modules on several stages may use one tensor."""
    links = module_chain(material.task, material.model)
    tensors = {slot.name: p for slot, p in trained_parameters(material.model).items()}
    for name in cut.shared:
        users = sum(any(p is tensors[name] for p in link.parameters()) for link in links)
        if users > 2:
            raise StrategyError(
                f"{users} modules on several stages share '{name}', and with more than two the order of their"
                " sum would depend on the stages",
                next_step="leave out reproducible, or choose a strategy without pipeline",
            )
