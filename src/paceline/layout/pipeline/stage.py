"""Cut a model into stages: consecutive links of the chain that the task says it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from paceline.errors import StrategyError
from paceline.layout.pipeline.chain import chain_of, check_chain
from paceline.slot import trained_parameters
from paceline.task import Task


@dataclass(frozen=True)
class Cut:
    """One rank's stage.

    Args:
        stage: its index.
        num_stages: how many there are.
        chunks: the modules that it runs, in order, by chunk of the model.
        holders: by name of every trained parameter, the stages that use it, ascending.
        homes: by name of those that this stage uses, in which of its chunks.
    """

    stage: int
    num_stages: int
    chunks: Sequence[Sequence[nn.Module]]
    holders: Mapping[str, tuple[int, ...]]
    homes: Mapping[str, int]

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


def cut_model(task: Task, model: nn.Module, num_stages: int, stage: int, num_chunks: int = 1) -> Cut:
    """The links of one stage; all chunks have about equal numbers of parameters.

    Raises:
        TaskError: the model is no chain, or its links are not the model.
        StrategyError: fewer links than chunks, or two chunks of a stage share a weight.
    """
    links = chain_of(task, model)
    check_chain(task, model, links)
    weights = [sum(p.numel() for p in link.parameters()) for link in links]
    places = cut_evenly(weights, num_stages * num_chunks)
    used = [{p for i in place for p in links[i].parameters()} for place in places]
    own = range(stage, len(places), num_stages)
    trained = trained_parameters(model)
    holders = {
        slot.name: tuple(sorted({k % num_stages for k in range(len(places)) if p in used[k]}))
        for slot, p in trained.items()
    }
    homes: dict[str, int] = {}
    for chunk, place in enumerate(own):
        for name in (slot.name for slot, p in trained.items() if p in used[place]):
            if name in homes:
                raise StrategyError(
                    f"two chunks of stage {stage} share '{name}', and their gradients leave apart",
                    next_step="choose schedule=1f1b, or another number of stages",
                )
            homes[name] = chunk
    return Cut(stage, num_stages, [[links[i] for i in places[k]] for k in own], holders, homes)


def cut_evenly(weights: Sequence[int], num_parts: int) -> list[range]:
    """Contiguous parts, none of weight 0: the heaviest as light as possible, the others as even; pure.

    Raises:
        StrategyError: fewer links with parameters than parts.
    """
    heavy = sum(w > 0 for w in weights)
    if num_parts > heavy:
        raise StrategyError(
            f"{num_parts} stages, or chunks of them: the model is a chain of {heavy} modules with parameters",
            next_step=f"use at most {heavy} in all: pipeline, times the chunks of schedule=interleaved:V",
        )
    sums = [sum(weights[:k]) for k in range(len(weights) + 1)]
    best = {0: (0, 0, list[range]())}  # by end: heaviest part, sum of squares, parts
    for _ in range(num_parts):
        found: dict[int, tuple[int, int, list[range]]] = {}
        for end in range(1, len(weights) + 1):
            options = [
                _extended(before, range(start, end), sums)
                for start, before in best.items()
                if sums[end] > sums[start]
            ]
            if options:
                found[end] = min(options, key=lambda option: option[:2])
        best = found
    return best[len(weights)][2]


def _extended(
    before: tuple[int, int, list[range]], part: range, sums: Sequence[int]
) -> tuple[int, int, list[range]]:
    weight = sums[part.stop] - sums[part.start]
    return max(before[0], weight), before[1] + weight**2, [*before[2], part]
