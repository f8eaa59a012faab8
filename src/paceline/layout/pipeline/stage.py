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
        links: the modules that it runs, in order.
        holders: by name of every trained parameter, the stages that use it, ascending.
    """

    stage: int
    num_stages: int
    links: Sequence[nn.Module]
    holders: Mapping[str, tuple[int, ...]]

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


def cut_model(task: Task, model: nn.Module, num_stages: int, stage: int) -> Cut:
    """The links of one stage; stages have about equal numbers of parameters.

    Raises:
        TaskError: the model is no chain, or its links are not the model.
        StrategyError: fewer links than stages.
    """
    links = chain_of(task, model)
    check_chain(task, model, links)
    weights = [sum(p.numel() for p in link.parameters()) for link in links]
    places = cut_evenly(weights, num_stages)
    used = [{p for i in place for p in links[i].parameters()} for place in places]
    holders = {
        slot.name: tuple(k for k in range(num_stages) if p in used[k])
        for slot, p in trained_parameters(model).items()
    }
    return Cut(stage, num_stages, [links[i] for i in places[stage]], holders)


def cut_evenly(weights: Sequence[int], num_parts: int) -> list[range]:
    """Contiguous parts, none of weight 0: the heaviest as light as possible, the others as even; pure.

    Raises:
        StrategyError: fewer links with parameters than parts.
    """
    heavy = sum(w > 0 for w in weights)
    if num_parts > heavy:
        raise StrategyError(
            f"pipeline={num_parts}: the model is a chain of {heavy} modules with parameters",
            next_step=f"use at most {heavy} stages",
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
