"""Partition of a model into pipeline stages: consecutive links of the chain that the task names.

Stages have about equal numbers of parameters, unless the strategy gives their lengths. The partition is
pure; what a rank does not hold is freed later, by `sharded_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from torch import nn

from paceline.errors import StrategyError, format_count
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
        num_stages: number of stages.
        chunks: modules that it runs, in order, by chunk of the model.
        holders: by name of every trained parameter, the stages that use it, ascending.
        homes: by name of the parameters of this stage, the index of the chunk that uses it.
        parts: by stage, the number of parts in which it runs each micro-batch.
    """

    stage: int
    num_stages: int
    chunks: Sequence[Sequence[nn.Module]]
    holders: Mapping[str, tuple[int, ...]]
    homes: Mapping[str, int]
    parts: Sequence[int]

    @property
    def links(self) -> list[nn.Module]:
        """All modules that the stage runs."""
        return [link for chunk in self.chunks for link in chunk]

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    def chunk_of(self, name: str) -> int:
        """Return the chunk that uses a parameter of this stage."""
        return self.homes[name]

    @property
    def shared(self) -> list[str]:
        """Names of parameters that several stages use."""
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
    """Return the part of the model that one stage runs; all chunks have about equal numbers of parameters.

    Args:
        lengths: numbers of links by chunk of the model, instead of equal numbers of parameters.
        divided: by stage, the number of parts in which it runs each micro-batch; 1 by default.
    Raises:
        TaskError: the model is no chain, its links do not compute what the model computes, or samples depend
            on each other where a micro-batch is run in parts.
        StrategyError: fewer links than chunks, or two chunks of a stage share a weight.
    """
    links = module_chain(task, model)
    check_chain(task, model, links)
    chunks = _split_chunks(links, num_stages * num_chunks, lengths)
    used = [{p for link in chunk for p in link.parameters()} for chunk in chunks]
    local_chunks = range(stage, len(chunks), num_stages)
    trained = trained_parameters(model)
    holders = {
        slot.name: tuple(sorted({k % num_stages for k in range(len(chunks)) if p in used[k]}))
        for slot, p in trained.items()
    }
    homes = _chunk_by_parameter(trained, [used[k] for k in local_chunks], stage)
    divided = divided or [1] * num_stages
    check_sample_independence(task, model, chunks, divided)
    return StagePartition(stage, num_stages, [chunks[k] for k in local_chunks], holders, homes, divided)


def _split_chunks(
    links: Sequence[nn.Module], number: int, lengths: Sequence[int] | None
) -> list[list[nn.Module]]:
    weights = [sum(p.numel() for p in link.parameters()) for link in links]
    spans = partition_evenly(weights, number) if lengths is None else partition_at(lengths, weights, number)
    return [[links[i] for i in span] for span in spans]


def _chunk_by_parameter(
    trained: Mapping[TensorSlot, nn.Parameter], used: Sequence[set[nn.Parameter]], stage: int
) -> dict[str, int]:
    """Return by name the chunk of a stage that uses a parameter."""
    homes: dict[str, int] = {}
    for chunk, parameters in enumerate(used):
        for name in (slot.name for slot, p in trained.items() if p in parameters):
            if name in homes:
                raise StrategyError(
                    f"two chunks of stage {stage} share '{name}', whose gradients are reduced separately",
                    next_step="choose schedule=1f1b, or another number of stages",
                )
            homes[name] = chunk
    return homes


def partition_at(lengths: Sequence[int], weights: Sequence[int], num_parts: int) -> list[range]:
    """Return contiguous parts of given lengths, each with parameters; the last length may be left out; pure.

    Raises:
        StrategyError: there are not as many lengths as parts, they do not add up to the chain, or a part has
            no parameters.
    """
    term = f"stages={','.join(map(str, lengths))}"
    if len(lengths) == num_parts - 1:
        lengths = [*lengths, max(0, len(weights) - sum(lengths))]
    ends = [*accumulate(lengths, initial=0)]
    spans = [range(start, stop) for start, stop in pairwise(ends)]
    problem = ""
    if len(lengths) != num_parts:
        problem = f"names {len(lengths)} of {num_parts} stages, or chunks of them"
    elif ends[-1] != len(weights):
        problem = f"has {ends[-1]} modules, but the chain of the model has {len(weights)}"
    elif not all(any(weights[i] for i in span) for span in spans):
        problem = "leaves a stage without parameters"
    if problem:
        raise StrategyError(f"{term} {problem}", next_step="use stages=time, which measures even stages")
    return spans


