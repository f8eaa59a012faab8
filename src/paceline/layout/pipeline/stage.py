"""Cut a model into stages: consecutive links of the chain that the task says it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from paceline.errors import StrategyError
from paceline.layout.pipeline.chain import chain_of, check_chain
from paceline.slot import Slot
from paceline.task import Task


@dataclass(frozen=True)
class Cut:
    """One rank's stage.

    Args:
        stage: its index.
        num_stages: how many there are.
        links: the modules that it runs, in order.
        own: by parameter index of the whole model, whether this stage trains it.
        tied: indices of parameters that several stages hold, with the first stage that does.
    """

    stage: int
    num_stages: int
    links: Sequence[nn.Module]
    own: Sequence[bool]
    tied: dict[int, int]

    @property
    def reduced(self) -> list[int]:
        """Indices of what it sums over the replicas: its own without what an earlier stage holds too."""
        return [i for i, own in enumerate(self.own) if own and self.tied.get(i, self.stage) == self.stage]

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


def cut_model(
    task: Task, model: nn.Module, slots: dict[Slot, nn.Parameter], num_stages: int, stage: int
) -> Cut:
    """The links of one stage; stages have about equal numbers of parameters.

    Raises:
        TaskError: the model is no chain, or its links are not the model.
        StrategyError: fewer links than stages.
    """
    links = chain_of(task, model)
    check_chain(task, model, links)
    weights = [sum(p.numel() for p in link.parameters()) for link in links]
    places = cut_evenly(weights, num_stages)
    holders = [_held_by([links[i] for i in place], slots) for place in places]
    tied = {
        index: min(s for s, held in enumerate(holders) if held[index])
        for index in range(len(slots))
        if sum(held[index] for held in holders) > 1
    }
    return Cut(stage, num_stages, [links[i] for i in places[stage]], holders[stage], tied)


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


def _held_by(links: Sequence[nn.Module], slots: dict[Slot, nn.Parameter]) -> list[bool]:
    held = {p for link in links for p in link.parameters()}
    return [p in held for p in slots.values()]