def partition_evenly(
    weights: Sequence[int],
    num_parts: int,
    sizes: Sequence[int] | None = None,
    allowed: Callable[[int, range], bool] = lambda index, span: True,
) -> list[range]:
    """Return contiguous parts, each with parameters, such that the heaviest is as light as possible; pure.

    Among such partitions the others are as even as possible.

    Args:
        weights: of the links: numbers of parameters, or times.
        sizes: numbers of parameters, if the weights are something else.
        allowed: returns whether part number `index` may be this span.
    Returns:
        The parts; empty if no partition is allowed.
    Raises:
        StrategyError: fewer links with parameters than parts.
    """
    sizes = weights if sizes is None else sizes
    _require_enough(sizes, num_parts)
    sums, num_parameters = ([*accumulate(values, initial=0)] for values in (weights, sizes))
    # Dynamic programming over the end of the last part: heaviest part, sum of squares, parts.
    best = {0: (0, 0, list[range]())}
    for index in range(num_parts):
        extended: dict[int, tuple[int, int, list[range]]] = {}
        for end in range(1, len(weights) + 1):
            options = [
                _extend_partition(before, range(start, end), sums)
                for start, before in best.items()
                if num_parameters[end] > num_parameters[start] and allowed(index, range(start, end))
            ]
            if options:
                extended[end] = min(options, key=lambda option: option[:2])
        best = extended
    return best[len(weights)][2] if len(weights) in best else []


def _require_enough(sizes: Sequence[int], num_parts: int) -> None:
    heavy = sum(size > 0 for size in sizes)
    if num_parts > heavy:
        raise StrategyError(
            f"{num_parts} stages or chunks, but the model's chain has only {format_count(heavy, 'module')}"
            " with parameters",
            next_step=f"use at most {heavy} in all: pipeline times the chunks of schedule=interleaved:V",
        )


def _extend_partition(
    partition: tuple[int, int, list[range]], span: range, sums: Sequence[int]
) -> tuple[int, int, list[range]]:
    weight = sums[span.stop] - sums[span.start]
    return max(partition[0], weight), partition[1] + weight**2, [*partition[2], span]


def partition_into_stages(context: SessionContext, material: TaskMaterial) -> ModelPartition:
    """Return the partition of pipeline=N: consecutive layers on consecutive ranks.

    Raises:
        StrategyError: the model is compiled whole, has too few layers, or shares a weight too often; or the
            schedule cannot run.
        TaskError: the model is no chain.
    """
    if context.recipe.runtime.compile:
        raise StrategyError(
            "runtime.compile compiles the whole model, but a stage runs only a part of it",
            next_step="set runtime.compile = false, or choose a strategy without pipeline",
        )
    stages = context.mesh.axes["pipeline"]
    table = build_checked_table(context.recipe, context.shards)
    lengths = context.recipe.strategy.stage_lengths
    partition = partition_model(
        material.task,
        material.model,
        stages.size,
        stages.rank,
        table.chunks,
        lengths,
        divided=table.parts,
    )
    if context.recipe.is_ordered:
        _require_one_addition(material, partition)
    return ModelPartition(PipelineTransform(partition.holders, partition.homes), stage=partition)


def _require_one_addition(material: TaskMaterial, partition: StagePartition) -> None:
    """Raise StrategyError if more than two modules on several stages share a tensor."""
    links = module_chain(material.task, material.model)
    tensors = {slot.name: p for slot, p in trained_parameters(material.model).items()}
    for name in partition.shared:
        users = sum(any(p is tensors[name] for p in link.parameters()) for link in links)
        # Two gradients add up to the same bits in either order; three do not.
        if users > 2:
            raise StrategyError(
                f"{users} modules on several stages share '{name}', and the order of a sum of more than two"
                " gradients would depend on the stages",
                next_step="leave out reproducible, or choose a strategy without pipeline",
            )
